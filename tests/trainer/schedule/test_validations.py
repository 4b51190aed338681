"""When concurrent validations begin, end and are repeated, without engines: threads, waits, lost engines, checkpoints."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from megarl.rewards.processes.scorer import Scorer
from megarl.rewards.registry import RewardSpec
from megarl.rewards.sample import Sample
from megarl.trainer.run.run import Run
from megarl.trainer.schedule import validations
from megarl.trainer.schedule.validations import (
    ConcurrentValidations,
    EnginesLost,
    NoRestarts,
    Validated,
    Validations,
)


class QuietRun(Run):
    """A run without processes that keeps its printed lines."""

    def wait(self, refs: list, busy: Any = ()) -> list:
        self.interrupt()
        return []

    def say(self, text: str) -> None:
        self.lines = [*getattr(self, "lines", []), text]


class Memory:
    @contextmanager
    def held(self, phase: str) -> Iterator[None]:
        assert phase == "eval_sync"
        yield


@dataclass
class Rewards:
    run: Run
    scorer: Scorer


@dataclass
class Told:
    """Concurrent validations whose answers wait for `go`, and a record of their calls."""

    run: QuietRun
    scorer: Scorer  # without processes
    go: threading.Event = field(default_factory=threading.Event)
    raises: list[BaseException] = field(default_factory=list)
    synced: list[tuple[int, int]] = field(default_factory=list)  # (version, validations reported by then)
    reported: list[Validated] = field(default_factory=list)
    learnt: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    seen: list[Run] = field(default_factory=list)

    def answer(self, view: Run, rewards: Rewards, step: int) -> tuple[dict[str, pa.Table], dict[str, float]]:
        assert rewards.run is view and threading.current_thread().name == "validation"
        self.seen.append(view)
        while not self.go.wait(0.01):
            view.interrupt()
        if self.raises:
            raise self.raises.pop(0)
        return {"val": pa.table({"step": [step]})}, {"score/mean": step / 10}

    def made(self) -> ConcurrentValidations:
        restarts = SimpleNamespace(max_restarts=3)
        roles = SimpleNamespace(memory=Memory(), eval=SimpleNamespace(group=None, restarts=restarts))
        return ConcurrentValidations(
            self.run, lambda step: {}, lambda step, metrics: self.learnt.append((step, metrics)), roles,
            Rewards(self.run, self.scorer), self.answer, self.reported.append,
        )  # fmt: skip


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    run = QuietRun(tmp_path, console=None)
    run.watch = SimpleNamespace(idle_timeout=None, cluster=None)
    scorer = Scorer(RewardSpec(), num_workers=0, timeout=1.0)
    found = Told(run, scorer)

    def sync(run: Run, roles: Any, version: int) -> dict[str, float]:
        found.synced.append((version, len(found.reported)))
        return {"eval_sync/bytes_total": 8.0}

    monkeypatch.setattr(validations, "sync_eval_weights", sync)
    with scorer:
        yield found


def ended(one: ConcurrentValidations) -> ConcurrentValidations:
    """Wait for the end of the validation's thread."""
    one._background._thread.join()
    return one


def test_results_are_those_of_the_step_of_the_weights(told: Told) -> None:
    one = told.made()
    with told.run.step(2) as metrics:
        metrics |= one.begin(2)
    assert metrics["eval_sync/bytes_total"] == 8.0 and told.synced == [(3, 0)]
    assert one.state_dict() == {"open": 2}
    assert one.poll(3) == {} and told.reported == []
    told.go.set()
    assert ended(one).poll(4) == {}
    (found,) = told.reported
    assert (found.step, found.answers["val"]["step"].to_pylist()) == (2, [2])
    assert found.metrics["val/score/mean"] == 0.2 and found.metrics["timing_s/eval"] > 0
    assert told.learnt == [(2, found.metrics)] and one.state_dict() == {"open": None}
    assert one.poll(5) == {} and len(told.reported) == 1
    (view,) = told.seen
    assert view.at_step == 2 and view.blocks is not told.run.blocks and view.seconds is not told.run.seconds


def test_the_next_one_waits_for_the_one_before(told: Told) -> None:
    one = told.made()
    one.begin(2)
    timer = threading.Timer(0.7, told.go.set)
    timer.start()
    with told.run.step(4) as metrics:
        one.begin(4)
    assert metrics["timing_s/validate_wait"] >= 0.1
    assert told.synced == [(3, 0), (5, 1)]  # the weights of step 4 are sent after the results of step 2
    one.finish()
    assert [found.step for found in told.reported] == [2, 4]


def test_without_engines_it_is_repeated_with_the_newest_weights(told: Told) -> None:
    one = told.made()
    told.raises = [EnginesLost("eval rank 0 died"), EnginesLost("eval rank 0 died again")]
    told.go.set()
    one.begin(2)
    assert ended(one).poll(3) == {"eval_sync/bytes_total": 8.0} and one.state_dict() == {"open": 3}
    assert told.run.lines == [
        "the validation after step 2 has lost its engines: it is repeated with the weights of step 3, as the validation after that. "
        "eval rank 0 died"
    ]
    ended(one).begin(4)  # this validation is due, and replaces the repetition
    assert "that after step 4 takes its place" in told.run.lines[-1]
    one.finish()
    assert [found.step for found in told.reported] == [4] and [version for version, _ in told.synced] == [
        3,
        4,
        5,
    ]


def test_a_repeated_one_may_submit_the_answers_that_came_before_the_loss(told: Told) -> None:
    """The repeated answers have the same uids as the lost ones."""
    one = told.made()

    def answer(view: Run, rewards: Rewards, step: int) -> tuple[dict[str, pa.Table], dict[str, float]]:
        rewards.scorer.submit([Sample("p/0", "openai/gsm8k", "", "#### 7", "7", None)])
        return told.answer(view, rewards, step)

    one.answer = answer
    told.raises = [EnginesLost("eval rank 0 died")]
    told.go.set()
    one.begin(2)
    ended(one).poll(3)
    one.finish()
    assert [found.step for found in told.reported] == [3]


def test_at_the_end_it_is_repeated_with_the_last_weights(told: Told) -> None:
    one = told.made()
    told.run.at_step = 4
    told.raises = [EnginesLost("eval rank 0 died")]
    told.go.set()
    one.begin(4)
    one.finish()
    assert [found.step for found in told.reported] == [4] and [version for version, _ in told.synced] == [
        5,
        5,
    ]


def test_a_failure_is_raised_at_the_end_of_a_step(told: Told) -> None:
    one = told.made()
    told.raises = [RuntimeError("the rewards of all 16 trajectories failed")]
    told.go.set()
    one.begin(2)
    with pytest.raises(RuntimeError, match="the rewards of all 16"):
        ended(one).poll(3)


def test_an_abandoned_one_is_repeated_by_the_run_that_goes_on(told: Told) -> None:
    one = told.made()
    one.begin(2)
    state = json.loads(json.dumps(one.state_dict()))  # as in the checkpoint with which the run ends
    one.abandon()
    assert not any(thread.name == "validation" for thread in threading.enumerate())
    assert told.reported == []
    again = told.made()
    again.load_state_dict(state)
    told.go.set()
    again.resume(3)  # the checkpoint is of step 3, so that only the weights of step 3 exist
    assert told.run.lines == [
        "the validation after step 2 had not ended: it is repeated with the weights of step 3, as the validation after that"
    ]
    again.finish()
    assert [found.step for found in told.reported] == [3]


def test_a_run_that_is_told_to_end_waits_for_none(told: Told) -> None:
    """It waits neither for the earlier validation nor for the last one; the last one does not begin, and the checkpoint lists it as open."""
    one = told.made()
    one.begin(2)
    threading.Timer(0.1, lambda: setattr(told.run.preemption, "requested", "SIGTERM")).start()
    assert one.begin(4) == {}
    assert one.state_dict() == {"open": 4} and [version for version, _ in told.synced] == [3]
    assert one.poll(5) == {}
    one.finish()
    assert told.run.lines == ["the run was told to end: the validation after step 4 is left out"]
    assert told.reported == [] and not any(thread.name == "validation" for thread in threading.enumerate())


def test_results_that_were_logged_after_the_checkpoint_are_not_repeated(told: Told, tmp_path: Path) -> None:
    """Only the callback that learns from results is called with them."""
    rows = [
        {"step": 2, "time": 0.0, "a": 1.0},
        {"step": 3, "time": 1.0},
        {"step": 2, "time": 2.0, "late": True, "val/score/mean": 0.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    one = told.made()
    one.load_state_dict({"open": 2})
    one.resume(3)
    assert told.learnt == [(2, {"val/score/mean": 0.5})]
    assert told.synced == [] and one.state_dict() == {"open": None}
    one.finish()
    assert told.reported == []


@dataclass
class Logger:
    late: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def log_late(self, step: int, metrics: dict[str, float], samples: dict[str, Any]) -> None:
        self.late.append((step, metrics))


@dataclass
class Blocking:
    """Blocking validations of a run, and the steps after which they were made."""

    run: QuietRun
    made: list[int] = field(default_factory=list)
    learnt: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def validations(self) -> Validations:
        self.run.logger = Logger()
        return Validations(self.run, self.validate, lambda step, metrics: self.learnt.append((step, metrics)))

    def validate(self, step: int) -> dict[str, float]:
        self.made.append(step)
        return {"val/score/mean": step / 10}


def test_a_blocking_run_that_is_told_to_end_saves_before_it_validates(tmp_path: Path) -> None:
    first = Blocking(QuietRun(tmp_path, console=None))
    one = first.validations()
    assert one.begin(2) == {"val/score/mean": 0.2} and one.state_dict() == {"open": None}
    first.run.preemption.requested = "SIGUSR1"
    assert one.begin(4) == {} and first.made == [2]
    state = json.loads(json.dumps(one.state_dict()))  # as in the checkpoint with which the run ends

    second = Blocking(QuietRun(tmp_path, console=None))
    again = second.validations()
    again.load_state_dict(state)
    again.resume(4)
    assert second.made == [4] and again.state_dict() == {"open": None}
    assert second.run.logger.late == second.learnt == [(4, {"val/score/mean": 0.4})]
    again.finish()
    assert second.made == [4]


def test_the_validation_after_the_last_step_of_a_blocking_run_that_is_told_to_end_follows_its_checkpoint(
    tmp_path: Path,
) -> None:
    told = Blocking(QuietRun(tmp_path, console=None))
    one = told.validations()
    told.run.preemption.requested = "SIGTERM"
    assert one.begin(6) == {} and one.state_dict() == {"open": 6}
    one.finish()
    assert told.made == [6] and told.run.logger.late == told.learnt == [(6, {"val/score/mean": 0.6})]


def test_a_run_that_goes_on_blocking_repeats_one_that_was_concurrent(tmp_path: Path) -> None:
    """With the weights of the checkpoint, which may be of a later step; not if the run has no held-out prompts any more."""
    told = Blocking(QuietRun(tmp_path, console=None))
    one = told.validations()
    one.load_state_dict({"open": 2})
    one.resume(3)
    assert told.made == [3] and "the validation after step 2" in told.run.lines[0]
    one.load_state_dict({"open": 2})
    one.abandon()
    one.resume(3)
    one.finish()
    assert told.made == [3]


def test_an_engine_that_hangs_is_ended_and_none_is_restarted() -> None:
    over: list[int] = []
    restarts = SimpleNamespace(
        engines=SimpleNamespace(end=over.append), hung={1}, lose=lambda failure: [1], max_restarts=3
    )
    view = NoRestarts(restarts)
    assert view.lose(None) == [1] and over == [1] and view.come_late
    with pytest.raises(EnginesLost, match="died"):
        view.revive(RuntimeError("eval rank 0 died"))
