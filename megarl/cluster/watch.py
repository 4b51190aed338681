"""Hangs: ranks' processes that are stopped, calls in which no rank works any more, and a controller that waits for a lost server of Ray.

Guarantees of `Watch`:

- a process of a rank that is stopped (SIGSTOP, a debugger), also one that the rank has started, is reported after
  `STOPPED_SECONDS`, whether or not it takes part in a call;
- a call in which no process of any rank that it waits for has worked for `idle_timeout` is reported: a rank that waits for
  others in a collective does not work, a long forward pass does, and so does a rank that waits for a processor, whatever
  else the machine does, or for its disk;
- the ranks are not asked anything: their machines read /proc, every `LOOK_SECONDS`, while the controller waits;
- a controller that was itself stopped, or busy elsewhere, counts none of that time.

Work is processor time, major page faults and bytes read and written. A rank that waits for its disk is at work, too: also while it flushes
a file (fsync), which may take minutes on a shared file system and counts no bytes.
A rank in an endless loop is at work, too; the ranks' timeout of collectives and the limit of a call end it.

Guarantee of `ending_when_stuck`: while it is open, the process ends if a server of its Ray cluster on this machine has ended, or has
been stopped for `STOPPED_SECONDS`, and a thread of megarl's is within calls of Ray for `STUCK_SECONDS` after that. No exception reaches
such a call: Ray 2.60 waits for its raylet (`ray.put`) and its GCS server (`ray.init`, `ray.put`, new actors, placement groups,
`ray.kill`) within C++, for ever, or for a minute until it aborts the process with exit code 1. The exit code asks the program that
started the run to start it again. A controller outside of such calls is left alone: it may be reporting that very failure, or
compute; it learns of the loss the next time that it waits for a rank.
"""

import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import ray

import megarl
from megarl.cluster.cluster import Cluster
from megarl.cluster.guard import MARK_PREFIX, process_state
from megarl.cluster.hosts import submit
from megarl.cluster.ranks import RankProcess, RayFailed

LOOK_SECONDS = 5.0
STOPPED_SECONDS = 20.0
# Units of work a second below which a process idles: 2 % of a core, or 2 MiB read or written. A rank in a collective of gloo
# takes 0.4 % of a core (Ray 2.60, torch 2.13).
IDLE_WORK = 2.0
# A process that waits for a processor more than this part of the time counts as at work: other programs take the processor.
STARVED = 0.5
_IDLE_BURST = 5.0  # units at any time, since processor time is counted in units
_BYTES_OF_UNIT = 1 << 20
# The function of Linux (fs/fuse/dev.c) in which a thread waits for an answer of a file system that is a program, as JuiceFS and mounted
# buckets are; as /proc shows it to the thread's own user.
_FUSE_WAIT = "request_wait_answer"
_RANK_MARK = re.compile(rb"\0(" + MARK_PREFIX.encode() + rb"RANK=[^\0]*)\0")
STUCK_SECONDS = 8.0
_LOOK_SECONDS = 1.0
_BEGIN_SECONDS = 0.1  # between checks until all servers were seen, so that none ends unseen
_SERVERS = ("gcs_server", "raylet")
_RAY, _OURS = (f"{Path(package.__file__).parent}{os.sep}" for package in (ray, megarl))


@dataclass(frozen=True)
class SignsOfLife:
    """Signs of life of one rank: the state of all of its processes.

    Attributes:
        stopped: the stopped processes, such as "sglang::scheduler (process 12)".
        work: units of work (see IDLE_WORK) since the processes began, as the mean over them.
        starved: seconds that their threads could have run in, but had no processor.
        on_disk: whether one of their threads is waiting for a disk or a file system.
    """

    stopped: tuple[str, ...]
    work: float
    starved: float
    on_disk: bool


@dataclass(frozen=True)
class Hang:
    """A hang: `processes` are the ranks that hang, `cause` says how it was noticed."""

    processes: tuple[RankProcess, ...]
    cause: str


def signs_of_life(ranks: dict[int, str]) -> dict[str, SignsOfLife]:
    """The signs of life of this machine's ranks, by mark; ranks without a living process are left out.

    Args:
        ranks: process id -> mark.
    """
    stopped: dict[str, list[str]] = {}
    work: dict[str, list[float]] = {}
    starved: dict[str, float] = {}
    on_disk: set[str] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat") as file:
                title, _, rest = file.read().partition("(")[2].rpartition(")")
            fields = rest.split()
            # A rank sets its mark itself, so its descendants have it in /proc, except for processes that are forked without exec.
            mark = ranks.get(int(name)) or ranks.get(int(fields[2])) or _mark_of(name)
            if fields[0] in ("Z", "X") or mark not in ranks.values():
                continue
            work.setdefault(mark, []).append(_work(name, fields))
            starved[mark] = starved.get(mark, 0.0) + _starved_seconds(name)
            if _waits_for_disk(name):
                on_disk.add(mark)
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # ended, or not ours
            continue
        if fields[0] in ("T", "t"):
            stopped.setdefault(mark, []).append(f"{title} (process {name})")
    return {
        mark: SignsOfLife(
            tuple(stopped.get(mark, ())), sum(each) / len(each), starved.get(mark, 0.0), mark in on_disk
        )
        for mark, each in work.items()
    }


def _mark_of(pid: str) -> str | None:
    with open(f"/proc/{pid}/environ", "rb") as file:
        found = _RANK_MARK.search(b"\0" + file.read() + b"\0")
    return found[1].decode() if found is not None else None


def _work(pid: str, fields: list[str]) -> float:
    """Units of work of a process; `fields`: /proc/<pid>/stat from the state on."""
    with open(f"/proc/{pid}/io") as lines:
        counts = dict(line.split(": ") for line in lines)
    num_bytes = int(counts["rchar"]) + int(counts["wchar"])
    major_faults, user, system = int(fields[9]), int(fields[11]), int(fields[12])
    ticks = (user + system) * 100 / os.sysconf("SC_CLK_TCK")
    return ticks + major_faults + num_bytes / _BYTES_OF_UNIT


def _starved_seconds(pid: str) -> float:
    """Seconds in which threads of a process had no processor, added up; 0 where the kernel does not count them (CONFIG_SCHED_INFO)."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
    return total / 1e9


def _waits_for_disk(pid: str) -> bool:
    """Whether a thread is in the kernel's uninterruptible sleep, "D", as it is while it reads, writes or flushes a file; or in the sleep, "S",
    in which it waits for the program of a file system (FUSE)."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
            if state == "D":
                return True
            if state == "S":
                with open(f"/proc/{pid}/task/{thread}/wchan") as file:
                    if file.read().startswith(_FUSE_WAIT):
                        return True
    return False


class Watch:
    """Checks the ranks' processes from time to time, and counts for how long they are stopped or idle."""

    def __init__(self, idle_timeout: float | None = 60.0, cluster: Cluster | None = None) -> None:
        """
        Args:
            idle_timeout: seconds without work after which a call counts as hung; None: never.
            cluster: its servers are checked, too.
        """
        self.idle_timeout, self.cluster = idle_timeout, cluster
        self._server_stopped = 0.0  # seconds
        self._last = 0.0  # look, by time.monotonic
        self._asked: dict[str, ray.ObjectRef] = {}  # by node, questions that are not answered yet
        self._began: dict[str, SignsOfLife] = {}  # by mark, its signs when it began to idle
        self._stopped: dict[str, float] = {}  # seconds, by mark
        self._idle: dict[str, float] = {}

    def look(self, processes: Sequence[RankProcess], called: Collection[str]) -> Hang | None:
        """Check the processes if a check is due; to be called often while the ranks with the marks `called` are waited for.

        Returns: the ranks that hang, if any do.

        Raises:
            RayFailed: a server of Ray has ended, or is stopped.
        """
        now = time.monotonic()
        passed = now - self._last
        if self.cluster is not None and (gone := self.cluster.server_in(None)) is not None:
            raise RayFailed(f"{gone} has ended, and the run with it")
        if passed < LOOK_SECONDS:
            return None
        self._last = now
        if passed > 3 * LOOK_SECONDS:
            self._stopped, self._idle, self._began, self._server_stopped = {}, {}, {}, 0.0
            passed = 0.0
        self._refuse_stopped_servers(passed)
        signs = self._ask([process for process in processes if process.mark])
        self._count(signs, called, passed)
        return self._judge(processes, called, signs)

    def _refuse_stopped_servers(self, passed: float) -> None:
        stopped = self.cluster.server_in("T") if self.cluster is not None else None
        self._server_stopped = self._server_stopped + passed if stopped is not None else 0.0
        if self._server_stopped >= STOPPED_SECONDS:
            raise RayFailed(f"{stopped} has been stopped for more than {STOPPED_SECONDS:g} s")

    def _ask(self, processes: Sequence[RankProcess]) -> dict[str, SignsOfLife]:
        """Current signs of this node's ranks, and the answers of other nodes to the last question; asks these nodes again."""
        here = ray.get_runtime_context().get_node_id()
        ranks: dict[str, dict[int, str]] = {}
        for process in processes:
            ranks.setdefault(process.node_id, {})[process.pid] = process.mark
        signs = signs_of_life(ranks.pop(here, {}))
        for node, of_node in ranks.items():
            if node in self._asked:
                ready, _ = ray.wait([self._asked[node]], timeout=0)
                if not ready:
                    continue
                signs |= _answer(self._asked.pop(node))
            self._asked[node] = submit(node, signs_of_life, of_node)
        return signs

    def _count(self, signs: dict[str, SignsOfLife], called: Collection[str], passed: float) -> None:
        for mark, sign in signs.items():
            self._stopped[mark] = self._stopped.get(mark, 0.0) + passed if sign.stopped else 0.0
            idle = self._idle.get(mark, 0.0) + passed
            began = self._began.get(mark)
            if mark not in called or began is None or _has_worked(began, sign, idle):
                self._idle[mark], self._began[mark] = 0.0, sign
            else:
                self._idle[mark] = idle

    def _judge(
        self, processes: Sequence[RankProcess], called: Collection[str], signs: dict[str, SignsOfLife]
    ) -> Hang | None:
        stopped = [
            process
            for process in processes
            if process.mark in signs and self._stopped.get(process.mark, 0.0) >= STOPPED_SECONDS
        ]
        if stopped:
            names = "; ".join(", ".join(signs[process.mark].stopped) for process in stopped)
            return Hang(tuple(stopped), f"stopped for more than {STOPPED_SECONDS:g} s: {names}")
        if self.idle_timeout is None or not called:
            return None
        if all(self._idle.get(mark, 0.0) >= self.idle_timeout for mark in called):
            waited = tuple(process for process in processes if process.mark in called)
            return Hang(
                waited, f"none of the ranks that are waited for has worked for {self.idle_timeout:g} s"
            )
        return None


def _has_worked(before: SignsOfLife, now: SignsOfLife, seconds: float) -> bool:
    # Both numbers fall when a process or a thread ends, which is work, too.
    done = abs(now.work - before.work) > IDLE_WORK * seconds + _IDLE_BURST
    return done or now.on_disk or (seconds > 0 and abs(now.starved - before.starved) > STARVED * seconds)


def _answer(ref: ray.ObjectRef) -> dict[str, Any]:
    try:
        return ray.get(ref, timeout=1)
    except ray.exceptions.RayError:  # a node that is gone; Ray tells of its processes
        return {}


@contextmanager
def ending_when_stuck(exit_code: int, servers: Mapping[str, int] | None = None) -> Iterator[None]:
    """Watch servers of Ray, from a thread.

    Args:
        exit_code: of this process, if it has to end.
        servers: process ids by name; None: the servers that this process starts within the block.
    """
    over = threading.Event()
    # Servers of an earlier cluster, which may be about to end, do not belong to this one.
    before = {child.pid for child in psutil.Process().children()}
    watcher = threading.Thread(
        target=_watch, args=(exit_code, before, servers, over), name="ray-watch", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _watch(exit_code: int, before: set[int], known: Mapping[str, int] | None, over: threading.Event) -> None:
    servers = dict(known or {})
    complete = known is not None
    stopped, stuck, last = 0.0, 0.0, time.monotonic()
    while not over.wait(_LOOK_SECONDS if complete else _BEGIN_SECONDS):
        if not complete:
            servers |= _servers(before)
            complete = len(servers) == len(_SERVERS)
        # This process may have been stopped itself, so a long time since the last check counts as a short one.
        now = time.monotonic()
        passed, last = min(now - last, 2 * _LOOK_SECONDS), now
        states = {name: process_state(pid) for name, pid in servers.items()}
        gone = [name for name, state in states.items() if state is None]
        still = [name for name, state in states.items() if state == "T"]
        stopped = stopped + passed if still else 0.0
        lost = bool(gone) or stopped >= STOPPED_SECONDS
        stuck = stuck + passed if lost and any(map(_is_in_ray, sys._current_frames().values())) else 0.0
        if stuck >= STUCK_SECONDS:
            name = (gone or still)[0]
            what = f"Ray's {name} (process {servers[name]}) {'has ended' if gone else 'is stopped'}"
            sys.stderr.write(
                f"error: {what}, and this process waits for it; ending, to be started again. It is at\n"
            )
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
            os._exit(exit_code)  # the guards of this process and of the ranks end and remove the rest


def _is_in_ray(frame: FrameType | None) -> bool:
    """Whether a thread is in a function of Ray's that megarl has called, and in none of megarl's that this has called."""
    in_ray = False
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_OURS):
            return in_ray
        in_ray = in_ray or path.startswith(_RAY)
        frame = frame.f_back
    return False


def _servers(before: set[int]) -> dict[str, int]:
    found = {}
    for child in psutil.Process().children():
        try:
            if child.pid not in before and child.name() in _SERVERS:
                found[child.name()] = child.pid
        except psutil.NoSuchProcess:
            continue
    return found
