"""A run that starts from the beginning keeps all files of an earlier run, and mixes none of them with its own."""

import json
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.config import EvalConfig, SFTConfig, TrainConfig, load_config, resolve, save_config
from megarl.trainer.run.checkpoints import find_resumed, open_store
from megarl.trainer.run.earlier_runs import refusals, set_aside_earlier_run
from megarl.trainer.run.logger import RunLogger, read_metrics
from megarl.trainer.workers.agents_spec import LOGS
from tests.fixtures.tiny_models import as_type

SFT = [
    "data.train_files=a.parquet", "data.max_length=8", "data.train_batch_size=2", "optim.lr=1", "max_token_len_per_gpu=8",
]  # fmt: skip


def sft(folder: Path, *overrides: str) -> SFTConfig:
    keys = ["model.path=m", *SFT, f"trainer.default_local_dir={folder}", *overrides]
    return resolve(load_config(SFTConfig, None, keys))


def written(folder: Path, *names: str) -> dict[str, bytes]:
    """Write files with the names that a run uses; return their contents."""
    contents = {}
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "logs/sft-rank0.log",
        "hf/model.safetensors",
        "run.json",
        *names,
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"step": 1, "of": name}) + "\n")
        contents[name] = path.read_bytes()
    return contents


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_files_of_an_earlier_run_are_moved_and_own_files_stay(tmp_path: Path) -> None:
    own = {"reward.py": "1", "data/train.parquet": "2", "model/config.json": "3", "recipe.yaml": "4"}
    for name, text in own.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    first = written(
        tmp_path, "tensorboard/events.1", "rollouts/step-000001.parquet", "best/best.json", f"{LOGS}/q-0.log"
    )
    said: list[str] = []
    assert set_aside_earlier_run(sft(tmp_path), said.append) == tmp_path / "earlier_runs" / "1"
    assert contents_of(tmp_path / "earlier_runs" / "1") == first
    assert {name for name in contents_of(tmp_path) if not name.startswith("earlier_runs")} == set(own)
    assert said == [f"{tmp_path} holds an earlier run: it was moved to {tmp_path / 'earlier_runs' / '1'}"]
    second = written(tmp_path, "tensorboard/events.2")
    set_aside_earlier_run(sft(tmp_path), said.append)
    assert contents_of(tmp_path / "earlier_runs" / "2") == second
    assert contents_of(tmp_path / "earlier_runs" / "1") == first


def test_a_folder_without_a_run_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "logs").write_text("somebody's")
    assert set_aside_earlier_run(sft(tmp_path), print) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "logs"]
    assert set_aside_earlier_run(sft(tmp_path / "not_there"), print) is None


@pytest.mark.parametrize(
    "key",
    ["model.path={}/hf", "data.train_files=[b.jsonl,{}/rollouts/*.parquet]", "model.tokenizer_path={}/hf"],
)
def test_a_run_that_reads_of_the_earlier_one_is_refused_and_nothing_moves(tmp_path: Path, key: str) -> None:
    before = written(tmp_path, "rollouts/step-000001.parquet")
    with pytest.raises(ValueError, match=r"another trainer\.default_local_dir") as error:
        set_aside_earlier_run(sft(tmp_path, key.format(tmp_path)), print)
    assert str(error.value).startswith(key.partition("=")[0])
    assert contents_of(tmp_path) == before


def test_trajectories_elsewhere_are_kept_too(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts_of_mine"
    rollouts.mkdir()
    for name in ("step-000001.parquet", "val-000001.parquet", "val_math-000001.parquet", "notes.txt"):
        (rollouts / name).write_text(name)
    recipe = Path(__file__).parents[3] / "recipes" / "quickstart_ppo.yaml"
    keys = [f"trainer.default_local_dir={tmp_path / 'run'}", f"trainer.rollout_data_dir={rollouts}"]
    set_aside_earlier_run(resolve(load_config(TrainConfig, recipe, keys)), print)
    assert sorted(contents_of(rollouts / "earlier_runs" / "1")) == [
        "step-000001.parquet", "val-000001.parquet", "val_math-000001.parquet",
    ]  # fmt: skip
    assert (rollouts / "notes.txt").exists()


def test_an_evaluation_keeps_the_scores_of_the_one_before(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "quickstart_eval.yaml"
    config = resolve(load_config(EvalConfig, recipe, [f"trainer.default_local_dir={tmp_path}"]))
    for name in ("config.yaml", "scores.json", "trajectories.parquet", "trajectories-math.parquet"):
        (tmp_path / name).write_text(name)
    set_aside_earlier_run(config, print)
    assert [path.name for path in tmp_path.iterdir()] == ["earlier_runs"]
    assert len(contents_of(tmp_path / "earlier_runs" / "1")) == 4


def test_the_metrics_of_a_second_start_are_its_own(tmp_path: Path) -> None:
    """When a run that saved no checkpoint starts again, the four lines of its first start are kept apart."""
    for start in (1, 2):
        config = sft(tmp_path)
        with open_store(config.trainer, tmp_path / "checkpoints", print) as store:
            assert find_resumed(config, store, print, 4) is None
        (tmp_path / "config.yaml").write_text("")
        with RunLogger(tmp_path, ["tensorboard"]) as logger:
            for step in range(1, 5):
                logger.log(step, {"train/loss": start})
    earlier = tmp_path / "earlier_runs" / "1"
    assert [row["train/loss"] for row in read_metrics(earlier)] == [1.0] * 4
    assert [row["train/loss"] for row in read_metrics(tmp_path)] == [2.0] * 4
    for folder in (earlier, tmp_path):
        assert len(list((folder / "tensorboard").iterdir())) == 1


def test_a_model_of_a_type_without_a_family_is_the_one_that_was_saved(tmp_path: Path) -> None:
    """The checkpoint has its config without its weights."""
    model = make_tiny_model(tmp_path / "model", ["one two"], hidden_size=32, num_layers=2, family="qwen2")
    file = as_type(model, "mistral", "MistralForCausalLM") / "config.json"
    config, checkpoint = sft(tmp_path, f"model.path={model}"), tmp_path / "step-1"
    saved = checkpoint / "model" / "hf" / "config.json"
    saved.parent.mkdir(parents=True)
    saved.write_bytes(file.read_bytes())
    save_config(config, checkpoint / "config.yaml")
    assert refusals(config, checkpoint) == []
    saved.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 1e-3}))
    (reason,) = refusals(config, checkpoint)
    assert "norm_epsilon was 0.001" in reason
