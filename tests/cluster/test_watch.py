"""Processes that are stopped, calls in which no rank works; and long work, which is neither."""

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from megarl.cluster import Watch, WorkerFailed, WorkerHung, wait, watch
from megarl.cluster.watch import signs_of_life
from tests.cluster.processes import ROOT, alive


@pytest.fixture
def quick(monkeypatch):
    """The watch looks often, and reports a stop after 2 s; slow tests do without this fixture."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr(watch, "STOPPED_SECONDS", 2.0)


def test_signs_of_life():
    """Signs of life of processes that sleep, work or are stopped, together with their children."""
    code = (
        "import sys, time\nprint('begun', flush=True)\n"
        "while True:\n  time.sleep(float(sys.argv[1])) if sys.argv[1] != '0' else None"
    )
    environment = {**os.environ, "MEGARL_RANK": "b"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, seconds], env=env, stdout=subprocess.PIPE)
        for seconds, env in (("1000", None), ("0", environment), ("1000", environment))
    ]
    a, b, child = (process.pid for process in processes)
    ranks = {a: "MEGARL_RANK=a", b: "MEGARL_RANK=b"}
    try:
        assert [process.stdout.readline() for process in processes] == [b"begun\n"] * 3
        before = signs_of_life(ranks)
        os.kill(child, signal.SIGSTOP)
        time.sleep(1)  # some processes work in this second
        after = signs_of_life(ranks)
        work = {mark: after[mark].work - before[mark].work for mark in after}
        assert work["MEGARL_RANK=a"] < watch.IDLE_WORK < work["MEGARL_RANK=b"]
        assert before["MEGARL_RANK=b"].stopped == () == after["MEGARL_RANK=a"].stopped
        (stopped,) = after["MEGARL_RANK=b"].stopped
        assert stopped.endswith(f"(process {child})")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert signs_of_life(ranks) == {}


def test_a_stopped_rank_is_found_although_nobody_calls_it(start_group, quick):
    actor, critic = start_group("actor", 1), start_group("critic", 2)
    refs = actor.call("hang_if", 0)
    os.kill(critic.pids[1], signal.SIGSTOP)
    with pytest.raises(
        WorkerHung, match=r"critic rank 1 .*hangs: stopped for more than 2 s: .*critic"
    ) as caught:
        wait(refs, [actor, critic], timeout=100, watch=Watch(idle_timeout=None))
    assert (caught.value.role, caught.value.rank, caught.value.pid) == ("critic", 1, critic.pids[1])


def test_a_stopped_child_of_a_rank_is_found(start_group, quick):
    group = start_group("engine", 1)
    (children,) = wait(group.call("start_children"), [group])
    refs = group.call("hang_if", 0)
    os.kill(children[1], signal.SIGSTOP)  # one with a session of its own
    with pytest.raises(WorkerHung, match=rf"engine rank 0 .* sleep \(process {children[1]}\)"):
        wait(refs, [group], timeout=100, watch=Watch(idle_timeout=None))


def test_the_rank_that_others_wait_for_is_named(start_group, quick, with_torch):
    """Ranks 0 and 2 are in a collective, which rank 1 does not enter."""
    group = start_group("actor", 3, fork_server=with_torch)
    refs = group.call("reduce_unless", 1, 600.0)
    with pytest.raises(WorkerHung, match="none of the ranks that are waited for has worked") as caught:
        wait(refs, [group], timeout=100, watch=Watch(idle_timeout=3.0))
    assert caught.value.rank == 1
    assert "actor rank 0, actor rank 2 wait in a collective" in str(caught.value)


def test_a_collective_that_takes_too_long_names_who_is_missing(start_group, with_torch):
    group = start_group("actor", 3, fork_server=with_torch)
    with pytest.raises(WorkerFailed, match=r"actor rank [02] .*Timed out waiting") as caught:
        wait(group.call("reduce_unless", 1, 3.0), [group], timeout=60)
    assert f"missing in the collective: {group.processes[1]}" in str(caught.value)


def test_work_is_no_hang(start_group, quick):
    """One rank works, in C code that holds the interpreter's lock, while the other sleeps."""
    group = start_group("actor", 2)
    refs = group.call("work_if", 1, 5.0)
    assert wait(refs, [group], timeout=100, watch=Watch(idle_timeout=2.0)) == [0, 1]


def test_a_rank_that_waits_for_its_disk_does_not_hang(start_group, quick, tmp_path):
    """As in fsync of a checkpoint's file: no processor time, and no bytes are counted."""
    group, pipe = start_group("actor", 1), tmp_path / "pipe"
    os.mkfifo(pipe)
    refs = group.call("open_on_a_slow_disk", str(pipe))
    disk = threading.Timer(8.0, pipe.write_text, [""])
    disk.start()
    try:
        assert wait(refs, [group], timeout=60, watch=Watch(idle_timeout=2.0)) == [0]
    finally:
        disk.join()


@pytest.mark.parametrize(
    ("state", "function", "waits"),
    [
        ("D", "folio_wait_bit_common", True),
        ("S", "request_wait_answer", True),  # FUSE, also in write and fsync (seen with Linux 6.18)
        ("S", "futex_do_wait", False),
        ("S", "0", False),  # a kernel that does not tell
        ("R", "0", False),
    ],
)
def test_threads_that_wait_for_a_file_system(monkeypatch, state, function, waits):
    texts = {"stat": f"12 (a (b) c) {state} 1 12 12", "wchan": function}
    monkeypatch.setattr(
        watch, "open", lambda path: io.StringIO(texts[path.rpartition("/")[2]]), raising=False
    )
    assert watch._waits_for_disk(str(os.getpid())) is waits


def test_a_rank_that_gets_no_processor_does_not_hang(start_group, quick):
    """Its threads have the lowest priority on a processor that another program occupies."""
    group = start_group("actor", 1)
    (pid,) = group.pids
    refs = group.call("work_if", 0, 1.0)
    processor = min(os.sched_getaffinity(0))
    busy = f"import os, time; os.sched_setaffinity(0, [{processor}]); end = time.monotonic() + 6\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", busy]):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):  # a thread that has ended
                os.sched_setaffinity(int(thread), [processor])
                os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        assert wait(refs, [group], timeout=60, watch=Watch(idle_timeout=2.0)) == [0]


def test_a_rank_that_should_be_working_is_found_between_its_calls(start_group, quick):
    group, idle = start_group("engine", 1), Watch(idle_timeout=1.0)
    for _ in range(8):  # no call waits for the rank
        wait([], [group], watch=idle)
        time.sleep(0.4)
    deadline = time.monotonic() + 30
    with pytest.raises(WorkerHung, match="none of the ranks that are waited for has worked for 1 s"):
        while time.monotonic() < deadline:
            wait([], [group], watch=idle, busy={process.mark for process in group.processes})
            time.sleep(0.2)


def test_a_rank_that_may_be_spared(start_group):
    """Its death is reported only to calls that wait for it."""
    engines, actor = start_group("engine", 2), start_group("actor", 1)
    os.kill(engines.pids[1], signal.SIGKILL)
    assert wait(actor.call("hang_if", 5), [engines, actor], spares=[engines]) == [0]
    assert wait([engines.call_rank(0, "hang_if", 5)], [engines, actor], spares=[engines]) == [0]
    with pytest.raises(RuntimeError, match=r"engine rank 1 .* died"):
        wait(engines.call("hang_if", 5), [engines, actor], spares=[engines])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_started_anew(start_group, tmp_path, how):
    group = start_group("engine", 2, env={"COLOUR": "red"})
    before = wait(group.call("get_info"), [group])
    pids, started = group.pids, group.started
    os.kill(pids[1], how)
    begun = time.monotonic()
    group.restart(1)
    wait([group.started[1]], [group], timeout=100)
    assert time.monotonic() - begun < 60
    assert group.pids[0] == pids[0] and group.pids[1] != pids[1] and group.started[0] == started[0]
    assert not os.path.exists(f"/proc/{pids[1]}") and not os.path.exists(before[1].scratch)
    after = wait(group.call("get_info"), [group])
    assert after[0] == before[0]
    assert after[1].rank == 1 and os.path.isdir(after[1].scratch)
    assert after[1].log_path == str(tmp_path / "engine-rank1.restart1.log")
    assert wait(group.call("environment", "COLOUR"), [group]) == [["red"]] * 2
    assert wait(group.call("echo", 1), [group]) == [(0, (1,), {}), (1, (1,), {})]


# Starts a "server", and waits for some seconds, in a function whose file is one of Ray's, or in a function of its own.
CONTROLLER = """
import subprocess, sys, threading, time
import megarl, ray
from megarl.cluster import ending_when_stuck, watch
watch.STUCK_SECONDS, watch.STOPPED_SECONDS, watch._LOOK_SECONDS = 1.0, 1.0, 0.1
exec(compile("def train(seconds): wait(seconds)", megarl.__file__, "exec"))
with ending_when_stuck(75):
    server = subprocess.Popen([sys.argv[1], "100"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    exec(compile("def wait(seconds): print(server.pid, flush=True); time.sleep(seconds)", sys.argv[3] or ray.__file__, "exec"))
    train(float(sys.argv[2]))
print("went on")
"""


@pytest.fixture
def start(tmp_path):
    """start(seconds, file): (a controller that waits for `seconds` in a function of `file`, or of Ray; its server's pid)."""
    server = tmp_path / "raylet"
    server.symlink_to(shutil.which("sleep"))
    pids = []

    def start(seconds, file=""):
        process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLER, str(server), str(seconds), file],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        pids.append(int(process.stdout.readline()))
        return process, pids[-1]

    yield start
    for pid in alive(pids):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number, words", [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "is stopped")])
def test_it_ends_says_where_it_was_and_asks_to_be_started_again(start, number, words):
    controller, server = start(100)
    os.kill(server, number)
    assert controller.wait(100) == 75
    message = controller.stderr.read()
    assert message.startswith(
        f"error: Ray's raylet (process {server}) {words}, and this process waits for it"
    )
    assert 'File "<string>"' in message


def test_a_controller_that_is_elsewhere_is_left_alone(start):
    controller, server = start(4, "own.py")
    os.kill(server, signal.SIGKILL)
    assert controller.wait(100) == 0 and controller.stdout.read() == "went on\n"


def test_a_server_that_goes_on_and_a_controller_that_ends_in_time_are_left_alone(start):
    controller, server = start(2)
    os.kill(server, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(server, signal.SIGCONT)
    time.sleep(1.2)
    os.kill(server, signal.SIGKILL)
    assert controller.wait(100) == 0 and controller.stdout.read() == "went on\n"
