"""A rank: its identity, the facts that its process reports, the controller's view of it, and the errors that name it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import ray
from ray.actor import ActorHandle

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_DEAD = 4  # ActorTableData.ActorState.DEAD
_MOST_NAMED = 8  # ranks that a message names


@dataclass(frozen=True)
class RankInfo:
    """A rank's identity within its group; the first argument of every worker class.

    `master_addr` and `master_port` are where the ranks of the group meet, or, where a rank has several `parts`, its parts;
    `part` is the number of this process among these. Calls of a rank go to its part 0.
    `device_ids` are the GPUs that CUDA_VISIBLE_DEVICES shows in this process, in order; empty without GPUs.
    `scratch` is a folder of this rank alone, in memory where the machine has such a file system; it is removed
    with its contents when the rank has ended, however it ended.
    """

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    role: str
    log_path: str
    device_ids: tuple[str, ...]
    scratch: str
    part: int = 0
    parts: int = 1


def node_address() -> str:
    """The address of this process's node in the cluster."""
    return ray.util.get_node_ip_address()


def meet(info: RankInfo, timeout_s: float) -> TCPStore:
    """The store of a group's ranks at the group's address; see `open_store`.

    Args:
        timeout_s: seconds to wait for all ranks, and later for values that other ranks set.
    """
    # Imports torch, which a rank may do only in its final environment.
    from megarl.util.rendezvous import open_store

    timeout = timedelta(seconds=timeout_s)
    return open_store(info.master_addr, info.master_port, info.rank, info.world_size, timeout)


@dataclass(frozen=True)
class ProcessFacts:
    """The facts that a process reports once it is set up.

    `mark` is the `NAME=value` that all its descendants carry (see guard.py); `port` is reserved for its
    group's rendezvous, on request.
    """

    pid: int
    mark: str
    scratch: str
    host: str
    node_id: str
    port: int | None


@dataclass(frozen=True)
class RankProcess:
    """One process as the controller sees it; `pid` is 0, `mark` and `scratch` empty until it has reported.

    `part`: its number among its rank's processes, where a rank has several. `port`: as in `ProcessFacts`. `share`: the ranks that it
    calls, if it is a relay (relays.py).
    """

    actor: ActorHandle
    role: str
    rank: int
    host: str
    node_id: str
    log_path: str
    pid: int = 0
    mark: str = ""
    scratch: str = ""
    port: int | None = None
    part: int = 0
    share: tuple[RankProcess, ...] = ()

    @property
    def name(self) -> str:
        """Such as "actor rank 3"; "rollout rank 3 part 1" of a rank's second process."""
        return f"{self.role} rank {self.rank}" + (f" part {self.part}" if self.part else "")

    @property
    def title(self) -> str:
        """Its name in process lists and of its log, such as "actor-rank3"."""
        return f"{self.role}-rank{self.rank}" + (f".part{self.part}" if self.part else "")

    @property
    def is_dead(self) -> bool:
        """True once Ray knows that the process has ended."""
        return self.actor._get_local_state() == _DEAD

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid or '?'} on {self.host})"


class Watched(Protocol):
    """A role whose processes are watched: a `WorkerGroup`."""

    role: str
    processes: Sequence[RankProcess]

    @property
    def watched(self) -> Sequence[RankProcess]:
        """All processes that must not die: its ranks' processes and its relays."""
        ...


class RankError(Exception):
    """An exception in a rank, in words: the controller need not be able to import (or unpickle) the original.

    `time` is the rank's clock in seconds since the epoch, `log_tail` the end of its log before the traceback.
    """

    def __init__(self, kind: str, message: str, remote_traceback: str, when: float, tail: str) -> None:
        super().__init__(kind, message, remote_traceback, when, tail)
        self.kind = kind
        self.message = message
        self.remote_traceback = remote_traceback
        self.time = when
        self.log_tail = tail

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class RelayedErrors(Exception):
    """The errors of a relay's ranks (relays.py), raised instead of their answers and passed on unchanged.

    `errors` by rank: a `RankError` where a rank raised, another exception where it cannot be reached; `silent`: ranks that have not
    answered yet.
    """

    def __init__(self, errors: dict[int, Exception], silent: list[int]) -> None:
        super().__init__(errors, silent)
        self.errors, self.silent = errors, silent


def rank_error(error: ray.exceptions.RayTaskError) -> RankError:
    """The exception of a call, as its rank reported it."""
    if isinstance(error.cause, RankError):
        return error.cause
    # Raised by Ray itself: a result that cannot be pickled, an argument that was lost, ...
    return RankError(type(error.cause).__name__, str(error.cause), str(error), time.time(), "")


class RunFailure(RuntimeError):
    """A process of a run, or of Ray, failed.

    Attributes:
        report: path of the failure's report, where there is one.
        headline: process and cause in one line; empty where the message is one line anyway.
    """

    report: Path | None = None
    headline: str = ""

    def name_report(self, path: Path) -> None:
        """Add the report's path to the message, and repeat the headline in its last line, below the end of the log."""
        self.report = path
        last = [f"the run ended: {self.headline}"] if self.headline else []
        self.args = ("\n".join([str(self), f"stacks and logs of all processes: {path}", *last]),)


class RankFailure(RunFailure):
    """The failure of one rank, `process`; `cause` in a line. `headline` begins the message."""

    def __init__(self, process: RankProcess, cause: str, headline: str, details: str, log_tail: str) -> None:
        self.headline = headline.splitlines()[0]
        self.process, self.cause, self.log_tail = process, cause, log_tail
        self.role, self.rank, self.host, self.pid = process.role, process.rank, process.host, process.pid
        self.log_path = process.log_path
        super().__init__(headline + details)


class WorkerLost(RankFailure):
    """A process is of no further use: it died or hangs."""

    _verb: str

    def __init__(self, process: RankProcess, cause: str, log_tail: str, others: Sequence[str] = ()) -> None:
        details = _log_part(process, log_tail) + _others_part(others)
        super().__init__(process, cause, f"{process} {self._verb}: {cause}", details, log_tail)


class WorkerDied(WorkerLost):
    """A process ended that should not have."""

    _verb = "died"


class WorkerHung(WorkerLost):
    """A process lives, but is stopped, or its call does not come to an end."""

    _verb = "hangs"


class WorkerFailed(RankFailure):
    """A method (or the constructor) of a worker raised; `kind` and `message` describe its exception."""

    def __init__(self, process: RankProcess, error: RankError, others: Sequence[str] = ()) -> None:
        self.kind, self.message, self.remote_traceback = error.kind, error.message, error.remote_traceback
        details = (
            f"\n{_indent(error.remote_traceback)}{_log_part(process, error.log_tail)}{_others_part(others)}"
        )
        super().__init__(process, f"raised {error}", f"{process} raised {error}", details, error.log_tail)


class RayFailed(RunFailure):
    """A process of the Ray cluster that the controller has started is gone or stopped."""


class WaitTimeout(RunFailure, TimeoutError):
    """Some calls were not answered in time; `silent` names their ranks."""

    def __init__(self, seconds: float, silent: Sequence[RankProcess], num_calls: int) -> None:
        self.silent = [process.name for process in silent]
        lines = [f"no answer within {seconds:g} s from {len(silent)} of {num_calls} calls; silent are:"]
        lines += [
            f"  {process}: the stacks of its threads are now at the end of {process.log_path}"
            if process.pid
            else f"  {process.name}: its process never came up; the machine is overloaded (without GPUs each of "
            f"trainer.n_gpus_per_node is a process), or too many roles share its device"
            for process in silent[:_MOST_NAMED]
        ]
        lines += [f"  and {len(silent) - _MOST_NAMED} more"] if len(silent) > _MOST_NAMED else []
        super().__init__("\n".join(lines))


def _log_part(process: RankProcess, tail: str) -> str:
    where = f"log: {process.log_path} on {process.host}"
    return f"\n{where}, its last lines:\n{_indent(tail)}" if tail else f"\n{where} (empty)"


def _others_part(others: Sequence[str]) -> str:
    return f"\nalso: {listed(others, '; ')}" if others else ""


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, and how many more there are: a message must stay readable where a thousand ranks fail at once."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return separator.join(names[:_MOST_NAMED]) + more


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
