"""A training run as chaos.py sees it, from outside: its processes, its output, and its remains."""

import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
# How long after a controller's end anything may be left of it; the guards' own limit is 10 s.
GONE_SECONDS = 30.0
REQUEUE = 75  # the exit code of a command that asks to be started again
# Ends of a controller, one after the other and without a step between them, that nobody has asked for.
MAX_FAILURES = 3
_LOOK_SECONDS, _WATCH_SECONDS = 3.0, 0.5
# Not of the names that guards drop: they, too, have to be gone at the end.
_MARK = "CHAOS_RUN"
_CONTROLLER = "controller"
# The beginnings of processes' titles, or the names of their programs.
_TITLES = {
    "actor rank": "ray::actor-rank",
    "critic rank": "ray::critic-rank",
    "rollout engine": "ray::rollout-rank",
    "SGLang scheduler": "sglang::scheduler",
    "Ray raylet": "raylet",
    "Ray GCS": "gcs_server",
}
KINDS = (*_TITLES, "reward worker", _CONTROLLER)
_REWARD_WORKER = "megarl.rewards.processes.worker"
_FOOTPRINT = re.compile(r"/(?:tmp/megarl-[\w]+|dev/shm/[\w.-]+)")
_RANK = re.compile(r"^MEGARL_RANK=(\w+)$", re.MULTILINE)


@dataclass
class Start:
    """One start of the run's command: the controller and all that it has started carry `token` in their environment.

    Attributes:
        footprints: folders and files in /tmp and /dev/shm that its processes have.
        ended: when the controller did, by `time.monotonic`; None: it runs.
        gone: how many seconds later nothing was left.
    """

    process: subprocess.Popen
    token: str
    footprints: set[str] = field(default_factory=set)
    ended: float | None = None
    gone: float | None = None
    orphans: tuple[str, ...] = ()

    def members(self) -> Iterator[psutil.Process]:
        """Its living processes."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self.token and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                continue

    def look(self) -> None:
        """Note what its processes have in /tmp and /dev/shm."""
        for process in self.members():
            try:
                text = " ".join(process.cmdline())
                environment = "\n".join(f"{name}={value}" for name, value in process.environ().items())
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except (psutil.Error, OSError):
                continue
            self.footprints.update(_FOOTPRINT.findall(f"{text}\n{maps}"))
            self.footprints.update(f"/dev/shm/megarl-{token}" for token in _RANK.findall(environment))

    def left(self) -> list[str]:
        """Its living processes, and files that are still there."""
        processes = [f"process {one.pid}: {_title(one)}" for one in self.members()]
        return processes + sorted(path for path in self.footprints if os.path.exists(path))


@dataclass
class AttackedRun:
    """A run in `folder`, started by `command` again and again until it has come to its end.

    Attributes:
        last_step: that was finished, as far as it was not lost again.
        resumed: how often the run has begun to make steps, after a start of the command or by itself.
        steps_said: steps that were finished, in all.
        lost: steps that had been finished and were made again, of the last time that it went on.
        finished: whether it has come to its end.
        failure: why it does not go on; None: it does.
    """

    command: list[str]
    folder: Path
    sources: Path = REPOSITORY  # the megarl that runs
    is_restarted: bool = True  # or is any end of it but the good one a failure
    starts: list[Start] = field(default_factory=list)
    last_step: int = 0
    resumed: int = 0
    steps_said: int = 0
    lost: int = 0
    finished: bool = False
    failure: str | None = None
    ends: list[str] = field(
        default_factory=list
    )  # of the command: finished, killed, told to end, stuck, unexpected
    errors: list[str] = field(default_factory=list)  # what the unexpected ones said
    signs: list[str] = field(default_factory=list)  # that a failure was noticed
    _output: TextIO | None = None
    _unread: str = ""  # the beginning of a line
    _going_on: int = 0
    _is_making_steps: bool = False
    _reports: int = 0
    _failures: int = 0
    _told: set[signal.Signals] = field(default_factory=set)  # the controller that runs
    _looked: float = 0.0
    _watched: float = 0.0

    @property
    def start(self) -> Start:
        return self.starts[-1]

    @property
    def phase(self) -> str:
        """start: no step was finished since the command was started, or started itself again; save; step."""
        if not self._is_making_steps:
            return "start"
        return "save" if self.is_saving else "step"

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.folder / "checkpoints").glob(".step-*.partial"))

    def begin(self) -> None:
        """Start the command."""
        self.folder.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(8)
        with (self.folder / "stdout").open("a") as out, (self.folder / "stderr").open("a") as err:
            process = subprocess.Popen(
                self.command,
                cwd=self.sources,
                env={
                    **os.environ,
                    "PYTHONPATH": str(self.sources),
                    "PYTHONUNBUFFERED": "1",
                    "COLUMNS": "200",
                    _MARK: token,
                },
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._output = self._output or (self.folder / "stdout").open()
        self._is_making_steps, self._told = False, set()
        self.starts.append(Start(process, token))

    def victims(self) -> dict[str, list[int]]:
        """Process ids of what may be hit now, by kind."""
        found: dict[str, list[int]] = {}
        for process in self.start.members():
            try:
                title, name = " ".join(process.cmdline()), process.name()
            except psutil.Error:
                continue
            if process.pid == self.start.process.pid:
                found[_CONTROLLER] = [process.pid]
            elif _REWARD_WORKER in title:
                found.setdefault("reward worker", []).append(process.pid)
            else:
                for kind, begin in _TITLES.items():
                    if title.startswith(begin) or name == begin:
                        found.setdefault(kind, []).append(process.pid)
        return found

    def hit(self, pid: int, number: signal.Signals) -> bool:
        """Send a signal to one of its processes; False: it has ended before."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        if pid == self.start.process.pid:
            self._told.add(number)
        return True

    def poll(self) -> None:
        """Take notice of what has happened; the command is started again where that is for others to do."""
        self._read()
        reports = len(list((self.folder / "failures").glob("*.txt")))
        self.signs += ["report"] * (reports - self._reports)
        self._reports = reports
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self.start.look()
        self._watch_ends(now)
        code = self.start.process.poll()
        if code is not None and self.start.ended is None:
            self._read()
            self.start.ended = now
            self._ended(code)

    def newest_report(self) -> str | None:
        """The newest report of a failure."""
        reports = sorted((self.folder / "failures").glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)
        return reports[-1].read_text() if reports else None

    def give_up(self, why: str) -> None:
        """End it, whatever it is at."""
        self.failure = why
        self.stop()

    def stop(self) -> None:
        """Kill the controller and, by their guards, all of its processes; wait until that is done."""
        if self.starts and self.start.ended is None:
            self.start.process.kill()
            self.start.process.wait()
            self.start.ended = time.monotonic()
        while not all(start.gone is not None for start in self.starts):
            self._watch_ends(time.monotonic())
            time.sleep(0.1)

    def _read(self) -> None:
        assert self._output is not None
        *lines, self._unread = (self._unread + self._output.read()).split("\n")
        for line in lines:
            if found := re.match(r"going on from step (\d+):", line):
                self._going_on = int(found[1])
            elif line.startswith("run folder: "):
                self.lost = max(0, self.last_step - self._going_on)
                self.last_step, self._going_on, self._is_making_steps = self._going_on, 0, False
                self.resumed += 1
            elif found := re.match(r"step (\d+)/", line):
                self.last_step, self._is_making_steps = int(found[1]), True
                self.steps_said += 1
                self._failures = 0
            elif line.startswith("starting again: ") or "is lost: starting it anew" in line:
                self.signs.append("said")

    def _ended(self, code: int) -> None:
        """Start the command again, as a job's scheduler does after a preemption or the loss of a node."""
        self.ends.append(self._why(code))
        if code == 0:
            self.finished = True
            return
        self.signs.append(f"exit code {code}")
        if self.ends[-1] == "unexpected":
            tail = (self.folder / "stderr").read_text()[-2000:]
            self.errors.append(f"the command ended with exit code {code}: {tail}")
            self._failures += 1
        if not self.is_restarted or self._failures >= MAX_FAILURES:
            self.failure = f"the command ended with exit code {code} ({self.ends[-1]}); {self.errors}"
        else:
            self.begin()

    def _why(self, code: int) -> str:
        if code == 0:
            return "finished"
        if code == -signal.SIGKILL and signal.SIGKILL in self._told:
            return "killed"
        if code == REQUEUE:
            return "told to end" if signal.SIGTERM in self._told else "stuck"
        return "unexpected"

    def _watch_ends(self, now: float) -> None:
        """Of each controller that has ended: is anything left?"""
        if now - self._watched < _WATCH_SECONDS:
            return
        self._watched = now
        for start in self.starts:
            if start.ended is None or start.gone is not None:
                continue
            left = start.left()
            if not left:
                start.gone = now - start.ended
            elif now - start.ended >= GONE_SECONDS:
                start.gone, start.orphans = now - start.ended, tuple(left)
                for process in start.members():
                    process.kill()


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80]
    except psutil.Error:
        return "has just ended"
