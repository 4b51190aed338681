"""The parts of steps `nccl` and `killed` that need no GPU."""

import math
import os
import subprocess
from pathlib import Path

import pytest

from megarl.config import TrainConfig, check_config, load_config
from megarl.gpu_test.several import MARK, NUM_STEPS, SETTINGS, _figures, _killed, read_metrics, schedulers
from megarl.gpu_test.sync import config_folder
from megarl.trainer.run.logger import RunLogger
from megarl.util.packages import shipped


def test_the_runs_keys_fit_the_recipe(tmp_path: Path) -> None:
    """Except for its model and data, which the step makes."""
    recipe = shipped() / "recipes" / "quickstart_ppo.yaml"
    (tmp_path / "train.parquet").touch()
    keys = [f"actor_rollout_ref.model.path={config_folder()}", f"data.train_files={tmp_path}/train.parquet"]
    config = load_config(TrainConfig, recipe, [*SETTINGS, *keys])
    check_config(config)
    assert config.trainer.total_training_steps == NUM_STEPS and config.trainer.n_gpus_per_node == 2
    assert config.actor_rollout_ref.rollout.num_engines == 2


@pytest.fixture
def two_schedulers():
    """Two processes with a scheduler's title, each of its own run."""
    started = [
        subprocess.Popen(
            ["bash", "-c", "exec -a sglang::scheduler sleep 600"], env={**os.environ, MARK: f"run {number}"}
        )
        for number in range(2)
    ]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_only_a_scheduler_of_this_run_is_killed(two_schedulers, tmp_path: Path) -> None:
    mine, other = two_schedulers
    while not schedulers("run 0") or not schedulers("run 1"):  # bash is replaced by its command
        pass
    assert [process.pid for process in schedulers("run 0")] == [mine.pid]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert [row["step"] for row in read_metrics(metrics)] == [1, 2]
    check = _killed(other, "run 0", metrics)
    assert check.ok and mine.wait(timeout=30) == -9 and other.poll() is None
    assert _killed(other, "run 0", metrics).ok is False  # no scheduler is left


def test_weights_that_stay_on_their_device_are_no_success() -> None:
    row = {"sync/bytes_same_device": 5.0, "sync/bytes_intra_node": 0.0, "timing_s/sync": 0.1}
    first, *figures = _figures(row)
    assert first.ok is False and len(figures) == 3
    first, *_ = _figures({**row, "sync/bytes_intra_node": 7.0})
    assert first.ok and first.figures == {"bytes": 7.0}


def test_figures_that_are_not_finite_are_told(tmp_path: Path) -> None:
    with RunLogger(tmp_path, []) as logger:
        logger.log(1, {"sync/seconds": math.nan})
    _, figure = _figures(read_metrics(tmp_path / "metrics.jsonl")[-1])
    assert figure.found == "nan"
