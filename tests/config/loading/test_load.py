"""Reading of files and overrides, and the command that a recipe belongs to."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import (
    MegatronConfig,
    OptimConfig,
    PoolConfig,
    TrainConfig,
    load_config,
    save_config,
    to_dict,
)
from megarl.config.loading import TRAINING, recipe_command
from megarl.config.loading.document import YamlDumper, parse, plain
from megarl.config.loading.recipes import recipes
from tests.config.conftest import lines_of

Train = Callable[..., TrainConfig]


def test_values_from_file_override_and_default(train: Train) -> None:
    config = train("trainer.seed=7", "actor_rollout_ref.actor.optim.betas=[0.8, 0.9]")
    assert config.data.train_batch_size == 16
    assert config.trainer.seed == 7
    assert config.actor_rollout_ref.actor.optim == OptimConfig(lr=1e-6, betas=(0.8, 0.9))
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 0.0
    assert config.critic is not None and config.critic.ppo_epochs is None


def test_later_overrides_win(train: Train) -> None:
    assert train("trainer.seed=7", "trainer.seed=8").trainer.seed == 8


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("1.5E+3", 1500.0), (".5", 0.5), ("3", 3.0), ("1_000.0", 1000.0)]
)
def test_numbers_as_people_write_them(train: Train, text: str, value: float) -> None:
    lr = train(f"actor_rollout_ref.actor.optim.lr={text}").actor_rollout_ref.actor.optim.lr
    assert lr == value and isinstance(lr, float)


def test_whole_floats_are_integers(train: Train) -> None:
    steps = train("trainer.total_training_steps=1e3").trainer.total_training_steps
    assert steps == 1000 and isinstance(steps, int)


@pytest.mark.parametrize("name", ["2026", "1e3", "2026-11-21", "on", "1:30", "007", "null-run"])
def test_names_that_look_like_something_else_stay_text(train: Train, name: str) -> None:
    assert train(f"trainer.experiment_name={name}").trainer.experiment_name == name


def test_null_for_optional(train: Train) -> None:
    assert train("critic=null").critic is None
    assert train("data.val_files=~").data.val_files is None


def test_home_is_expanded_in_paths_only(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    config = train("data.train_files=['~/a.parquet', b.parquet]", "trainer.experiment_name='~/x'")
    assert config.data.train_files == ("/home/ada/a.parquet", "b.parquet")
    assert config.trainer.experiment_name == "~/x"


def test_base_files_are_merged_recursively(folder: Path, train_yaml: Path) -> None:
    (folder / "deeper").mkdir()
    (folder / "deeper" / "mine.yaml").write_text(
        "base: ../train.yaml\n"
        "actor_rollout_ref: {actor: {megatron: {context_parallel_size: 2}}, rollout: {n: 5}}\n"
    )
    config = load_config(TrainConfig, folder / "deeper" / "mine.yaml")
    assert config.actor_rollout_ref.actor.megatron == MegatronConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2
    )
    assert config.actor_rollout_ref.rollout.n == 5
    assert config.trainer.n_gpus_per_node == 4


def test_bases_in_a_circle(folder: Path) -> None:
    (folder / "a.yaml").write_text("base: b.yaml\n")
    (folder / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ValueError, match=r"form a circle: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_config(TrainConfig, folder / "a.yaml")


def test_missing_files_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"configuration file nowhere\.yaml does not exist"):
        load_config(TrainConfig, "nowhere.yaml")
    (folder / "a.yaml").write_text("base: gone.yaml\n")
    with pytest.raises(ValueError, match=r"gone\.yaml \(the base of .*a\.yaml\) does not exist"):
        load_config(TrainConfig, folder / "a.yaml")


def test_interpolation(train: Train) -> None:
    config = train(
        "trainer.experiment_name=lr-${actor_rollout_ref.actor.optim.lr}",
        "data.seed=${trainer.seed}",
        "critic.megatron=${actor_rollout_ref.actor.megatron}",
    )
    assert config.trainer.experiment_name == "lr-1e-06"
    assert config.data.seed == 1  # the default of trainer.seed
    assert config.critic is not None and config.critic.megatron == config.actor_rollout_ref.actor.megatron


def test_interpolation_that_leads_nowhere(train: Train) -> None:
    (line,) = lines_of(lambda: train("data.seed=${trainer.sed}"))
    assert line.startswith("override 'data.seed=${trainer.sed}': data.seed=${trainer.sed}: ")
    assert "'trainer.sed' not found" in line


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("actor_rollout_ref.actor.clip_ration", "actor_rollout_ref.actor.clip_ratio"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("actor_rollout_ref.actor.optim.clip_gradient", "actor_rollout_ref.actor.optim.clip_grad"),
        ("+trainer.total_epoch", "trainer.total_epochs"),
        ("adv_estimator", "algorithm.adv_estimator"),
        ("resource_pools.a.nnode", "resource_pools.<name>.nnodes"),
        ("critic.optim.learning_rate.lr", "critic.optim.lr"),
        ("trainr", "trainer"),
    ],
)
def test_unknown_keys_name_the_nearest(train: Train, key: str, nearest: str) -> None:
    lines = lines_of(lambda: train(f"{key}=1"))
    start = f"override '{key}=1': unknown key {key.lstrip('+')}; did you mean {nearest}"
    assert any(line in (f"{start}?",) or line.startswith(f"{start} or ") for line in lines), lines


def test_unknown_key_like_no_other_lists_its_section(train: Train) -> None:
    (line,) = lines_of(lambda: train("actor_rollout_ref.zzz=1"))
    assert line == (
        "override 'actor_rollout_ref.zzz=1': unknown key actor_rollout_ref.zzz; keys of actor_rollout_ref: hybrid_engine, "
        "model, actor, ref, teachers, rollout"
    )


def test_unknown_key_in_a_file_names_its_line(train_yaml: Path) -> None:
    train_yaml.write_text(train_yaml.read_text() + "algorithm:\n  gama: 0.9\ntrainer.seed: 3\n")
    lines = lines_of(lambda: load_config(TrainConfig, train_yaml))
    assert f"{train_yaml} line 21: unknown key algorithm.gama; did you mean algorithm.gamma?" in lines
    assert f"{train_yaml} line 22: unknown key trainer.seed; in a file it is written" in "\n".join(lines)


def test_keys_of_an_unknown_section_are_each_reported(train: Train) -> None:
    lines = lines_of(lambda: train("actor={clip_ratio: 0.1, optim: {lr: 1}}"))
    assert [line.split(": ")[-1].split(";")[0] for line in lines] == [
        "unknown key actor.clip_ratio",
        "unknown key actor.optim.lr",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.train_batch_size=many", 'data.train_batch_size: expected an integer, found "many"'),
        ("data.train_batch_size=1.5", "data.train_batch_size: expected an integer, found 1.5"),
        ("data.train_batch_size=true", "data.train_batch_size: expected an integer, found true"),
        ("data.train_batch_size=null", "data.train_batch_size: expected an integer, found null"),
        ("data.shuffle=yes", 'data.shuffle: expected true or false, found "yes"'),
        ("data.shuffle=1", "data.shuffle: expected true or false, found 1"),
        ("algorithm.gamma=.nan", "algorithm.gamma: expected a number, found NaN"),
        ("trainer.logger={a: 1}", "trainer.logger: expected a list of texts, found a section of keys (a)"),
        ("trainer.logger=true", "trainer.logger: expected a list of texts, found true"),
        ("trainer.logger=null", "trainer.logger: expected a list of texts, found null"),
        ("trainer.profile_steps=x", 'trainer.profile_steps: expected a list of integers, found "x"'),
        ("data.val_files=3.5.7", None),
        ("data.val_files=true", "data.val_files: expected text or a list of texts or null, found true"),
        ("critic.optim.betas=[0.9]", "critic.optim.betas: expected a list of 2 numbers, found [0.9]"),
        ("algorithm.kl_ctrl=0.1", "algorithm.kl_ctrl: expected a section of keys, found 0.1"),
        (
            "data=null",
            "data: expected a section of keys, found null (leave it out for its defaults)",
        ),
        ("data.seed.x=1", "data.seed: expected an integer, found a section of keys (x)"),
        ("resource_pools.a=4", "resource_pools.a: expected a section of keys, found 4"),
    ],
)
def test_wrong_types(train: Train, override: str, problem: str | None) -> None:
    if problem is None:
        assert train(override).data.val_files == "3.5.7"
        return
    assert lines_of(lambda: train(override)) == [f"override '{override}': {problem}"]


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("trainer.logger=console", "logger", ("console",)),  # as verl's quickstart has it
        ("trainer.logger=[console]", "logger", ("console",)),
        ("trainer.profile_steps=3", "profile_steps", (3,)),
        ("trainer.logger=[]", "logger", ()),
    ],
)
def test_a_single_value_is_a_list_of_one(train: Train, override: str, name: str, value: tuple) -> None:
    assert getattr(train(override).trainer, name) == value


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("trainer.seed", "an override is written key=value"),
        ("trainer..seed=1", "'trainer..seed' is not a dotted key"),
        ("trainer.seed=", "no value; write trainer.seed=null for none"),
        ("trainer.logger=[a", "not valid YAML"),
        ("algorithm={gamma: 1, gamma: 0}", "the key gamma stands there twice, first on line 1"),
    ],
)
def test_overrides_that_cannot_be_read(train: Train, override: str, problem: str) -> None:
    (line,) = lines_of(lambda: train(override))
    assert line.startswith(f"override '{override}': ") and problem in line


def test_missing_required_keys_are_all_named() -> None:
    lines = lines_of(lambda: load_config(TrainConfig, None, ["critic={}", "resource_pools.a.nnodes=2"]))
    assert [line.split(" is required")[0] for line in lines] == [
        "data.train_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.optim.lr",
        "critic.optim.lr",
        "resource_pools.a.n_gpus_per_node",
    ]
    assert lines[0] == "data.train_batch_size is required (an integer): Prompts a step."


def test_all_problems_come_in_one_message(train: Train, train_yaml: Path) -> None:
    with pytest.raises(ValueError) as caught:
        train("trainer.sed=1", "data.seed=x", "data.shuffle=2", "actor_rollout_ref.model=null")
    text = str(caught.value)
    assert text.startswith(f"configuration {train_yaml}: 4 problems\n  - ")
    assert all(
        key in text for key in ("trainer.sed", "data.seed", "data.shuffle", "actor_rollout_ref.model:")
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: {c: 1,\n    c: 2}\n", r"x line 3: .*the key b\.c stands there twice, first on line 2"),
        ("a: 1\na: 2\n", r"x line 2: .*the key a stands there twice, first on line 1"),
        ("a: [1\n", r"x line 2: not valid YAML"),
        ("a: &a {b: *a}\n", r"x line 1: .*an alias inside of what it stands for"),
        ("? [a]\n: 1\n", r"x line 1: .*a key must be a name"),
        ("a: \x07\n", r"x: not valid YAML: unacceptable character #x0007"),
        ("a: 1\n b: 2\n", r"x line 2: not valid YAML: mapping values are not allowed here"),
    ],
)
def test_yaml_that_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse(text, "x", with_lines=True)


def test_anchors_and_merge_keys() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: *b\n"
    assert plain(parse(text, "x")) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 3, "y": 2}}


# Texts without control characters and Unicode line breaks, which PyYAML does not keep.
texts = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")))
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts,
    st.sampled_from(["1e-6", "007", "on", "~", "null", "1_0", "2026-01-01", "1:30", ".5", "=", "<<", "0x1F"]),
)  # fmt: skip


@given(st.dictionaries(texts.filter(bool), scalars | st.lists(scalars)))
def test_what_is_written_is_read_as_the_same_values(values: dict) -> None:
    text = yaml.dump(values, Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
    assert plain(parse(text, "x")) == values
    assert str(plain(parse(text, "x"))) == str(values)  # 1, 1.0 and true are equal, but not the same


def test_saved_configuration_is_read_as_an_equal_one(train: Train, folder: Path) -> None:
    config = train(
        "resource_pools={global: {n_gpus_per_node: 2}, '1': {n_gpus_per_node: 2}}",
        "trainer.experiment_name='1e-3'",
        "trainer.project_name='null'",
        "data.val_files=[a.parquet, '7']",
    )
    path = save_config(config, folder / "run" / "config.yaml")
    assert load_config(TrainConfig, path) == config
    assert config.resource_pools is not None and config.resource_pools["1"] == PoolConfig(n_gpus_per_node=2)
    assert yaml.safe_load(path.read_text()).keys() == to_dict(config).keys()
    assert [file.name for file in path.parent.iterdir()] == ["config.yaml"]


def test_torch_is_not_imported() -> None:
    code = "import sys, megarl.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


ALIKE = "data: {train_files: x.parquet, max_length: 64, train_batch_size: 8}\nmodel: {path: model}\n"


@pytest.mark.parametrize("recipe", [each for each in recipes() if each.command in TRAINING])
def test_shipped_recipes(recipe) -> None:
    assert recipe_command(f"recipe:{recipe.name}", []) == recipe.command


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("data.text_key=text", "sft"),
        ("data.normalize=none", "rm"),
        ("model.head_init=normal", "rm"),
        ("dpo.beta=0.2", "dpo"),
    ],
)
def test_a_key_of_one_command_alone(tmp_path: Path, key: str, command: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ALIKE)
    assert recipe_command(str(recipe), [key]) == command


def test_a_misspelt_key_does_not_hide_the_command(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ALIKE)
    assert recipe_command(str(recipe), ["dpo.beta=0.2", "data.max_lenght=3"]) == "dpo"


def test_keys_that_several_commands_have_alike(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ALIKE)
    with pytest.raises(
        ValueError, match=r"may be a recipe of `megarl sft`, `megarl rm`, `megarl dpo`.*--command"
    ):
        recipe_command(str(recipe), [])
    recipe.write_text(f"# A model of one's own.\n# Run: megarl rm {recipe}\n{ALIKE}")
    assert recipe_command(str(recipe), []) == "rm"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.yaml"):
        recipe_command(str(tmp_path / "nothing.yaml"), [])
