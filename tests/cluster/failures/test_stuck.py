"""A controller that waits for a server of Ray that is gone or stopped ends; the servers are other processes here."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster.processes import ROOT, alive

# Starts a "server", and waits for some seconds, in a function that is Ray's by its file, or in one of its own.
CONTROLLER = """
import subprocess, sys, threading, time
import megarl, ray
from megarl.cluster import ending_when_stuck, stuck
stuck.STUCK_SECONDS, stuck.STOPPED_SECONDS, stuck._LOOK_SECONDS = 1.0, 1.0, 0.1
exec(compile("def wait(seconds): time.sleep(seconds)", sys.argv[3] or ray.__file__, "exec"))
exec(compile("def train(seconds): wait(seconds)", megarl.__file__, "exec"))
with ending_when_stuck(75):
    server = subprocess.Popen([sys.argv[1], "100"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(server.pid, flush=True)
    train(float(sys.argv[2]))
print("went on")
"""


@pytest.fixture
def start(tmp_path):
    """start(seconds, file): (a controller that waits for so long in a function of that file, or of Ray's; its server's pid)."""
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
    time.sleep(0.5)
    os.kill(server, number)
    assert controller.wait(30) == 75
    message = controller.stderr.read()
    assert message.startswith(
        f"error: Ray's raylet (process {server}) {words}, and this process waits for it"
    )
    assert 'File "<string>"' in message


def test_a_controller_that_is_elsewhere_is_left_alone(start):
    controller, server = start(4, "own.py")
    os.kill(server, signal.SIGKILL)
    assert controller.wait(30) == 0 and controller.stdout.read() == "went on\n"


def test_a_server_that_goes_on_and_a_controller_that_ends_in_time_are_left_alone(start):
    controller, server = start(2)
    os.kill(server, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(server, signal.SIGCONT)
    time.sleep(1.2)
    os.kill(server, signal.SIGKILL)
    assert controller.wait(30) == 0 and controller.stdout.read() == "went on\n"
