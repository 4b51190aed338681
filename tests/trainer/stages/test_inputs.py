"""The data and models that a run reads before it starts."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.arithmetic import write_arithmetic
from examples.tiny_model import make_tiny_model
from megarl.config import EvalConfig, TrainConfig, load_config, resolve
from megarl.data.tokenizer import load_tokenizer
from megarl.rewards.processes.scorer import RewardSpec, Scorer
from megarl.trainer.loops.evaluate import load_problems
from megarl.trainer.stages.inputs import load_train_inputs
from tests.fixtures.runs import PPO, REPOSITORY, on


def sets(config: TrainConfig | EvalConfig) -> dict[str, int]:
    """The number of rows of each validation set."""
    with Scorer(RewardSpec(), num_workers=1, timeout=30.0) as scorer:
        if isinstance(config, EvalConfig):
            found = load_problems(config, load_tokenizer(config.model.path, False), scorer)
        else:
            found = load_train_inputs(resolve(config), scorer).validation
    return {held_out.name: held_out.prompts.num_rows for held_out in found}


@pytest.fixture
def overrides(task: Path) -> list[str]:
    held_out = f"{task}/data/test.parquet"
    return [f"data.val_sets.{name}.files={held_out}" for name in ("few", "some", "all")] + [
        "data.val_sets.few.max_samples=3",
        "data.val_sets.all.max_samples=-1",
    ]


def test_the_first_rows_of_each_validation_set(task: Path, tmp_path: Path, overrides: list[str]) -> None:
    recipe, *ppo = PPO
    keys = [*ppo, *on(task, tmp_path), *overrides, "data.val_max_samples=5"]
    assert sets(load_config(TrainConfig, REPOSITORY / recipe, keys)) == {
        "": 5,
        "few": 3,
        "some": 5,
        "all": 16,
    }


def test_the_first_problems_of_each_set(task: Path, tmp_path: Path, overrides: list[str]) -> None:
    keys = [f"data.val_files={task}/data/test.parquet", f"model.path={task}/model", "data.max_samples=5"]
    config = load_config(EvalConfig, REPOSITORY / "recipes/quickstart_eval.yaml", [*keys, *overrides])
    assert sets(config) == {"": 5, "few": 3, "some": 5, "all": 16}


def test_problems_that_an_agent_scores_need_no_rule(task: Path, tmp_path: Path) -> None:
    table = pq.read_table(task / "data/test.parquet").drop_columns(["data_source"])
    pq.write_table(
        table.append_column("data_source", pa.array(["nim"] * table.num_rows)), tmp_path / "games.parquet"
    )
    keys = [f"data.val_files={tmp_path}/games.parquet", f"model.path={task}/model"]
    recipe = REPOSITORY / "recipes/quickstart_eval.yaml"
    with pytest.raises(ValueError, match="no reward rule for data_source 'nim'"):
        sets(load_config(EvalConfig, recipe, keys))
    agent = ["rollout.gateway.enable=true", "rollout.gateway.command=[agent]"]
    assert sets(load_config(EvalConfig, recipe, [*keys, *agent])) == {"": 16}


def test_a_prompt_without_what_its_rule_compares_with(task: Path, tmp_path: Path) -> None:
    write_arithmetic(tmp_path / "data", 8, 8, 8, seed=1)
    path = tmp_path / "data/train.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[3]["reward_model"] = {"style": "model", "ground_truth": None}
    pq.write_table(pa.Table.from_pylist(rows), path)
    recipe, *ppo = PPO
    keys = [*ppo, *on(task, tmp_path), f"data.train_files={path}"]
    with pytest.raises(ValueError, match="prompt train:3: the reward rule 'gsm8k' of data_source"):
        sets(load_config(TrainConfig, REPOSITORY / recipe, keys))


def test_a_teacher_has_the_policys_tokens(task: Path, tmp_path: Path) -> None:
    """The teacher's files are checked, too, before a process starts."""
    other = make_tiny_model(tmp_path / "other", ["three other words"], num_layers=2)
    same = tmp_path / "same"
    shutil.copytree(task / "model", same)
    recipe, *ppo = PPO
    keys = [*ppo, *on(task, tmp_path)]

    def read(teacher: Path) -> dict[str, int]:
        path = f"actor_rollout_ref.ref.model.path={teacher}"
        return sets(load_config(TrainConfig, REPOSITORY / recipe, [*keys, path]))

    assert read(same)
    with pytest.raises(
        ValueError, match=r"ref\.model\.path: .* has another tokenizer than the policy: .* tokens\s+differ"
    ):
        read(other)
    several = [
        f"actor_rollout_ref.teachers.{name}.model.path={path}" for name, path in (("a", same), ("b", other))
    ]
    with pytest.raises(
        ValueError, match=r"actor_rollout_ref\.teachers\.b\.model\.path: .* has another tokenizer"
    ):
        sets(load_config(TrainConfig, REPOSITORY / recipe, [*keys, *several]))
    (same / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="same"):
        read(same)
