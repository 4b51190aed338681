"""Where processes are, asked from outside."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megarl.cluster.report import stacks_here

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
    """The child has no handler of the signal, which would kill it: it is not asked. One that is stopped cannot answer."""
    log = tmp_path / "log"
    with log.open("w") as file:
        environment = {**os.environ, "MEGARL_RANK": "stacks"}
        process = subprocess.Popen([sys.executable, "-c", CODE], stdout=file, stderr=file, env=environment)
    try:
        deadline = time.monotonic() + 30
        while "ready" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        rank = (process.pid, "MEGARL_RANK=stacks", str(log))
        (found,) = stacks_here([rank])
        own, child = found.processes
        assert "in at_the_bottom" in own.text and not own.stopped and not found.waits_for_others
        assert (child.title, child.text) == ("sleep 1000", "")
        assert found.log_tail == "ready"  # as it was before anybody asked
        assert Path(f"/proc/{child.pid}").exists()
        os.kill(process.pid, signal.SIGSTOP)
        (found,) = stacks_here([rank])
        assert found.processes[0].stopped and found.processes[0].text == ""
        os.kill(child.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert stacks_here([rank])[0].processes == ()
