"""One writer in a folder at a time: on this machine, between machines, and after writers have died in any way."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.checkpoints import writer_lock
from megarl.checkpoints.writer_lock import WriterLock

HOLD = """
import sys, time
from megarl.checkpoints.writer_lock import WriterLock
lock = WriterLock(sys.argv[1], print, beat_seconds=0.1, dead_seconds=float(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def marks(folder: Path) -> list[Path]:
    return sorted(folder.glob(".writer.*"))


class Holder:
    """Another process that writes to a folder."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", HOLD, str(folder), "1.0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "held\n"

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    holder = Holder(tmp_path)
    yield holder
    holder.end()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process appears to be on another machine, on which process ids say nothing about other processes."""
    monkeypatch.setattr(writer_lock, "_machine", lambda: "another boot pid:[1]")


def test_a_second_writer_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    first = WriterLock(tmp_path, print)
    with pytest.raises(ValueError, match=rf"process {os.getpid()} on \S+, since \d{{4}}-"):
        WriterLock(tmp_path, print)
    assert len(marks(tmp_path)) == 1
    first.check()
    first.release()
    assert marks(tmp_path) == []
    WriterLock(tmp_path, print).release()


def test_a_process_that_lives_or_is_stopped_holds_and_one_that_was_killed_does_not(
    tmp_path: Path, holder: Holder
) -> None:
    with pytest.raises(ValueError, match=f"process {holder.process.pid} "):
        WriterLock(tmp_path, print)
    holder.process.send_signal(signal.SIGSTOP)
    with pytest.raises(ValueError, match=f"process {holder.process.pid} "):
        WriterLock(tmp_path, print, dead_seconds=0.1)
    assert len(marks(tmp_path)) == 1
    holder.end()
    begin = time.monotonic()
    lock = WriterLock(tmp_path, pytest.fail)  # reports nothing, waits for nothing
    assert time.monotonic() - begin < 30
    assert [path.name for path in marks(tmp_path)] == [f".writer.{lock.token}"]
    lock.release()


def test_a_process_id_that_was_given_again_does_not_hold(tmp_path: Path) -> None:
    writer = writer_lock._this_process()
    earlier = replace(writer, started=writer.started - 1)
    (tmp_path / ".writer.0").write_text(json.dumps(vars(earlier)))
    WriterLock(tmp_path, pytest.fail).release()
    assert marks(tmp_path) == []


@pytest.mark.usefixtures("elsewhere")
def test_a_writer_on_another_machine_holds_while_it_gives_signs(tmp_path: Path, holder: Holder) -> None:
    with pytest.raises(ValueError, match=f"process {holder.process.pid} on "):
        WriterLock(tmp_path, print, beat_seconds=0.1, dead_seconds=30.0)
    lines: list[str] = []
    holder.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    lock = WriterLock(tmp_path, lines.append, beat_seconds=0.1, dead_seconds=1.0)
    assert 0.5 < time.monotonic() - begin < 30
    assert len(lines) == 1 and re.search(rf"process {holder.process.pid} on .* waiting at most", lines[0])
    assert len(marks(tmp_path)) == 1
    lock.check()
    lock.release()


def test_a_writer_that_was_taken_for_dead_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = WriterLock(tmp_path, print, beat_seconds=3600.0)
    os.utime(tmp_path / f".writer.{sleeper.token}", (1, 1))
    with monkeypatch.context() as patch:
        patch.setattr(writer_lock, "_machine", lambda: "another boot pid:[1]")
        other = WriterLock(tmp_path, pytest.fail)
    with pytest.raises(RuntimeError, match="may not write"):
        sleeper.check()
    other.check()
    sleeper.release()
    other.check()
    other.release()


def test_clocks_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is an hour ahead does not take a living writer for dead: the file system's times count."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    living = WriterLock(tmp_path, print, beat_seconds=0.1)
    monkeypatch.setattr(writer_lock, "_machine", lambda: "another boot pid:[1]")
    with pytest.raises(ValueError, match="another run writes"):
        WriterLock(tmp_path, print, dead_seconds=30.0)
    living.release()


def test_a_mark_that_was_not_written_to_its_end_is_judged_by_its_age(tmp_path: Path) -> None:
    mark = tmp_path / ".writer.0"
    mark.write_text('{"host": "a')
    os.utime(mark, (1, 1))
    WriterLock(tmp_path, pytest.fail).release()
    assert marks(tmp_path) == []


def test_of_many_that_start_at_once_one_writes_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    most, got = [0], [0]

    def work(number: int) -> None:
        for _ in range(5):
            try:
                lock = WriterLock(tmp_path, print)
            except ValueError:
                continue
            inside.append(number)
            most[0], got[0] = max(most[0], len(inside)), got[0] + 1
            time.sleep(0.01)
            inside.remove(number)
            lock.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and got[0] >= 1
    assert marks(tmp_path) == []
