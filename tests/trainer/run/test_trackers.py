"""What experiment trackers are told, by stand-ins with the signatures of the real packages."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.config.schema.run import DEFAULT_LOGGERS, LOGGERS
from megarl.config.schema.run import TRACKERS as INSTALLED_BY
from megarl.trainer.run.logger import DEFAULT_SINKS, SINKS, RunLogger
from megarl.trainer.run.trackers import TRACKERS, TrackedRun, flatten, mlflow_name, open_trackers

RUN = TrackedRun("project", "experiment", {"data": {"train_batch_size": 8}, "trainer": {"logger": ["file"]}})
METRICS = {"critic/score/mean": 0.5, "val/pass@4": 0.75}
ROWS = [
    {"prompt": "1+1", "response": "2", "score": 1.0},
    {"prompt": "1+2", "response": "4|\n5", "score": 0.0},
]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The stand-ins, importable by the real names."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "trackers"))
    for name in TRACKERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    yield {name: importlib.import_module(name) for name in TRACKERS}
    for name in TRACKERS:
        sys.modules.pop(name, None)


def run(folder: Path, fails: bool = False) -> None:
    with RunLogger(folder, ["file", *TRACKERS], tracked=RUN) as logger:
        logger.log_samples(3, "val/generations", ROWS)
        logger.log(3, METRICS)
        if fails:
            raise RuntimeError("rank 3 died")


def test_wandb(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    run(tmp_path)
    init, samples, log, finish = packages["wandb"].calls
    assert init == (
        "init",
        {"project": "project", "name": "experiment", "dir": str(tmp_path), "config": RUN.config},
    )
    table = samples[1]["data"]["val/generations"]
    assert samples[1]["step"] == 3
    assert table.columns == ["prompt", "response", "score"]
    assert table.data == [["1+1", "2", 1.0], ["1+2", "4|\n5", 0.0]]
    assert log == ("log", {"data": METRICS, "step": 3})
    assert finish == ("finish", {"exit_code": 0})


def test_mlflow(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    run(tmp_path)
    columns = {"prompt": ["1+1", "1+2"], "response": ["2", "4|\n5"], "score": [1.0, 0.0]}
    assert packages["mlflow"].calls == [
        ("set_experiment", {"experiment_name": "project"}),
        ("start_run", {"run_name": "experiment"}),
        ("log_params", {"params": {"data.train_batch_size": 8, "trainer.logger": ["file"]}}),
        ("log_dict", {"dictionary": columns, "artifact_file": "val/generations/step-000003.json"}),
        ("log_metrics", {"metrics": {"critic/score/mean": 0.5, "val/pass_at_4": 0.75}, "step": 3}),
        ("end_run", {"status": "FINISHED"}),
    ]


def test_swanlab(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    run(tmp_path)
    init, samples, log, finish = packages["swanlab"].calls
    where = {"project": "project", "name": "experiment", "log_dir": str(tmp_path / "swanlog")}
    assert init == ("init", {**where, "config": RUN.config})
    texts = [text.content for text in samples[1]["data"]["val/generations"]]
    assert texts == [
        "prompt: 1+1\n\nresponse: 2\n\nscore: 1.0",
        "prompt: 1+2\n\nresponse: 4|\n5\n\nscore: 0.0",
    ]
    assert log == ("log", {"data": METRICS, "step": 3})
    assert finish == ("finish", {"state": "success", "error": None})


def test_a_run_that_fails_is_marked_everywhere(packages: dict[str, ModuleType], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 3 died"):
        run(tmp_path, fails=True)
    endings = {name: package.calls[-1] for name, package in packages.items()}
    assert endings == {
        "wandb": ("finish", {"exit_code": 1}),
        "mlflow": ("end_run", {"status": "FAILED"}),
        "swanlab": ("finish", {"state": "crashed", "error": "RuntimeError: rank 3 died"}),
    }


def test_a_tracker_that_cannot_begin_leaves_no_open_run(
    packages: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**arguments: Any) -> None:
        raise PermissionError("no key")

    monkeypatch.setattr(packages["swanlab"], "init", refuse)
    with pytest.raises(PermissionError, match="no key"):
        open_trackers(["wandb", "swanlab"], RUN, tmp_path)
    assert packages["wandb"].calls[-1] == ("finish", {"exit_code": 1})


def test_the_configuration_knows_the_same_trackers() -> None:
    assert LOGGERS == SINKS and DEFAULT_LOGGERS == DEFAULT_SINKS
    assert list(INSTALLED_BY) == list(TRACKERS)


def test_names() -> None:
    assert flatten({"a": {"b": {"c": 1}, "d": None}, "e": [1]}) == {"a.b.c": 1, "a.d": None, "e": [1]}
    assert mlflow_name("val/set one/maj@8 (x)") == "val/set one/maj_at_8 _x_"
