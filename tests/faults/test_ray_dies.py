"""Ray's own servers, and the controller, are killed or stopped: the run ends, and nothing is left of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.cluster.processes import ROOT, alive_after, start_controller
from tests.waiting import wait_for

DEATH_SECONDS, HANG_SECONDS = 30, 90
RAY_SECONDS = 60  # how long Ray would wait for a GCS server


@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_a_killed_server_of_ray(start_run, tmp_path, server):
    """While a rank hangs in a call."""
    family = start_run("hang_if")
    begun = time.monotonic()
    os.kill(family.report["servers"][server], signal.SIGKILL)
    assert family.process.wait(DEATH_SECONDS) == 1
    family.is_gone(DEATH_SECONDS - (time.monotonic() - begun))
    assert f"error: Ray's {server} (process " in (tmp_path / "stderr").read_text()
    (report,) = (tmp_path / "failures").iterdir()
    text = report.read_text()
    assert str(report) in (tmp_path / "stderr").read_text()
    # The ranks still run when they are asked for their stacks.
    assert "rank rank 1 (process " in text and "in hang_if" in text


@pytest.fixture
def joined() -> Iterator[tuple[subprocess.Popen, dict[str, Any]]]:
    """A cluster on this machine that another process owns, and its report with the address."""
    process, report = start_controller("serve")
    yield process, report
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("server", ["raylet", "both", "gcs_server"])
def test_a_killed_server_of_a_cluster_that_was_joined(start_run, joined, tmp_path, server):
    """As under Slurm and KubeRay, the controller is on the head's machine. Ray itself would wait a minute for the GCS server."""
    owner, report = joined
    family = start_run("hang_if", address=report["address"])
    servers = family.report["servers"]
    assert servers.keys() == {"raylet", "gcs_server"}
    assert all(psutil.Process(pid).ppid() == owner.pid for pid in servers.values())
    begun = time.monotonic()
    for pid in servers.values() if server == "both" else [servers[server]]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: list((tmp_path / "failures").glob("*.txt")), DEATH_SECONDS)
    assert family.process.wait(RAY_SECONDS - DEATH_SECONDS) == 1
    family.is_gone(RAY_SECONDS - (time.monotonic() - begun))
    text = (tmp_path / "stderr").read_text()
    assert "error: Ray's " in text and "has ended, and the run with it" in text
    (report,) = (tmp_path / "failures").iterdir()
    assert str(report) in text


@pytest.mark.parametrize(
    "call, server",
    [
        ("pool", "gcs_server"),  # the call survives this server: Ray waits a minute for another one
        pytest.param("pool", "raylet", marks=pytest.mark.slow),
        pytest.param("group", "gcs_server", marks=pytest.mark.slow),
        pytest.param("group", "raylet", marks=pytest.mark.slow),
    ],
)
def test_a_server_is_killed_while_the_controller_is_in_a_call_of_ray(start_run, tmp_path, call, server):
    family = start_run(call, "calls")
    begun = time.monotonic()
    os.kill(family.report["servers"][server], signal.SIGKILL)
    assert family.process.wait(DEATH_SECONDS) in (1, 75)
    family.is_gone(DEATH_SECONDS - (time.monotonic() - begun))
    text = (tmp_path / "stderr").read_text()
    assert f"Ray's {server} (process {family.report['servers'][server]}) has ended" in text
    assert "in calls" in text  # the function that the controller was in


@pytest.mark.slow
def test_a_rank_is_killed_while_another_group_starts(start_run, tmp_path):
    family = start_run("group", "calls")
    begun = time.monotonic()
    os.kill(family.report["workers"][1], signal.SIGKILL)
    assert family.process.wait(DEATH_SECONDS) == 1
    family.is_gone(DEATH_SECONDS - (time.monotonic() - begun))
    assert "WorkerDied: rank rank 1 (process " in (tmp_path / "stderr").read_text()


# The server is killed only once there is a raylet: until then Ray 2.60 waits 30 s for the GCS server, and holds the interpreter's lock.
@pytest.mark.parametrize("server", [pytest.param("raylet", marks=pytest.mark.slow), "gcs_server"])
def test_a_server_is_killed_while_ray_starts(tmp_path, server):
    command = [sys.executable, "-m", "tests.cluster.controllers", "calls", str(tmp_path), "init"]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr)
    try:

        def family_with_raylet() -> dict[int, str] | None:
            assert process.poll() is None
            family = _family(process.pid)
            return family if any("raylet/raylet" in title for title in family.values()) else None

        family = wait_for(family_with_raylet)
        (victim,) = [pid for pid, title in family.items() if title.partition(" ")[0].endswith(f"/{server}")]
        os.kill(victim, signal.SIGKILL)
        begun = time.monotonic()
        code = process.wait(DEATH_SECONDS)
        assert alive_after(family, DEATH_SECONDS - (time.monotonic() - begun)) == []
    finally:
        process.kill()
    text = (tmp_path / "stderr").read_text()
    assert code in (1, 75) and ("RayFailed: " in text or "and this process waits for it" in text), text


def _family(pid: int) -> dict[int, str]:
    """The processes that a process has started: titles by process id."""
    found = {}
    for one in psutil.Process(pid).children(recursive=True):
        try:
            found[one.pid] = " ".join(one.cmdline())
        except psutil.Error:  # it has just ended
            continue
    return found


@pytest.mark.slow
def test_a_stopped_server_of_ray(start_run, tmp_path):
    family = start_run("hang_if")
    begun = time.monotonic()
    os.kill(family.report["servers"]["gcs_server"], signal.SIGSTOP)
    assert family.process.wait(HANG_SECONDS) == 1
    family.is_gone(HANG_SECONDS - (time.monotonic() - begun))
    assert "has been stopped for more than" in (tmp_path / "stderr").read_text()


def test_a_killed_controller(start_run):
    family = start_run("hang_if")
    family.process.kill()
    family.process.wait()
    family.is_gone(DEATH_SECONDS)
