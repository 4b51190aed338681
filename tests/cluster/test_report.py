"""Stacks of processes, taken from outside, and the conclusions that are drawn from them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from megarl.cluster import worker
from megarl.cluster.report import ProcessStacks, RankStacks, stacks_here
from megarl.util import rendezvous
from megarl.weight_sync import inbox, links
from tests.waiting import wait_for

CODE = """
import subprocess, time
from megarl.util.signals import outlive_job_signals

def at_the_bottom():
    print("ready", flush=True)
    time.sleep(1000)

outlive_job_signals()
child = subprocess.Popen(["sleep", "1000"])
at_the_bottom()
"""


def test_stacks_of_a_rank_and_of_what_it_started(tmp_path):
    """The child has no handler for the signal, which would kill it, and is not asked for its stack. A stopped process cannot answer."""
    log = tmp_path / "log"
    with log.open("w") as file:
        environment = {**os.environ, "MEGARL_RANK": "stacks"}
        process = subprocess.Popen([sys.executable, "-c", CODE], stdout=file, stderr=file, env=environment)
    try:
        wait_for(lambda: "ready" in log.read_text())
        rank = (process.pid, "MEGARL_RANK=stacks", str(log))
        (found,) = stacks_here([rank])
        own, child = found.processes
        assert "in at_the_bottom" in own.text and not own.stopped and not found.waits_for_others
        assert (child.title, child.text) == ("sleep 1000", "")
        assert found.log_tail == "ready"  # as it was before the stacks were asked for
        assert Path(f"/proc/{child.pid}").exists()
        os.kill(process.pid, signal.SIGSTOP)
        (found,) = stacks_here([rank])
        assert found.processes[0].stopped and found.processes[0].text == ""
        os.kill(child.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: stacks_here([rank])[0].processes == ())  # the child may still be on its way out


def stacks_in(file: str | None, function: str) -> RankStacks:
    """Stacks in faulthandler's format, of a rank that is in a function."""
    text = f'Thread 0x1 (most recent call first):\n  File "{file}", line 7 in {function}\n'
    return RankStacks((ProcessStacks(1, "rank", "S", text),), "")


def test_a_rank_in_a_rendezvous_or_a_weight_sync_waits_for_others():
    for module in (rendezvous, inbox, links):
        assert stacks_in(module.__file__, "wait").waits_for_others
    assert not stacks_in(worker.__file__, "invoke").waits_for_others


def test_a_rank_is_called_while_it_is_in_the_workers_methods():
    assert stacks_in(worker.__file__, "invoke").is_called
    assert not stacks_in(links.__file__, "receive").is_called
