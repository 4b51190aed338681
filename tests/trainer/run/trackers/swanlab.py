"""A stand-in for swanlab 0.10.3: the signatures that megarl calls, and a record of the calls."""

from types import SimpleNamespace
from typing import Any

calls: list[tuple[str, dict[str, Any]]] = []


class Table:
    def add(self, headers: list[str], rows: list[list[Any]], attributes: dict | None = None) -> "Table":
        self.headers, self.rows = headers, rows
        return self


echarts = SimpleNamespace(Table=Table)


def init(
    *,
    reinit: bool | None = None,
    log_dir: str | None = None,
    mode: str | None = None,
    workspace: str | None = None,
    project: str | None = None,
    public: bool | None = None,
    name: str | None = None,
    color: str | None = None,
    description: str | None = None,
    job_type: str | None = None,
    group: str | None = None,
    tags: list[str] | None = None,
    id: str | None = None,
    resume: Any = None,
    parallel: Any = None,
    config: dict[str, Any] | None = None,
    settings: Any = None,
    callbacks: Any = None,
    **kwargs: Any,
) -> None:
    assert not kwargs
    calls.append(("init", {"project": project, "name": name, "log_dir": log_dir, "config": config}))


def log(data: dict[str, Any], step: int | None = None) -> None:
    calls.append(("log", {"data": data, "step": step}))


def finish(state: str = "success", error: str | None = None, async_log_timeout: int | None = None) -> None:
    assert state in ("success", "crashed", "aborted") and (error is not None) == (state == "crashed")
    calls.append(("finish", {"state": state, "error": error}))
