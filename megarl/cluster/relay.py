"""Calls of many ranks through one process for each share of them: the controller calls the relays, these call their ranks.

A call of Ray's takes about half a millisecond of the controller's processor (Ray 2.60, benchmarks/dispatch.py), while all ranks
wait: for a thousand ranks that is half a second, several times a step. Relays make these calls on all machines at once.

Guarantees, beside those of `WorkerGroup`:

- what ranks raise reaches the controller as if it had called them, with the ranks that have not answered by then;
- the ranks' answers are given when all of a share have theirs; where one has raised, `GRACE_SECONDS` later at the latest;
- calls of a rank are executed in the order in which they were made, `call_rank` among them;
- a relay that dies or is stopped is reported as a rank is.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ray
from ray.actor import ActorHandle

from megarl.cluster.failures.errors import RayFailed, rank_error
from megarl.cluster.failures.failure import GRACE_SECONDS, Part
from megarl.cluster.group import Call, WorkerGroup
from megarl.cluster.ranks import RankInfo, RankProcess, RelayedErrors

MOST_RANKS = 16  # of a share; those of one are on one machine
RELAY = "megarl.cluster.relay:Relay"
_DEVICE_SHARE = 0.01  # in Ray's books


class Relay:
    """The worker class of relays."""

    def __init__(self, info: RankInfo) -> None:
        self._actors: dict[int, ActorHandle] = {}
        self._role = ""

    def introduce(self, role: str, actors: dict[int, ActorHandle]) -> None:
        """Learn which ranks there are, or are anew."""
        self._role, self._actors = role, self._actors | actors

    def pass_on(
        self, method: str, ranks: Sequence[int], args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call a method on ranks.

        Args:
            args: of each rank, or of all if there is one.

        Returns: what the ranks do, in their order.

        Raises:
            RelayedErrors: a rank raised, or died.
        """
        if len(args) < len(ranks):
            args = list(args) * len(ranks)
        calls = [
            self._actors[rank].invoke.options(name=f"{self._role}-rank{rank}.{method}") for rank in ranks
        ]
        refs = [call.remote(method, *of_rank, **kwargs) for call, of_rank in zip(calls, args, strict=True)]
        return _answers(dict(zip(refs, ranks, strict=True)))


def _answers(pending: dict[ray.ObjectRef, int]) -> list[Any]:
    """What ranks have answered, in their order."""
    answers: dict[int, Any] = dict.fromkeys(pending.values())
    errors: dict[int, Exception] = {}
    deadline = None
    while pending and (deadline is None or time.monotonic() < deadline):
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(pending), num_returns=1, timeout=seconds, fetch_local=False)
        for ref in ready:
            rank = pending.pop(ref)
            try:
                answers[rank] = ray.get(ref)
            except ray.exceptions.RayError as error:
                errors[rank] = _words_of(error)
                # What has caused this may come to light later than it, elsewhere.
                deadline = deadline or time.monotonic() + GRACE_SECONDS
    if errors:
        raise RelayedErrors(errors, list(pending.values()))
    return list(answers.values())


def _words_of(error: ray.exceptions.RayError) -> Exception:
    """What a rank has told of its failure; of one that has told nothing, what Ray says."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return rank_error(error)
    return ConnectionError(str(error))


class RelayedGroup(WorkerGroup):
    """A group whose calls go by relays: a process more for each `most` ranks of a machine."""

    _relays: WorkerGroup | None = None
    _shares: Sequence[Sequence[int]] = ()
    _watched_relays: Sequence[RankProcess] = ()

    def __init__(self, *arguments: Any, most: int = MOST_RANKS, **options: Any) -> None:
        """As `WorkerGroup`, whose arguments it takes but `parts`, `devices_per_rank` and `device_order`."""
        super().__init__(*arguments, **options)
        try:
            shares = shares_of([process.node_id for process in self.processes], most)
            relays = WorkerGroup(
                f"{self.role}-relay",
                RELAY,
                self._pool,
                len(shares),
                {},
                self._log_dir,
                gpu_fraction=_DEVICE_SHARE,
                device_order=[share[0] for share in shares],  # each beside the first of its ranks
                beside=[*self._beside, self],
                watch=self._watch,
            )
            self.relay_by(relays, shares)
        except RayFailed:  # as in `WorkerGroup`
            raise
        except Exception:
            self.shutdown()
            raise

    def relay_by(self, relays: WorkerGroup, shares: Sequence[Sequence[int]]) -> None:
        """Have calls go by `relays`, each of which has the ranks of its share."""
        self._relays, self._shares = relays, shares
        self.started += [*relays.started, *self._introduce(shares)]

    def _introduce(self, shares: Sequence[Sequence[int]]) -> list[Call]:
        """Tell relays of the processes of ranks: of each share those that are given."""
        whole = ([self.processes[rank] for rank in share] for share in self._shares)
        relays = zip(self._relays.processes, whole, strict=True)
        self._watched_relays = [replace(relay, share=tuple(share)) for relay, share in relays]
        actors = [{rank: self.processes[rank].actor for rank in share} for share in shares]
        return self._relays.call_each("introduce", [(self.role, of_share) for of_share in actors])

    @property
    def watched(self) -> list[RankProcess]:
        return [*self.processes, *self._watched_relays]

    def restart(self, rank: int) -> list[Call]:
        started = super().restart(rank)
        return [*started, *self._introduce([[one for one in share if one == rank] for share in self._shares])]

    def shutdown(self, timeout: float = 10.0) -> None:
        if self._relays is not None:
            self._relays.shutdown(timeout)
        super().shutdown(timeout)

    def _invoke(
        self,
        method: str,
        per_rank_args: Sequence[tuple[Any, ...]],
        kwargs: dict[str, Any],
        processes: Sequence[RankProcess] | None = None,
    ) -> list[Call]:
        ranks = [process.rank for process in processes or self.processes]
        args = dict(zip(ranks, per_rank_args, strict=True))
        called = [[rank for rank in share if rank in args] for share in self._shares]
        calls: dict[int, Call] = {}
        for relay, share in zip(self._relays.processes, called, strict=True):
            if not share:
                continue
            of_ranks = [args[rank] for rank in share]
            if all(one is of_ranks[0] for one in of_ranks):
                of_ranks = of_ranks[:1]
            # Within lists references stay what they are: it is the ranks that need their values.
            ref = self._relays.call_rank(relay.rank, "pass_on", method, share, of_ranks, kwargs)
            calls |= {rank: Part(ref, index) for index, rank in enumerate(share)}
        return [calls[rank] for rank in ranks]


def group_kind(world_size: int, relays_from: int | None) -> type[WorkerGroup]:
    """The class for a group of so many ranks; None: it never has relays."""
    return RelayedGroup if relays_from is not None and world_size >= relays_from else WorkerGroup


def shares_of(nodes: Sequence[str], most: int) -> list[list[int]]:
    """The ranks of each relay, by the nodes of all ranks: as even as can be, at most so many."""
    shares = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, of_rank in enumerate(nodes) if of_rank == node]
        num = math.ceil(len(ranks) / most)
        bounds = [len(ranks) * i // num for i in range(num + 1)]
        shares += [ranks[a:b] for a, b in pairwise(bounds)]
    return shares
