"""A background task: how failures reach the main thread, and on which thread requested calls run."""

import threading
import time

import pytest

from megarl.cluster import Watch
from megarl.trainer.schedule.concurrent_views import Background, Ended, InterruptedWatch


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch observes no ranks and no cluster."""
    monkeypatch.setattr(Watch, "look", lambda self, processes, called: None)


def no_thread_is_left() -> bool:
    return not any(thread.name == "task" for thread in threading.enumerate())


def test_its_result_and_what_it_asks_for_is_done_by_the_main_thread() -> None:
    background, did = Background("task"), []

    def task() -> int:
        background.ask(lambda: did.append(threading.current_thread()))
        return len(did)

    background.start(task)
    time.sleep(0.1)
    assert did == []  # the main thread does not wait for the task yet
    assert background.result(lambda: None) == 1
    assert did == [threading.main_thread()] and no_thread_is_left()


def test_its_exception_is_raised_by_the_main_threads_next_look() -> None:
    background = Background("task")
    watch = InterruptedWatch(60.0, None, background.check)
    assert isinstance(watch, Watch)

    def task() -> None:
        raise ValueError("of the task")

    watch.look([], [])
    background.start(task)
    deadline = time.monotonic() + 60
    with pytest.raises(ValueError, match="of the task"):
        while time.monotonic() < deadline:
            watch.look([], [])
    with pytest.raises(ValueError, match="of the task"):
        background.result(lambda: None)
    assert no_thread_is_left()


@pytest.mark.parametrize("asks", [False, True])
def test_it_ends_when_it_is_told(asks: bool) -> None:
    """The task ends both while it waits for ranks and while it waits for the main thread."""
    background, begun, ended = Background("task"), threading.Event(), []
    watch = InterruptedWatch(60.0, None, background.obey)

    def task() -> None:
        begun.set()
        try:
            if asks:
                background.ask(lambda: None)
            while True:
                watch.look([], [])
                time.sleep(0.01)
        except Ended:
            ended.append(True)
            raise

    background.start(task)
    assert begun.wait(30)
    told = time.monotonic()
    background.end()
    assert time.monotonic() - told < 30 and ended == [True] and no_thread_is_left()


def test_what_the_main_thread_finds_while_it_waits_is_raised() -> None:
    background, released = Background("task"), threading.Event()
    background.start(released.wait)

    def look() -> None:
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        background.result(look)
    released.set()
    background.end()
    assert no_thread_is_left()


def test_what_it_asks_for_may_fail() -> None:
    """If a requested call fails, it raises in the main thread, and the task, which is then ended, does not continue."""
    background, went_on = Background("task"), []

    def task() -> None:
        background.ask(lambda: 1 / 0)
        went_on.append(True)

    background.start(task)
    with pytest.raises(ZeroDivisionError):
        background.result(lambda: None)
    background.end()
    assert went_on == [] and no_thread_is_left()
