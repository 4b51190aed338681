"""Controllers that tests kill, and what they leave behind."""

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.processes import alive, alive_after, carrying, guards_of, start_controller


@pytest.fixture(scope="session", autouse=True)
def prepared(warm_imports: None) -> None:
    """Runs within this process start in the same way as the runs of tests/fixtures/runs.py."""


@dataclass(frozen=True)
class Family:
    """A controller with all that it has started: processes, the folders that are to be removed, and who listens on its ports: process ids and
    ports."""

    process: subprocess.Popen
    report: dict[str, Any]
    pids: list[int]
    folders: list[str]
    listeners: set[tuple[int, int]]

    def is_gone(self, seconds: float) -> None:
        """Assert that nothing of the run is left after at most `seconds`."""
        left = alive_after(self.pids, seconds)
        assert [_title(pid) for pid in left] == []
        for mark in self.report["marks"]:
            # Processes that Ray has started since may still be on their way out.
            assert alive_after(carrying(mark.partition("=")[2]), 10) == []
        assert [folder for folder in self.folders if os.path.exists(folder)] == []
        # Not the ports alone: another test's process may have got one of them by now.
        assert listening({str(pid) for pid, _ in self.listeners}).isdisjoint(self.listeners)


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Family]]:
    """start_run(method): a run that calls `method` of its ranks for ever (tests/cluster/controllers.py).

    With controller="calls" the argument is the call of Ray that the run is in. The run joins the cluster at `address`, if there is one.
    """
    processes = []

    def start(method: str, controller: str = "run", address: str = "") -> Family:
        stderr = (tmp_path / "stderr").open("w")
        arguments = [tmp_path, method, *([address] if address else [])]
        process, report = start_controller(controller, *arguments, stderr=stderr)
        processes.append(process)
        watched = [process.pid, *report["workers"], *report["children"], *report["started"]]
        guards = guards_of(watched)
        folders = [folder for folders in guards.values() for folder in folders]
        # The folders of two ranks, and Ray's.
        assert len(folders) == (2 if address else 3) and all(os.path.isdir(folder) for folder in folders)
        ports = {port for _, port in listening(map(str, watched))}
        assert ports
        listeners = {(pid, port) for pid, port in listening(os.listdir("/proc")) if port in ports}
        return Family(process, report, alive([*watched, *guards]), folders, listeners)

    yield start
    for process in processes:
        process.kill()
        process.wait()


def _title(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return f"process {pid}, which has ended since"


def listening(pids: Any) -> set[tuple[int, int]]:
    """The TCP ports on which processes listen, each with the process's id."""
    found = set()
    for pid in pids:
        if not pid.isdigit():
            continue
        try:
            connections = psutil.Process(int(pid)).net_connections("tcp")
        except psutil.Error:
            continue
        found |= {(int(pid), one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}
    return found
