"""A job is told to end: every process gets the signal, and only the controller acts on it."""

import json
import os
import signal
import time

import pytest

from tests.cluster.processes import alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_all_processes_of_a_job_are_told_to_end(start_run, number):
    """As Slurm does it. Ranks and Ray live on until the controller has fetched the state that it saves."""
    family = start_run("echo")
    ours = {*family.report["workers"], *family.report["started"], *family.pids} - set(
        family.report["children"]
    )
    for pid in alive(ours - {family.process.pid}):
        os.kill(pid, number)
    time.sleep(1)
    assert set(alive(ours)) == set(alive(family.pids)) - set(family.report["children"])
    family.process.send_signal(number)
    saved = next(json.loads(line) for line in family.process.stdout if line.startswith("{"))
    name = signal.Signals(number).name
    assert saved == {"saved": [[0, [name], {}], [1, [name], {}]], "pids": family.report["workers"]}
    assert family.process.wait(60) == 75
    family.is_gone(30)
