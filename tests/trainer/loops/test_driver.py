"""The loop of all commands: the order within a step, steps that end early, and when a run ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from megarl.trainer.loops.driver import Driver, Metrics, due
from megarl.trainer.run.run import Run

BATCH = pa.table({"uid": ["a"]})


class Told:
    """A run, memory and checkpoints that record their calls in `done`."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.run = Run(Path("unused"), console=None)
        self.last: dict[int, bool] = {}

    def report(self) -> Metrics:
        self.done.append("memory")
        return {"memory/all": 1.0}

    def after(self, step: int, metrics: Metrics, *, last: bool) -> None:
        self.done.append("checkpoint")
        self.last[step] = last

    def validate(self, step: int) -> Metrics:
        self.done.append("validate")
        return {"val/score": float(step)}

    def check(self, step: int, metrics: Metrics, batch: pa.Table) -> Metrics:
        assert {"work", "val/score", "memory/all"} <= set(metrics) and batch is BATCH
        self.done.append("check")
        return {"health/findings": 0.0}

    def check_validation(self, step: int, metrics: Metrics) -> None:
        assert metrics == {"val/score": float(step)}
        self.done.append("check validation")

    def made(self, step: int, metrics: Metrics) -> None:
        assert "timing_s/step" in metrics
        self.done.append("made")

    def work(self, step: int, metrics: Metrics) -> pa.Table:
        self.done.append(f"work {step}")
        metrics["work"] = 1.0
        return BATCH

    def driver(self, **keys: Any) -> Driver:
        return Driver(
            self.run, validate=self.validate, memory=self, check=self.check, check_validation=self.check_validation, made=self.made,
            checkpoints=self, **keys
        )  # fmt: skip


def test_a_step_is_validated_measured_and_checked_before_its_checkpoint() -> None:
    told = Told()
    metrics = told.driver(last=3, test_freq=1).make(2, told.work)
    assert told.done == ["work 2", "validate", "memory", "check", "made", "checkpoint"]
    assert {"work", "val/score", "memory/all", "health/findings", "timing_s/validate"} <= set(metrics)
    assert told.last == {2: False}


def test_a_step_that_its_guard_ends_is_not_checked() -> None:
    told = Told()

    @contextmanager
    def guard(step: int, metrics: Metrics) -> Iterator[None]:
        try:
            yield
        except ArithmeticError:
            metrics["training/skipped"] = 1.0

    def work(step: int, metrics: Metrics) -> None:
        raise ArithmeticError

    metrics = told.driver(guard=guard).make(1, work)
    assert metrics["training/skipped"] == 1.0 and told.done == ["memory", "made", "checkpoint"]
    told.done.clear()
    metrics = told.driver(guard=guard, test_freq=1).make(2, work)  # the step's validation is checked
    assert metrics["val/score"] == 2.0
    assert told.done == ["validate", "memory", "check validation", "made", "checkpoint"]
    with pytest.raises(ArithmeticError):
        told.driver().make(2, work)


@pytest.mark.parametrize("stops_after", [0, 2, 9])
def test_a_run_ends_with_its_last_step_or_when_it_is_stopped(stops_after: int) -> None:
    """A run that is stopped from the start, as its checkpoint says, makes no step."""
    told = Told()
    stopped = lambda: len(told.last) >= stops_after or f"work {stops_after}" in told.done  # noqa: E731
    told.driver(last=3, stopped=stopped, test_freq=1).drive(range(1, 4), told.work)
    made = min(3, stops_after)
    assert list(told.last) == list(range(1, made + 1))
    assert list(told.last.values()) == [False] * (made - 1) + [True] * (made > 0)


def test_a_run_that_is_told_to_end_while_its_models_start_makes_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step may take longer than the time until it is killed, and nothing is lost yet."""
    told = Told()
    said: list[str] = []
    monkeypatch.setattr(told.run, "say", said.append)
    told.run.preemption.requested = "SIGTERM"
    with pytest.raises(SystemExit) as ended:
        told.driver(last=3).drive(range(1, 4), told.work)
    assert ended.value.code == 75 and not told.done
    assert said == ["ending before the first step, to be started again"]


def test_when_something_is_due() -> None:
    assert [step for step in range(1, 8) if due(3, step, last=7)] == [3, 6, 7]
    assert not due(-1, 7, last=7)
