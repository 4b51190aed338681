"""A stand-in for trackio 0.43.0: the signatures that megarl calls, and a record of the calls."""

from enum import StrEnum
from typing import Any

calls: list[tuple[str, dict[str, Any]]] = []


class AlertLevel(StrEnum):
    INFO = "info"
    WARN = "warn"
    ERROR = "error"


class Table:
    def __init__(
        self,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        rows: list[list[Any]] | None = None,
    ) -> None:
        self.columns, self.data = columns, data


def init(
    project: str, name: str | None = None, config: dict[str, Any] | None = None, embed: bool = True
) -> None:
    assert not embed
    calls.append(("init", {"project": project, "name": name, "config": config}))


def log(metrics: dict[str, Any], step: int | None = None) -> None:
    calls.append(("log", {"metrics": metrics, "step": step}))


def alert(title: str, text: str | None = None, level: AlertLevel = AlertLevel.WARN) -> None:
    calls.append(("alert", {"title": title, "text": text, "level": level}))


def finish() -> None:
    calls.append(("finish", {}))
