"""What may be sampled how, and the section multi_turn."""

import pytest

from megarl.config import EvalConfig, TrainConfig, check_config, load_config, resolve
from megarl.config.checks.rollout import NEUTRAL_SAMPLING
from megarl.config.schema.rollout import RolloutConfig, SamplingConfig
from tests.config.conftest import lines_of

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


OTHERS = {
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
}


def test_what_leaves_the_distribution_as_it_is_are_the_defaults():
    assert set(OTHERS) == set(NEUTRAL_SAMPLING)
    for name, value in NEUTRAL_SAMPLING.items():
        assert getattr(RolloutConfig(), name) == getattr(SamplingConfig(), name) == value


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
def test_training_samples_from_the_policy_as_it_is(train, evaluation, name, value):
    (line,) = lines_of(lambda: check_config(train(f"{ROLLOUT}.{name}={value}")))
    assert line.startswith(f"{ROLLOUT}.{name}={value}: training rollouts must sample from ")
    assert f"(rollout.val_kwargs.{name} may be set)" in line
    reason = "not of the cut one" if name in ("top_p", "top_k", "min_p") else "know of no penalty"
    assert reason in line
    check_config(train(f"{ROLLOUT}.val_kwargs.{name}={value}"))
    check_config(evaluation(f"rollout.val_kwargs.{name}={value}"))
    (line,) = lines_of(lambda: check_config(evaluation(f"rollout.{name}={value}")))
    assert line.endswith(f"evaluation reads rollout.val_kwargs.{name}")


def test_penalties_stay_within_what_the_engine_takes(train):
    lines = lines_of(
        lambda: check_config(
            train(
                f"{ROLLOUT}.val_kwargs.repetition_penalty=2.5",
                f"{ROLLOUT}.val_kwargs.frequency_penalty=-3",
                f"{ROLLOUT}.val_kwargs.min_p=1.5",
                f"{ROLLOUT}.stop_token_ids=[5,-1]",
            )
        )
    )
    assert len(lines) == 4 and f"{ROLLOUT}.stop_token_ids=[5, -1]: token ids are not negative" in lines


def test_an_environment_is_named(train, evaluation, tmp_path):
    check_config(train(f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=calculator"))
    check_config(evaluation("rollout.multi_turn.enable=true", "rollout.multi_turn.environment=calculator"))
    (line,) = lines_of(lambda: check_config(train(f"{ROLLOUT}.multi_turn.enable=true")))
    assert line.startswith(f"{ROLLOUT}.multi_turn.environment is required with")
    unknown = ["rollout.multi_turn.enable=true", "rollout.multi_turn.environment=calculater"]
    (line,) = lines_of(lambda: check_config(evaluation(*unknown)))
    assert line.startswith("rollout.multi_turn.environment='calculater' is unknown; megarl has calculator")
    slow = [f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=calculator"]
    (line,) = lines_of(lambda: check_config(train(*slow, f"{ROLLOUT}.multi_turn.step_timeout=600")))
    assert "step_timeout=600 must be less than" in line
    (tmp_path / "mine.py").write_text("")
    check_config(evaluation(*unknown, f"plugins=[{tmp_path}/mine.py]"))  # it may be that file's


def test_keys_of_turns_that_there_are_not_are_refused(train):
    config = train(f"{ROLLOUT}.multi_turn.max_user_turns=2", f"{ROLLOUT}.multi_turn.options={{role: user}}")
    (line,) = lines_of(lambda: check_config(config))
    for name in ("max_user_turns", "options"):
        assert f"{ROLLOUT}.multi_turn.{name}" in line
    assert f"without {ROLLOUT}.multi_turn.enable=true" in line


def test_free_options_arrive_as_they_were_written(train):
    config = train(f"{ROLLOUT}.multi_turn.options={{role: user, tries: [1, 2], deep: {{a: 0.5}}}}")
    found = config.actor_rollout_ref.rollout.multi_turn.options
    assert found == {"role": "user", "tries": [1, 2], "deep": {"a": 0.5}}
