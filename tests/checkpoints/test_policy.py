"""When to save, with a clock that the test sets; and which checkpoints are kept."""

import math
from pathlib import Path

import pytest

from megarl.checkpoints import Keep, SaveSchedule
from megarl.checkpoints.policy import STATE_FILE, kept_steps, read_best, write_best


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_by_steps(clock: Clock) -> None:
    schedule = SaveSchedule(every_steps=4, clock=clock)
    assert [step for step in range(1, 13) if schedule.due(step)] == [4, 8, 12]
    assert schedule.due(4) == "steps" and schedule.seconds_left == math.inf


def test_never_unless_asked(clock: Clock) -> None:
    schedule = SaveSchedule(clock=clock)
    clock.now += 1e9
    assert schedule.due(4) is None


def test_by_minutes_since_the_last_save(clock: Clock) -> None:
    schedule = SaveSchedule(every_minutes=2, clock=clock)
    clock.now += 119
    assert schedule.due(1) is None
    clock.now += 1
    assert schedule.due(2) == "minutes"
    clock.now += 30
    schedule.saved(30)
    clock.now += 119
    assert schedule.due(3) is None
    clock.now += 1
    assert schedule.due(4) == "minutes"


def test_before_the_deadline_with_the_longest_seen_and_a_margin(clock: Clock) -> None:
    """A run of 10 minutes; the longest step took 50 s and the longest save 10 s, times 1.5: it saves when less than 90 s are left."""
    schedule = SaveSchedule(max_run_minutes=10, margin=1.5, started=clock.now - 60, clock=clock)
    for seconds in (20, 50, 30):
        schedule.stepped(seconds)
    for seconds in (10, 5):
        schedule.saved(seconds)
    clock.now += 540 - 90
    assert schedule.seconds_left == 90 and schedule.due(7) is None
    clock.now += 0.5
    assert schedule.due(8) == "deadline"
    assert schedule.due(8, last=True) is None


def test_the_last_step_is_saved_as_any_other_and_ends_the_run_by_itself(clock: Clock) -> None:
    schedule = SaveSchedule(every_steps=4, max_run_minutes=10, started=clock.now - 590, clock=clock)
    schedule.stepped(50)
    assert schedule.due(8) == "deadline" and schedule.due(8, last=True) == "steps"
    assert schedule.due(7, last=True) is None


def test_a_save_that_is_due_before_the_deadline_leaves_time_for_another(clock: Clock) -> None:
    """A run that goes on because `due` does not say "deadline" always has time for its last save, even if another save is due."""
    step_seconds, save_seconds = 5.0, 40.0
    for every in (1, 2, 3, 7, None):
        schedule = SaveSchedule(every_steps=every, max_run_minutes=20, margin=1.0, clock=clock)
        schedule.stepped(step_seconds)
        schedule.saved(save_seconds)
        for step in range(1, 1000):
            clock.now += step_seconds
            schedule.stepped(step_seconds)
            reason = schedule.due(step)
            if reason is not None:
                clock.now += save_seconds
                schedule.saved(save_seconds)
            if reason == "deadline":
                break
        assert reason == "deadline"
        assert 0 <= schedule.seconds_left < step_seconds + 2 * save_seconds


def test_a_resumed_run_knows_how_long_things_take(clock: Clock) -> None:
    first = SaveSchedule(max_run_minutes=10, clock=clock)
    first.stepped(100)
    first.saved(20)
    clock.now += 9000
    second = SaveSchedule(max_run_minutes=10, clock=clock)
    second.load_state_dict(first.state_dict())
    assert second.seconds_left == 600
    clock.now += 600 - 1.5 * 120
    assert second.due(1) is None
    clock.now += 1
    assert second.due(1) == "deadline"


STEPS = [5, 10, 15, 20, 100]


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [
        (Keep(), None, {5, 10, 15, 20, 100}),
        (Keep(last=1), None, {100}),
        (Keep(last=2), None, {20, 100}),
        (Keep(last=9), None, {5, 10, 15, 20, 100}),
        (Keep(last=1, every=10), None, {10, 20, 100}),
        (Keep(last=1), 10, {10, 100}),
        (Keep(last=1, best=False), 10, {100}),
        (Keep(last=1), 11, {100}),
        (Keep(last=1, every=15), 5, {5, 15, 100}),
    ],
)
def test_the_rules(keep: Keep, best: int | None, kept: set[int]) -> None:
    assert kept_steps(STEPS, keep, best) == kept
    assert kept_steps(reversed(STEPS), keep, best) == kept
    assert kept_steps([], keep, best) == set()


def test_the_best_is_remembered_and_a_damaged_file_is_said(tmp_path: Path) -> None:
    lines: list[str] = []
    assert read_best(tmp_path, lines.append) is None
    for best in (7, 9, None):
        write_best(tmp_path, best)
        assert read_best(tmp_path, lines.append) == best
    assert lines == []
    for content in (b"", b"\xff", b"[]", b'{"best": "7"}'):
        (tmp_path / STATE_FILE).write_bytes(content)
        assert read_best(tmp_path, lines.append) is None
    assert len(lines) == 4 and all(STATE_FILE in line for line in lines)
