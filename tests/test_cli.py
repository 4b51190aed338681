"""Mistakes of the user's: one message, exit code 2, no traceback, and nothing started."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl import __version__
from megarl.cli import main
from megarl.data.arithmetic import arithmetic_texts, write_arithmetic
from megarl.models.tiny import make_tiny_model

RECIPE = str(Path(__file__).resolve().parents[1] / "recipes" / "quickstart_ppo.yaml")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_arithmetic(folder / "data", 8, 160, 8, seed=3)
    make_tiny_model(folder / "model", arithmetic_texts(), hidden_size=32, ffn_hidden_size=64, num_layers=2)
    return folder


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake must be found before anything is started."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr("megarl.trainer.run.start_cluster", refuse)


def refused(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """What a command that must be refused says."""
    assert main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "Traceback" not in said
    return said


def train(task: Path, *overrides: str) -> list[str]:
    return [
        "train",
        RECIPE,
        f"data.train_files={task}/data/train.parquet",
        f"data.val_files={task}/data/test.parquet",
        f"actor_rollout_ref.model.path={task}/model",
        f"trainer.default_local_dir={task}/run",
        *overrides,
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.clip_ration=0.2", ("clip_ration", "actor_rollout_ref.actor.clip_ratio")),
        ("algorithm.kl_coef=0.1", ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef")),
        ("data.train_batch_size=many", ("data.train_batch_size", "many", "an integer")),
        ("actor_rollout_ref.rollout.name=vllm", ("vllm", "sglang")),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=48", ("ppo_mini_batch_size", "48", "128")),
        ("data.train_files=nowhere.parquet", ("data.train_files", "nowhere.parquet")),
        ("actor_rollout_ref.model.path=nowhere", ("actor_rollout_ref.model.path", "nowhere")),
        ("algorithm.adv_estimator=gea", ("gea", "gae")),
        ("trainer.n_gpus_per_node=3", ("needs 4 devices", "3 devices of resource pool", "critic.megatron")),
        ("custom_reward_function.path=nowhere.py", ("custom_reward_function.path", "nowhere.py")),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_would_be_right(task, capsys, override, words):
    said = refused(capsys, *train(task, override))
    for word in words:
        assert word in said, said


def test_all_mistakes_are_said_at_once(task, capsys):
    said = refused(capsys, *train(task, "data.trian_files=x", "trainer.test_frequency=2"))
    assert "trian_files" in said and "trainer.test_freq" in said


def test_a_model_that_does_not_divide_names_key_and_possible_sizes(task, capsys):
    said = refused(
        capsys, *train(task, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4",
                       "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1"),
    )  # fmt: skip
    assert "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4" in said
    assert "num_query_groups=2" in said and "possible: 1,2" in said


def test_a_recipe_that_is_not_there_or_no_yaml(tmp_path, capsys):
    assert "nowhere.yaml" in refused(capsys, "train", tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("data: [")
    assert "bad.yaml" in refused(capsys, "train", tmp_path / "bad.yaml")


def test_a_row_without_a_prompt_is_named_by_file_and_row(task, tmp_path, capsys):
    rows = pq.read_table(task / "data" / "train.parquet").to_pylist()
    rows[5]["prompt"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "broken.parquet")
    said = refused(capsys, *train(task, f"data.train_files={tmp_path}/broken.parquet"))
    assert "broken.parquet" in said and "row 5" in said and "prompt" in said


def test_a_model_of_a_family_that_is_not_supported(task, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    said = refused(capsys, *train(task, f"actor_rollout_ref.model.path={tmp_path}/model"))
    assert "gpt2" in said and "llama, qwen2" in said


def test_fewer_prompts_than_a_batch(task, capsys):
    said = refused(
        capsys,
        *train(task, "data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=64"),
    )
    assert "160 rows" in said and "256" in said


def test_no_command_and_unknown_ones(capsys):
    for arguments in ([], ["tarin"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "train" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--version"])
    assert __version__ in capsys.readouterr().out
