"""A stand-in for mlflow-skinny 3.17.2: the signatures that megarl calls, its rules for names, and a record of the calls."""

import json
import re
from typing import Any

calls: list[tuple[str, dict[str, Any]]] = []


def set_experiment(
    experiment_name: str | None = None, experiment_id: str | None = None, trace_location: Any = None
) -> None:
    calls.append(("set_experiment", {"experiment_name": experiment_name}))


def start_run(
    run_id: str | None = None,
    experiment_id: str | None = None,
    run_name: str | None = None,
    nested: bool = False,
    parent_run_id: str | None = None,
    tags: dict[str, Any] | None = None,
    description: str | None = None,
    log_system_metrics: bool | None = None,
) -> None:
    calls.append(("start_run", {"run_name": run_name}))


def log_params(params: dict[str, Any], synchronous: bool | None = None, run_id: str | None = None) -> None:
    for name, value in params.items():
        assert re.fullmatch(r"[\w\-./ :]+", name) and len(name) <= 250 and len(str(value)) <= 6000, name
    calls.append(("log_params", {"params": params}))


def log_metrics(
    metrics: dict[str, float],
    step: int | None = None,
    synchronous: bool | None = None,
    run_id: str | None = None,
    timestamp: int | None = None,
    model_id: str | None = None,
    dataset: Any = None,
) -> None:
    assert all(re.fullmatch(r"[\w\-./ :]+", name) for name in metrics)
    calls.append(("log_metrics", {"metrics": metrics, "step": step}))


def log_dict(dictionary: dict[str, Any], artifact_file: str, run_id: str | None = None) -> None:
    calls.append(
        ("log_dict", {"dictionary": json.loads(json.dumps(dictionary)), "artifact_file": artifact_file})
    )


def end_run(status: str = "FINISHED") -> None:
    assert status in ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")
    calls.append(("end_run", {"status": status}))
