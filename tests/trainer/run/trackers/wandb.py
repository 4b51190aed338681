"""A stand-in for wandb 0.31.0: the signatures that megarl calls, and a record of the calls."""

from typing import Any

calls: list[tuple[str, dict[str, Any]]] = []


class Table:
    def __init__(
        self,
        columns: list | None = None,
        data: list | None = None,
        rows: list | None = None,
        dataframe: Any = None,
        dtype: Any = None,
        optional: Any = True,
        allow_mixed_types: bool = False,
        log_mode: str | None = "IMMUTABLE",
    ) -> None:
        self.columns, self.data = columns, data


class Run:
    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert all(isinstance(value, float | Table) for value in data.values())
        calls.append(("log", {"data": data, "step": step}))

    def define_metric(
        self,
        name: str,
        step_metric: str | None = None,
        step_sync: bool | None = None,
        hidden: bool | None = None,
        summary: str | None = None,
        goal: str | None = None,
        overwrite: bool | None = None,
    ) -> None:
        calls.append(("define_metric", {"name": name, "step_metric": step_metric}))

    def finish(self, exit_code: int | None = None) -> None:
        calls.append(("finish", {"exit_code": exit_code}))


def init(
    entity: str | None = None,
    project: str | None = None,
    dir: Any = None,
    id: str | None = None,
    name: str | None = None,
    notes: str | None = None,
    tags: Any = None,
    config: dict[str, Any] | str | None = None,
    config_exclude_keys: list[str] | None = None,
    config_include_keys: list[str] | None = None,
    allow_val_change: bool | None = None,
    group: str | None = None,
    job_type: str | None = None,
    mode: str | None = None,
    force: bool | None = None,
    reinit: Any = None,
    resume: Any = None,
    resume_from: str | None = None,
    fork_from: str | None = None,
    save_code: bool | None = None,
    tensorboard: bool | None = None,
    sync_tensorboard: bool | None = None,
    monitor_gym: bool | None = None,
    settings: Any = None,
    anonymous: Any = None,
) -> Run:
    calls.append(("init", {"project": project, "name": name, "dir": dir, "config": config}))
    return Run()
