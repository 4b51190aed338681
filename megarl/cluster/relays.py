"""Relays: processes that call the ranks of a large group on behalf of the controller.

A call of Ray takes about half a millisecond of the controller's processor (Ray 2.60, benchmarks/dispatch.py), while all ranks
wait: half a second for a thousand ranks, several times a step. In a `RelayedGroup` the controller calls one relay process for each share
of the ranks, and the relays call their ranks at the same time. For a thousand ranks 32 relays of 32 ranks each take the fewest steps: 32 of the
controller's and 32 of each relay's, in place of a thousand.

Guarantees, besides the ones of a `WorkerGroup`:

- exceptions of ranks reach the controller as if it had called them, with the list of ranks that have not answered by then;
- the answers of a share arrive together, when all of its ranks have answered; where one has raised, at most `GRACE_SECONDS` later;
- calls of a rank are executed in the order in which they were made, `call_rank` included;
- a relay that dies or is stopped is reported like a rank.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ray
from ray.actor import ActorHandle

from megarl.cluster.group import Call, WorkerGroup
from megarl.cluster.ranks import RankInfo, RankProcess, RayFailed, RelayedErrors, rank_error
from megarl.cluster.waiting import GRACE_SECONDS, RelayedAnswer

MOST_RANKS = 32  # of a share
RELAY = "megarl.cluster.relays:Relay"
_DEVICE_SHARE = 0.01  # of a relay, in Ray's books


class Relay:
    """The worker class of relays."""

    def __init__(self, info: RankInfo) -> None:
        self._actors: dict[int, ActorHandle] = {}
        self._role = ""

    def introduce(self, role: str, actors: dict[int, ActorHandle]) -> None:
        """Learn the actors of ranks, also of restarted ones."""
        self._role, self._actors = role, self._actors | actors

    def pass_on(
        self, method: str, ranks: Sequence[int], args: Sequence[tuple[Any, ...]], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call a method on ranks.

        Args:
            args: of each rank, or of all if there is one.

        Returns: the ranks' results, in their order.

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
    """Wait for the ranks' answers, and return them in order; after a first error wait only a short time, in which its cause may show."""
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
                errors[rank] = _report_of(error)
                # Its cause may come to light later, on another rank.
                deadline = deadline or time.monotonic() + GRACE_SECONDS
    if errors:
        raise RelayedErrors(errors, list(pending.values()))
    return list(answers.values())


def _report_of(error: ray.exceptions.RayError) -> Exception:
    """A rank's own report of its failure; Ray's message if the rank reported nothing."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return rank_error(error)
    return ConnectionError(str(error))


class RelayedGroup(WorkerGroup):
    """A group whose calls go through relays: one more process for each `most` ranks."""

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
                device_order=[share[0] for share in shares],  # each on the device of its first rank
                watched_groups=[*self._watched_groups, self],
                watch=self._watch,
            )
            self.relay_by(relays, shares)
        except RayFailed:  # as in `WorkerGroup`
            raise
        except Exception:
            self.shutdown()
            raise

    def relay_by(self, relays: WorkerGroup, shares: Sequence[Sequence[int]]) -> None:
        """Send calls through `relays`, each of which calls the ranks of its share."""
        self._relays, self._shares = relays, shares
        self.started += [*relays.started, *self._introduce()]

    def _introduce(self) -> list[Call]:
        """Tell each relay the actors of its share's ranks."""
        shares = [tuple(self.processes[rank] for rank in share) for share in self._shares]
        relays = zip(self._relays.processes, shares, strict=True)
        self._watched_relays = [replace(relay, share=share) for relay, share in relays]
        actors = ({process.rank: process.actor for process in share} for share in shares)
        return self._relays.call_each("introduce", [(self.role, of_share) for of_share in actors])

    @property
    def watched(self) -> list[RankProcess]:
        return [*self.processes, *self._watched_relays]

    def restart(self, rank: int) -> list[Call]:
        return [*super().restart(rank), *self._introduce()]

    def shutdown(self) -> None:
        if self._relays is not None:
            self._relays.shutdown()
        super().shutdown()

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
            # Within lists references are not resolved: the ranks need their values, not the relay.
            ref = self._relays.call_rank(relay.rank, "pass_on", method, share, of_ranks, kwargs)
            calls |= {rank: RelayedAnswer(ref, index) for index, rank in enumerate(share)}
        return [calls[rank] for rank in ranks]


def group_kind(world_size: int, relays_from: int | None) -> type[WorkerGroup]:
    """The class for a group of `world_size` ranks: with relays from `relays_from` ranks on; None: never."""
    return RelayedGroup if relays_from is not None and world_size >= relays_from else WorkerGroup


def shares_of(nodes: Sequence[str], most: int) -> list[list[int]]:
    """The ranks of each relay, given the node of each rank: shares as even as possible, of at most `most` ranks, node by node."""
    order = {node: place for place, node in enumerate(dict.fromkeys(nodes))}
    ranks = sorted(range(len(nodes)), key=lambda rank: order[nodes[rank]])
    num = math.ceil(len(ranks) / most)
    bounds = [len(ranks) * i // num for i in range(num + 1)]
    return [ranks[a:b] for a, b in pairwise(bounds)]
