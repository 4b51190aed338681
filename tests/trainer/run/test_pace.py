"""How long a run will still take; by hand."""

from megarl.trainer.run.pace import RECENT, Pace


def after(seconds: list[float]) -> Pace:
    """The pace of a run whose steps ended so many seconds after the one before."""
    pace, now = Pace(), 1000.0
    for number, taken in enumerate(seconds):
        now += taken
        pace.ended(now, taken if number == 0 else None)
    return pace


def test_the_median_of_recent_steps_times_those_that_are_left() -> None:
    assert after([2.0]).left(10) == "0:20"
    assert after([2.0, 4.0, 90.0]).left(10) == "0:40"  # one waited for a checkpoint
    assert after([100.0] * 50 + [1.0] * RECENT).left(61) == "1:01"
    assert after([3600.0]).left(26) == "26:00:00" and after([0.5]).left(7325) == "1:01:02"


def test_nothing_is_said_before_the_first_and_after_the_last_step() -> None:
    assert Pace().left(10) is None
    pace = Pace()
    pace.ended(5.0, None)  # its own time is not known, and no step ended before
    assert pace.left(10) is None
    assert after([2.0]).left(0) is None
