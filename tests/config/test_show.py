"""`megarl config`: the resolved configuration, the origin of each value, and settings without effect."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megarl.cli.main import main
from megarl.config import EvalConfig, RMConfig, SFTConfig, TrainConfig, resolve, to_dict
from megarl.config.loading import SCHEMAS, load_with_origins
from megarl.config.schema import section_type, table_type, walk
from megarl.config.show import notes, reference, resolved_keys, said_here, source_of, yaml_text

ACTOR = "actor_rollout_ref.actor"

# Overrides with which `resolve` fills in or changes as many values as possible.
CASES = [
    [],
    [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size_per_gpu=2"],
    [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", "critic.ppo_max_token_len_per_gpu=99"],
    [f"{ACTOR}.clip_range=[0.2, 0.3]", f"{ACTOR}.grad_clip=0.5", "critic.grad_clip=2"],
    ["actor_rollout_ref.model.enable_gradient_checkpointing=true", "critic.megatron=null"],
    ["actor_rollout_ref.model.enable_gradient_checkpointing=true", "critic.model.enable_gradient_checkpointing=false",
     "critic.megatron=null"],
    ["actor_rollout_ref.teachers={a: {}, b: {megatron: {}}}", f"{ACTOR}.use_kl_loss=true"],
    ["actor_rollout_ref.teachers={a: {engine: {}, resource_pool: b}}", "resource_pools={global: {n_gpus_per_node: 4}, b: {n_gpus_per_node: 2}}", f"{ACTOR}.use_kl_loss=true"],
    ["critic.model.enable_gradient_checkpointing=true", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1"],
    ["resource_pools={a: {n_gpus_per_node: 4}}"],
    ["reward_model={enable: true, model: {path: x}}"],
    [f"{ACTOR}.policy_loss.loss_mode=gspo"],
    [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"],
    ["trainer.default_local_dir=here"],
    ["data.tokenizer=there"],
]  # fmt: skip


@pytest.mark.parametrize("overrides", CASES)
def test_every_value_that_was_filled_in_or_changed_says_where_it_comes_from(
    train_yaml: Path, overrides: list[str]
) -> None:
    config, origins = load_with_origins(TrainConfig, train_yaml, overrides)
    assert resolve(resolve(config)) == resolve(config)
    keys = resolved_keys(config, origins)
    assert [key for key, (_, origin) in keys.items() if "None" in origin] == []
    assert yaml.safe_load(yaml_text(keys)).keys() == to_dict(resolve(config)).keys()


def test_sources_name_keys_of_the_same_role() -> None:
    assert source_of("critic.ppo_epochs") == f"{ACTOR}.ppo_epochs"
    assert source_of("critic.optim.clip_grad") == "critic.grad_clip"
    assert source_of("trainer.seed") is None


def test_where_each_value_comes_from(train_yaml: Path) -> None:
    config, origins = load_with_origins(
        TrainConfig,
        train_yaml,
        ["trainer.seed=7", f"{ACTOR}.grad_clip=0.5", "critic.megatron=null", "data.seed=${trainer.seed}"],
    )
    keys = resolved_keys(config, origins)
    assert keys["data.train_batch_size"] == (16, f"{train_yaml} line 4")
    assert keys["trainer.seed"] == (7, "override 'trainer.seed=7'")
    assert keys["data.seed"] == (7, "override 'data.seed=${trainer.seed}'")
    assert keys["trainer.total_epochs"] == (1, "default")
    assert keys[f"{ACTOR}.optim.clip_grad"] == (0.5, f"from {ACTOR}.grad_clip")
    assert keys[f"{ACTOR}.grad_clip"] == (
        None,
        f"moved to {ACTOR}.optim.clip_grad (0.5 in override '{ACTOR}.grad_clip=0.5')",
    )
    assert keys["critic.megatron.pipeline_model_parallel_size"] == (
        2,
        f"from {ACTOR}.megatron.pipeline_model_parallel_size",
    )
    assert keys["critic.ppo_mini_batch_size"] == (8, f"from {ACTOR}.ppo_mini_batch_size")
    assert keys["resource_pools.global.n_gpus_per_node"] == (4, "from trainer.n_gpus_per_node")


def test_the_command_prints_yaml_with_comments_and_notes(
    train_yaml: Path, capsys: pytest.CaptureFixture
) -> None:
    switch = ["algorithm.kl_ctrl.kl_coef=0.1"]
    assert main(["config", str(train_yaml), *switch]) == 0
    text = capsys.readouterr().out
    assert f"  train_batch_size: 16  # {train_yaml} line 4\n" in text
    assert "    kl_coef: 0.1  # override 'algorithm.kl_ctrl.kl_coef=0.1'\n" in text
    assert "# note: algorithm.kl_ctrl.kl_coef has no effect without algorithm.use_kl_in_reward=true" in text
    config, _ = load_with_origins(TrainConfig, train_yaml, switch)
    again = train_yaml.parent / "again.yaml"
    again.write_text(text)
    assert load_with_origins(TrainConfig, again)[0] == resolve(config)


def test_changed_keys_are_a_recipe_of_the_same_run(train_yaml: Path, capsys: pytest.CaptureFixture) -> None:
    given = ["trainer.seed=7", "trainer.total_epochs=1", f"{ACTOR}.grad_clip=0.5", "trainer.logger=console",
             "resource_pools={global: {n_gpus_per_node: 4}}", "data.apply_chat_template_kwargs={a: 1}"]  # fmt: skip
    assert main(["config", str(train_yaml), *given, "--changed"]) == 0
    text = capsys.readouterr().out
    assert "  seed: 7  # override 'trainer.seed=7'\n" in text and "logger: [console]" in text
    assert "total_epochs" not in text  # it has its default
    assert "ppo_epochs: 2" in text and "clip_grad" not in text  # it follows from other keys
    assert len(text.splitlines()) < 60
    again = train_yaml.parent / "again.yaml"
    again.write_text(text)
    config, _ = load_with_origins(TrainConfig, train_yaml, given)
    assert load_with_origins(TrainConfig, again)[0] == config
    assert main(["config", str(train_yaml), "--changed", "--json"]) == 0
    assert "data.train_batch_size" in json.loads(capsys.readouterr().out)["keys"]


def test_the_command_prints_json(train_yaml: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["config", "--json", str(train_yaml), "trainer.seed=7"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["keys"]["trainer.seed"] == {"value": 7, "from": "override 'trainer.seed=7'"}
    assert printed["notes"] == []


def test_what_is_wrong_is_said_after_the_tree(train_yaml: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["config", str(train_yaml), "trainer.n_gpus_per_node=3"]) == 2
    printed = capsys.readouterr()
    assert "  n_gpus_per_node: 3  # override" in printed.out
    assert "needs 4 devices" in printed.err


def test_recipes_of_other_commands(folder: Path, capsys: pytest.CaptureFixture) -> None:
    required = [f"model.path={folder}/model", f"data.val_files={folder}/val.parquet", "data.max_prompt_length=8",
                "data.max_response_length=8"]  # fmt: skip
    assert main(["config", "--command=eval", *required]) == 0
    assert f"  path: {folder}/model  # override" in capsys.readouterr().out
    assert main(["config"]) == 2
    assert "needs a recipe, key=value, or --reference" in capsys.readouterr().err


@pytest.mark.parametrize("schema", [SFTConfig, EvalConfig])
def test_other_commands_have_no_notes(schema: type, request: pytest.FixtureRequest) -> None:
    config = request.getfixturevalue({SFTConfig: "sft", EvalConfig: "evaluation"}[schema])()
    keys = resolved_keys(config, {})
    assert notes(config, set()) == [] and not any("None" in origin for _, origin in keys.values())


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ([f"{ACTOR}.use_dynamic_bsz=true"], None),
        (
            [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"],
            f"{ACTOR}.ppo_max_token_len_per_gpu=128 is not used: {ACTOR}.use_dynamic_bsz=false cuts micro-batches by "
            f"trajectories, at most {ACTOR}.ppo_micro_batch_size_per_gpu",
        ),
        (
            ["critic.use_dynamic_bsz=true", "critic.ppo_micro_batch_size_per_gpu=2"],
            "critic.ppo_micro_batch_size_per_gpu=2 is not used: critic.use_dynamic_bsz=true cuts micro-batches by tokens, "
            "at most critic.ppo_max_token_len_per_gpu",
        ),
        (
            ["critic.ppo_micro_batch_size_per_gpu=25"],
            "critic.ppo_micro_batch_size_per_gpu=25 is never reached: a mini-batch has 24 trajectories in all",
        ),
        (["critic.ppo_micro_batch_size_per_gpu=24"], None),
        (
            ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.horizon=999"],
            "algorithm.kl_ctrl.horizon has no effect without algorithm.kl_ctrl.type=adaptive",
        ),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, horizon: 999}"], None),
        (
            [f"{ACTOR}.use_kl_loss=true", "algorithm.kl_penalty=abs"],
            "algorithm.kl_penalty has no effect without algorithm.use_kl_in_reward=true",
        ),
        (
            ["reward_model.micro_batch_size_per_gpu=4"],
            "reward_model.micro_batch_size_per_gpu has no effect without reward_model.enable=true",
        ),
    ],
)
def test_notes_name_what_was_given_in_vain(
    train_yaml: Path, overrides: list[str], note: str | None, train: Callable[..., TrainConfig]
) -> None:
    config, origins = load_with_origins(TrainConfig, train_yaml, overrides)
    assert notes(config, origins) == ([] if note is None else [note])


RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def test_what_a_base_gives_in_vain_is_not_noted(train_yaml: Path) -> None:
    recipe = train_yaml.parent / "mine.yaml"
    train_yaml.write_text(train_yaml.read_text() + "algorithm: {kl_ctrl: {kl_coef: 0.1}}\n")
    recipe.write_text("base: train.yaml\nalgorithm: {kl_penalty: abs}\n")
    config, origins = load_with_origins(TrainConfig, recipe)
    (note,) = notes(config, said_here(origins, recipe))
    assert note.startswith("algorithm.kl_penalty has no effect")


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_say_nothing_in_vain(recipe: Path) -> None:
    command = next((name for name in ("eval", "sft", "rm", "dpo") if name in recipe.stem), "train")
    config, origins = load_with_origins(SCHEMAS[command], recipe)
    assert notes(config, said_here(origins, recipe)) == []
    assert [key for key, (_, origin) in resolved_keys(config, origins).items() if "None" in origin] == []


PAGE = Path(__file__).resolve().parents[2] / "docs/config.md"


def test_the_page_is_that_of_this_schema(capsys) -> None:
    """If this fails: megarl config --reference > docs/config.md"""
    assert main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == PAGE.read_text()


def test_every_key_has_a_row_or_stands_in_a_section_that_refers_to_one() -> None:
    page = reference()
    rows = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    shared = dict(re.findall(r"^### `([^`]+)`\n\n.*\n\nThe keys of `([^`]+)`\.$", page, re.MULTILINE))
    assert shared["critic.optim"] == "actor_rollout_ref.actor.optim"
    for schema in (TrainConfig, SFTConfig, RMConfig, EvalConfig):
        for key, _, kind in walk(schema):
            if section_type(kind) is not None or table_type(kind) is not None:
                continue
            there = [
                key,
                *(
                    f"{new}{key.removeprefix(old)}"
                    for old, new in shared.items()
                    if key.startswith(f"{old}.")
                ),
            ]
            assert any(name in rows for name in there), key


def test_a_row_has_type_default_valid_values_and_meaning() -> None:
    page = reference()
    assert "| `data.train_batch_size` | an integer | required | Prompts a step. Valid: ≥ 1. |" in page
    assert (
        "| `trainer.val_before_train` | true or false | `false` | Validate before the first step. |" in page
    )
    assert "| `algorithm.lam` | a number | `1.0` |" in page and "Valid: ≥ 0 and ≤ 1." in page
    assert "| `--rollout-batch-size` | data.train_batch_size=N, prompts a step |" in page
