"""A rank: what it knows of itself, what its process reports, how the controller sees it, and the errors that it sends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ray.actor import ActorHandle

_DEAD = 4  # ActorTableData.ActorState.DEAD


@dataclass(frozen=True)
class RankInfo:
    """What a rank knows of itself and its group; the first argument of every worker class.

    `master_addr` and `master_port` are where the ranks of the group meet, or, where a rank has several `parts`, its parts;
    `part` is the number of this process among these. What is called on a rank comes to its part 0.
    `device_ids` are the GPUs that CUDA_VISIBLE_DEVICES shows in this process, in order; empty without GPUs.
    `scratch` is a folder of this rank alone, in memory where the machine has such a file system; it is removed
    with all that is in it when the rank has ended, however that was.
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


@dataclass(frozen=True)
class ProcessFacts:
    """What a process reports once it is set up.

    `mark` is the `NAME=value` that all its descendants carry (see guard.py); `port` is reserved for its
    group's rendezvous, on request.
    """

    pid: int
    mark: str
    scratch: str
    host: str
    node_id: str
    port: int | None


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
    """What a relay (see relay.py) has instead of answers; passed on as it is.

    `errors` are those of its ranks, by rank: `RankError` of a rank that raised, another of one that cannot be reached;
    `silent` are ranks that have not answered yet.
    """

    def __init__(self, errors: dict[int, Exception], silent: list[int]) -> None:
        super().__init__(errors, silent)
        self.errors, self.silent = errors, silent


@dataclass(frozen=True)
class RankProcess:
    """One process as the controller sees it; `pid` is 0, `mark` and `scratch` empty until it has reported.

    `part`: which of its rank's processes it is, where a rank has several. `share`: the ranks that it calls, if it is a relay
    (see relay.py).
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
    part: int = 0
    share: tuple["RankProcess", ...] = ()

    @property
    def name(self) -> str:
        """Such as "actor rank 3"; "rollout rank 3 part 1" of a rank's second process."""
        return f"{self.role} rank {self.rank}" + (f" part {self.part}" if self.part else "")

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
        """All processes that may not die: those of its ranks, and its relays."""
        ...
