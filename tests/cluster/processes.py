"""Helpers that look at processes from outside, by psutil."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import IO, Any

import psutil

from megarl.cluster import guard
from megarl.cluster.ranks import RankProcess
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]


def alive(pids: Iterable[int]) -> list[int]:
    """The numbers among `pids` whose processes run (zombies do not)."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def alive_after(pids: Iterable[int], seconds: float) -> list[int]:
    """The numbers among `pids` whose processes still run after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def titled(text: str, processes: Iterable[psutil.Process]) -> list[int]:
    """The numbers of those processes whose command line has this text; some may have ended meanwhile."""
    found = []
    for process in processes:
        try:
            if text in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_until_it_hangs(process: RankProcess) -> None:
    """Wait until a rank of workers.py has printed that it hangs."""
    wait_for(lambda: "I hang now" in Path(process.log_path).read_text())


def carrying(token: str) -> list[int]:
    """Pids of all living processes with `token` in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(token in value for value in process.environ().values()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return alive(found)


def guards_of(pids: Collection[int]) -> dict[int, list[str]]:
    """A guard's pid -> the folders that it will remove, for each guard of one of `pids`."""
    found = {}
    for process in psutil.process_iter():
        try:
            arguments = process.cmdline()
        except psutil.Error:
            continue
        if guard.__file__ in arguments:
            watched, _, _, *folders = arguments[arguments.index(guard.__file__) + 1 :]
            if int(watched) in pids:
                found[process.pid] = folders
    return found


def start_controller(
    name: str, *arguments: Any, seconds: float = 250, stderr: IO | None = None
) -> tuple[subprocess.Popen, dict[str, Any]]:
    """Starts `controllers.py name arguments...`; returns it with the JSON line that it reported in time."""
    command = [sys.executable, "-m", "tests.cluster.controllers", name, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    for line in process.stdout:
        if line.startswith("{"):
            timer.cancel()
            return process, json.loads(line)
    timer.cancel()
    raise AssertionError(f"{name} ended with status {process.wait()} and reported nothing")
