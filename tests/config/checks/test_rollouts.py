import pytest

from megarl.config import EvalConfig, TrainConfig, check_config, load_config, resolve

RECIPE = "recipes/dapo_cpu.yaml"
ROLLOUT, LORA = "actor_rollout_ref.rollout", ["actor_rollout_ref.model.lora.rank=4"]


def problems(*overrides, schema=TrainConfig, recipe=RECIPE):
    """What is wrong with a recipe under overrides, but for files that are not there."""
    config = load_config(schema, recipe, overrides)
    try:
        check_config(config, data_files=False)
    except ValueError as error:
        lines = str(error).split("\n  - ")[1:]
        return [line for line in lines if "outputs/demo" not in line]
    return []


def test_the_recipe_is_sound_and_gen_batch_size_defaults_to_the_steps_prompts():
    assert problems() == []
    assert resolve(load_config(TrainConfig, RECIPE)).data.gen_batch_size == 32
    ppo = load_config(TrainConfig, "recipes/quickstart_ppo.yaml")
    assert ppo.data.gen_batch_size is None and resolve(ppo).data.gen_batch_size == 128


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["algorithm.filter_groups.enable=false"], "data.gen_batch_size=32 is not data.train_batch_size=16"),
        (
            ["algorithm.filter_groups.max_num_gen_batches=1", "data.gen_batch_size=8"],
            "no step could be filled",
        ),
        (["algorithm.filter_groups.metric=seq_final_reward"], "use seq_reward"),
        (["reward_model.overlong_buffer.len=9"], "len=9 is more than data.max_response_length=8"),
        (["trainer.save_freq=0"], "-1 (never) or at least 1"),
        (["data.val_sets.a/b.files=x.parquet"], "'a/b': a name may have letters"),
        (
            ["data.val_sets.a.files=x.parquet", "data.val_sets.a.max_samples=0"],
            "data.val_sets.a.max_samples=0: it must be -1 (all) or at least 1",
        ),
        ([f"{ROLLOUT}.lora_sync=merged"], "lora_sync=merged, but there are no adapters"),
        (
            [*LORA, f"{ROLLOUT}.lora_sync=adapters", f"{ROLLOUT}.quantization=fp8"],
            "lora_sync=adapters beside rollout.quantization=fp8",
        ),
        (
            [*LORA, f"{ROLLOUT}.lora_sync=adapters", f"{ROLLOUT}.sync_skip_unchanged=true"],
            "rollout.sync_skip_unchanged=true is of merged weights: leave one of them out",
        ),
    ],
)
def test_what_does_not_fit_is_told(overrides, told):
    found = problems(*overrides)
    assert len(found) == 1 and told in found[0]


def test_one_response_a_prompt_has_no_spread():
    assert any(
        "drops prompts whose responses do not differ" in line
        for line in problems("actor_rollout_ref.rollout.n=1")
    )


def test_all_is_told_at_once():
    found = problems("reward_model.overlong_buffer.len=9", "algorithm.filter_groups.metric=seq_final_reward")
    assert len(found) == 2


def test_files_of_sets_must_be_there():
    config = load_config(TrainConfig, RECIPE, ["data.val_sets.hard.files=nowhere.parquet"])
    with pytest.raises(ValueError, match=r"data\.val_sets\.hard\.files.*nowhere\.parquet"):
        check_config(config)


def test_evaluation_needs_problems():
    recipe = "recipes/quickstart_eval.yaml"
    assert problems("data.val_files=null", schema=EvalConfig, recipe=recipe) == [
        "data.val_files is required (or data.val_sets): the problems to answer"
    ]


def test_sets_alone_are_enough_to_validate():
    assert problems("data.val_files=null", "data.val_sets.hard.files=x.parquet") == []
    assert problems("data.val_files=null")  # test_freq needs something
