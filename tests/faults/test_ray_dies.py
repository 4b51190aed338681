"""Ray's own servers, and the controller, are killed or stopped: the run ends, and nothing is left of it."""

import os
import signal
import time

import pytest

DEATH_SECONDS, HANG_SECONDS = 15, 90


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
    # The ranks are still there when they are asked where they are.
    assert "rank rank 1 (process " in text and "in hang_if" in text


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
