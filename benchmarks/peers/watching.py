"""A command and all its descendants, watched from outside: seconds of the processors, memory, and the seconds that other processes took."""

import os
import secrets
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

INTERVAL = 0.2  # seconds between looks
LOOKS_PER_MEMORY = 15  # of two dozen processes, proportional set sizes take a tenth of a second to read
END_SECONDS = 10  # that killed processes have
MARK = "PEERS_RUN"  # an environment variable: every process of a command is known by its value
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Look:
    """At `time` (of the epoch): seconds that the processors had worked for the command, and for others, since it began."""

    time: float
    own: float
    others: float


@dataclass
class Watched:
    """The readings of a command.

    Attributes:
        began: when it was started, seconds of the epoch.
        peak_pss: largest sum of the proportional set sizes of its processes, bytes.
        processes: the most at one time.
    """

    began: float
    looks: list[Look] = field(default_factory=list)
    peak_pss: int = 0
    processes: int = 0
    exit_code: int | None = None

    def used(self, begin: float, end: float) -> tuple[float, float]:
        """Processor seconds of the command and of all others between two times."""
        first, last = self._at(begin), self._at(end)
        return last[0] - first[0], last[1] - first[1]

    def _at(self, when: float) -> tuple[float, float]:
        """On a straight line between the looks around it."""
        before = Look(self.began, 0.0, 0.0)
        for look in self.looks:
            if look.time >= when:
                share = (when - before.time) / max(look.time - before.time, 1e-9)
                return (
                    before.own + share * (look.own - before.own),
                    before.others + share * (look.others - before.others),
                )
            before = look
        return before.own, before.others


def watch(command: list[str], env: dict[str, str], folder: Path, log: Path, timeout: float) -> Watched:
    """Run a command in `folder`, its output in `log`, until it ends or `timeout` seconds are over; none of its processes is left."""
    seen = Watched(began=time.time())
    machine = _machine_seconds()
    mark = secrets.token_hex(8)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=env | {MARK: mark},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        family = Family(process.pid, mark)
        late = threading.Event()
        timer = threading.Timer(timeout, lambda: (late.set(), process.kill()))
        timer.start()
        number = 0
        try:
            while process.poll() is None:
                own = family.look()
                seen.looks.append(Look(time.time(), own, _machine_seconds() - machine - own))
                seen.processes = max(seen.processes, len(family.alive))
                if number % LOOKS_PER_MEMORY == 0:
                    seen.peak_pss = max(seen.peak_pss, sum(map(_pss, family.alive)))
                number += 1
                time.sleep(INTERVAL)
        finally:  # also where this process is interrupted
            timer.cancel()
            family.end()
    seen.exit_code = None if late.is_set() else process.returncode
    return seen


class Family:
    """A process and its descendants, also those whose parents have ended.

    Attributes:
        alive: their process ids at the last look.
        seconds: of the processors, by (process id, start time), also of those that have ended.
    """

    def __init__(self, root: int, mark: str) -> None:
        """`mark`: the value of MARK in their environment."""
        self.root, self.mark = root, mark
        self.alive: set[int] = set()
        self.seconds: dict[tuple[int, str], float] = {}

    def look(self) -> float:
        """Look at all processes; returns the seconds of the family's."""
        table = _processes()
        known = {pid for pid, begun in self.seconds if pid in table and table[pid][1] == begun} | {self.root}
        grown = True
        while grown:
            born = {pid for pid, (parent, _, _) in table.items() if parent in known} - known
            known |= born
            grown = bool(born)
        self.alive = known & table.keys()
        for pid in self.alive:
            _, begun, seconds = table[pid]
            self.seconds[pid, begun] = seconds
        return sum(self.seconds.values())

    def end(self) -> None:
        """Kill what is left of it, and wait until it is gone."""
        deadline = time.monotonic() + END_SECONDS
        self.look()
        left = self.alive | self.marked()
        while left and time.monotonic() < deadline:
            for pid in left:
                _kill(pid)
            time.sleep(0.05)
            left = {pid for pid in left | self.marked() if _runs(pid)}

    def marked(self) -> set[int]:
        """All that run with the mark, also those whose parents had ended before anybody looked."""
        mark = f"{MARK}={self.mark}"
        numbers = (folder.name for folder in Path("/proc").iterdir() if folder.name.isdigit())
        return {int(pid) for pid in numbers if mark in _read(Path("/proc", pid, "environ")).split("\0")}


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _runs(pid: int) -> bool:
    """Whether there is such a process, but for one that has ended and was not waited for."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"])


def _processes() -> dict[int, tuple[int, str, float]]:
    """By process id: parent, start time, seconds of the processors."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (text := _read(folder / "stat")):
            fields = text.rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / TICKS
            found[int(folder.name)] = int(fields[1]), fields[19], seconds
    return found


def _pss(pid: int) -> int:
    """Bytes of a process, what it shares with others divided by their number; 0 when it has ended."""
    for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _read(file: Path) -> str:
    """The text of a file of a process; empty when that has ended."""
    try:
        return file.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _machine_seconds() -> float:
    """Seconds that the processors have worked since the machine started."""
    user, nice, system, _idle, _wait, irq, softirq, steal, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS
