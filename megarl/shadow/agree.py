"""Whether the collectives of ranks fit together: each rank walks through its log, as NCCL would have it wait, until all are through
or nothing moves.

The order of waits follows NCCL's streams. The calls on one communicator run in the order in which a rank makes them; a rank goes on
to its next call when the calls that it waits for are done; a send is done when it is received. Two calls in flight at once on
communicators of their own do not hold each other up.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from megarl.shadow.collectives import RECEIVE, SEND, Collective, ranks_text

Key = tuple[object, ...]
"""A communicator: the calls that one rank issues to it run in order."""


@dataclass
class Agreement:
    """The result of the walk of some ranks.

    Attributes:
        ranks: whose logs were walked through.
        matched: collectives, and pairs of a send and a receive, that were made by more than one of these ranks.
        open_ended: calls that members outside these ranks were taken to join.
        problems: in words; empty where all ranks come to their ends.
        unequal: the problem is a call that is not the same on its ranks, not one that is waited for.
    """

    ranks: list[int]
    matched: int = 0
    open_ended: int = 0
    problems: list[str] = field(default_factory=list)
    unequal: bool = False

    @property
    def summary(self) -> str:
        """The agreement in one line."""
        if self.problems:
            return f"collectives of {len(self.ranks)} ranks do not fit together ({self.matched:,} matched before)"
        text = f"collectives of {len(self.ranks)} ranks fit together ({self.matched:,} matched)"
        if self.open_ended:
            text += f"; {self.open_ended:,} more have members that were not run"
        return text


@dataclass
class _Unit:
    """Calls of a rank that run as one: a collective, a lone send or receive, or a batch of these.

    Attributes:
        numbers: of the calls in the rank's log. total: how many there will be. matched: numbers of sends and receives that met a peer's.
    """

    rank: int
    total: int
    numbers: list[int] = field(default_factory=list)
    matched: set[int] = field(default_factory=set)


def agree(logs: Mapping[int, Sequence[Collective]], ends: Mapping[int, str] | None = None) -> Agreement:
    """Walk through the logs of ranks.

    Args:
        logs: by rank. Members of a group that have none are taken to join whatever the others do.
        ends: why a rank's log ends before its work does.
    """
    walk = _Walk(logs, ends or {})
    walk.run()
    return walk.found


class _Walk:
    def __init__(self, logs: Mapping[int, Sequence[Collective]], ends: Mapping[int, str]) -> None:
        self.logs, self.ends = logs, ends
        self.found = Agreement(sorted(logs))
        self.at = dict.fromkeys(logs, 0)
        self.done = {rank: [False] * len(log) for rank, log in logs.items()}
        self.awaited: dict[int, dict[int, list[int]]] = {rank: defaultdict(list) for rank in logs}
        self.batches: dict[tuple[int, int], _Unit] = {}
        self.queues: dict[Key, dict[int, deque[_Unit]]] = defaultdict(lambda: defaultdict(deque))
        self.in_batch = Counter(
            (rank, call.batch) for rank, log in logs.items() for call in log if call.batch is not None
        )
        for rank, log in logs.items():
            for number, call in enumerate(log):
                if call.until is not None:
                    self.awaited[rank][call.until].append(number)
                self.awaited[rank][len(log)].append(number)  # a rank is done when all of its calls are

    def run(self) -> None:
        ranks = deque(self.logs)
        while ranks and not self.found.problems:
            rank = ranks.popleft()
            for key in self._advance(rank):
                ranks.extend(self._settle(key))
        if not self.found.problems:
            self.found.problems = self._standstill()

    def _advance(self, rank: int) -> set[Key]:
        """Make calls until one has to be waited for; returns the communicators that were given calls."""
        log, done, given = self.logs[rank], self.done[rank], set()
        while self.at[rank] < len(log) and not self._waits_for(rank):
            number = self.at[rank]
            call, key = log[number], _key(rank, log[number])
            unit = None if call.batch is None else self.batches.get((rank, call.batch))
            if unit is None:
                unit = _Unit(rank, 1 if call.batch is None else self.in_batch[rank, call.batch])
                self.queues[key][rank].append(unit)
                if call.batch is not None:
                    self.batches[rank, call.batch] = unit
            unit.numbers.append(number)
            assert not done[number]
            self.at[rank] += 1
            given.add(key)
        return given

    def _waits_for(self, rank: int) -> list[int]:
        done = self.done[rank]
        return [number for number in self.awaited[rank][self.at[rank]] if not done[number]]

    def _settle(self, key: Key) -> list[int]:
        """Complete the calls on a communicator that can complete; returns the ranks that made them."""
        moved: list[int] = []
        while not self.found.problems:
            heads = {rank: queue[0] for rank, queue in self.queues[key].items() if queue}
            finished = [
                unit
                for unit in heads.values()
                if self._call(unit).peer is not None and self._meet(unit, heads)
            ]
            collective = next((unit for unit in heads.values() if self._call(unit).peer is None), None)
            if not finished and collective is not None:
                finished = self._joined(collective, heads)
            if not finished:
                return moved
            for unit in finished:
                self.queues[key][unit.rank].popleft()
                for number in unit.numbers:
                    self.done[unit.rank][number] = True
                moved.append(unit.rank)
        return moved

    def _joined(self, first: _Unit, heads: Mapping[int, _Unit]) -> list[_Unit]:
        """All members' calls of a collective that is complete; else empty."""
        group = self._call(first).group
        present = [rank for rank in group if rank in self.logs]
        if any(rank not in heads or self._call(heads[rank]).peer is not None for rank in present):
            return []
        calls = {rank: self._call(heads[rank]) for rank in present}
        difference = _difference(calls)
        if difference is not None:
            number = self._number(first)
            text = f"call {number} of {_group(calls[present[0]])} is not the same on its ranks: {difference}"
            self.found.unequal = True
            self.found.problems = [text, *self._left_out(calls[present[0]], present)]
            return []
        self.found.matched += len(present) > 1
        self.found.open_ended += 1 < len(group) != len(present)
        return [heads[rank] for rank in present]

    def _meet(self, unit: _Unit, heads: Mapping[int, _Unit]) -> bool:
        """Match a unit's sends and receives with the ones that peers have reached; returns whether all of the unit's are matched."""
        for number in unit.numbers:
            call = self.logs[unit.rank][number]
            if number in unit.matched:
                continue
            if call.peer not in self.logs:
                self.found.open_ended += 1
                unit.matched.add(number)
                continue
            other = heads.get(call.peer)
            if other is None:
                continue
            wanted = RECEIVE if call.operation == SEND else SEND
            for theirs in other.numbers:
                met = self.logs[other.rank][theirs]
                if theirs not in other.matched and (met.operation, met.peer) == (wanted, unit.rank):
                    if met.sizes != call.sizes:
                        pair = sorted((call, met), key=lambda one: one.operation != SEND)
                        source, target = pair[1].peer, pair[0].peer
                        self.found.unequal = True
                        self.found.problems = [
                            f"rank {source} sends {_what(pair[0])}{_place(pair[0])} to rank {target}, which expects "
                            f"{_what(pair[1])}{_place(pair[1])}"
                        ]
                        return False
                    unit.matched.add(number)
                    other.matched.add(theirs)
                    self.found.matched += 1
                    break
        return len(unit.matched) == unit.total

    def _call(self, unit: _Unit) -> Collective:
        return self.logs[unit.rank][unit.numbers[0]]

    def _number(self, unit: _Unit) -> int:
        """The place of the unit's first call among its rank's calls in the group, from 1."""
        at, call = unit.numbers[0], self._call(unit)
        return sum(_same_group(other, call) for other in self.logs[unit.rank][: at + 1])

    # The description of a standstill.

    def _standstill(self) -> list[str]:
        stuck = [
            rank
            for rank in self.found.ranks
            if self.at[rank] < len(self.logs[rank]) or not all(self.done[rank])
        ]
        if not stuck:
            return []
        missing: dict[str, None] = {}
        for rank in stuck:
            for unit in self._heads(rank):
                missing |= dict.fromkeys(self._missing(unit))
        lines = [f"rank {rank} stands at {self._stands_at(rank)}" for rank in self.found.ranks]
        circle = self._circle(stuck)
        if circle:
            lines.insert(0, f"ranks {' -> '.join(map(str, circle))} wait for each other")
        return [*missing, *lines]

    def _heads(self, rank: int) -> list[_Unit]:
        """The current calls of the rank's communicators, among the calls that it waits for."""
        awaited = set(self._waits_for(rank))
        found = [queues[rank][0] for queues in self.queues.values() if queues.get(rank)]
        waited = [
            unit
            for queues in self.queues.values()
            for unit in queues.get(rank, ())
            if awaited & set(unit.numbers)
        ]
        keys = {_key(rank, self._call(unit)) for unit in waited}
        return [unit for unit in found if _key(rank, self._call(unit)) in keys]

    def _absent(self, unit: _Unit) -> list[int]:
        """The ranks that a unit waits for."""
        call = self._call(unit)
        if call.peer is None:
            heads = self.queues[_key(unit.rank, call)]
            return [
                rank
                for rank in call.group
                if rank in self.logs and (not heads[rank] or self._call(heads[rank][0]).peer is not None)
            ]
        numbers = [number for number in unit.numbers if number not in unit.matched]
        peers = [self.logs[unit.rank][number].peer for number in numbers]
        return [peer for peer in dict.fromkeys(peers) if peer is not None]

    def _missing(self, unit: _Unit) -> Iterator[str]:
        """A sentence for each rank that does not come to a call."""
        call = self._call(unit)
        for rank in self._absent(unit):
            if call.peer is not None:
                number = next(
                    n for n in unit.numbers if n not in unit.matched and self.logs[unit.rank][n].peer == rank
                )
                what = self.logs[unit.rank][number]
                verb = "receives" if what.operation == SEND else "sends"
                wanted = RECEIVE if what.operation == SEND else SEND
                rest = self.logs[rank][self.at[rank] :]
                later = any((c.operation, c.peer) == (wanted, unit.rank) for c in rest)
                text = "has not come to the" if later or rank in self.ends else f"never {verb} the"
                yield f"rank {rank} {text} {_what(what)} that rank {unit.rank} stands at: {_call(what)}; {self._next(rank)}"
                continue
            queues = self.queues[_key(unit.rank, call)]
            joined = [r for r in call.group if r in self.logs and queues[r]]
            rest = self.logs[rank][self.at[rank] :]
            later = any(_same_group(other, call) for other in rest)
            verb = "has not come to" if later or rank in self.ends else "never joins"
            yield (
                f"rank {rank} {verb} the {_call(call)}, call {self._number(unit)} of {_group(call)}, "
                f"that {_ranks(joined)} {'stands' if len(joined) == 1 else 'stand'} at; {self._next(rank)}"
            )
            yield from self._left_out(call, [*joined, rank])

    def _next(self, rank: int) -> str:
        return f"its next is {self._stands_at(rank)}" if self._waits_for(rank) else self._stands_at(rank)

    def _stands_at(self, rank: int) -> str:
        waits = self._waits_for(rank)
        if waits:
            call = self.logs[rank][waits[0]]
            return f"{_call(call)}{_with(call)}"
        return f"its end: {self.ends[rank]}" if rank in self.ends else "its end"

    def _circle(self, stuck: Sequence[int]) -> list[int]:
        """Ranks each of which waits for the next, the first again at the end."""
        waits = {
            rank: [r for unit in self._heads(rank) for r in self._absent(unit) if r in stuck]
            for rank in stuck
        }
        path: list[int] = []
        rank = next((rank for rank in stuck if waits[rank]), None)
        while rank is not None and rank not in path:
            path.append(rank)
            rank = next(iter(waits[rank]), None)
        return [] if rank is None else [*path[path.index(rank) :], rank]

    def _left_out(self, call: Collective, ranks: Sequence[int]) -> list[str]:
        """Calls of a group that one of the ranks leaves out, or makes in addition to the others'."""
        made = {
            rank: [c for c in self.logs[rank] if _same_group(c, call) and c.peer is None] for rank in ranks
        }
        signatures = {rank: [(c.operation, c.line, c.detail) for c in calls] for rank, calls in made.items()}
        usual = max(signatures, key=lambda rank: (list(signatures.values()).count(signatures[rank]), -rank))
        found = []
        for rank in ranks:
            matcher = SequenceMatcher(None, signatures[usual], signatures[rank], autojunk=False)
            for kind, begin, end, own, own_end in matcher.get_opcodes():
                if kind == "delete" and not (end == len(signatures[usual]) and rank in self.ends):
                    found.append(
                        f"rank {rank} leaves out call {begin + 1} of {_group(call)}: the {_call(made[usual][begin])}"
                    )
                    break
                if kind == "insert" and not (own_end == len(signatures[rank]) and usual in self.ends):
                    found.append(
                        f"rank {rank} alone makes call {own + 1} of {_group(call)}: the {_call(made[rank][own])}"
                    )
                    break
        return found


def _key(rank: int, call: Collective) -> Key:
    """A lone send or receive has a communicator of its two ranks (torch's ProcessGroupNCCL); a batch shares the group's."""
    if call.peer is None or call.batch is not None:
        return (call.communicator, call.group)
    return (call.communicator, call.group, min(rank, call.peer), max(rank, call.peer))


def _same_group(one: Collective, other: Collective) -> bool:
    return (one.communicator, one.group) == (other.communicator, other.group)


def _difference(calls: Mapping[int, Collective]) -> str | None:
    """How a collective's calls on its ranks differ, in words; None: they fit."""
    first, *others = calls
    one = calls[first]
    for rank in others:
        call = calls[rank]
        dtypes = [{dtype for _, dtype in c.sizes} for c in (one, call)]
        same = (one.operation, one.detail) == (call.operation, call.detail) and dtypes[0] == dtypes[1]
        if not same or (not one.sends and one.sizes != call.sizes):
            return f"rank {first} calls {_call(one)}, rank {rank} {_call(call)}"
    for source in calls if one.sends else ():
        for target in calls:
            sent = calls[source].sends[one.group.index(target)]
            expected = calls[target].expects[one.group.index(source)]
            if sent != expected:
                return (
                    f"in {_call(calls[source])} rank {source} sends {sent:,} elements to rank {target}, "
                    f"which expects {expected:,} ({calls[target].line})"
                )
    return None


def _call(call: Collective) -> str:
    return f"{call.name} of {_what(call)}{_place(call)}"


def _place(call: Collective) -> str:
    place = ", ".join(part for part in (call.phase, call.line) if part)
    return f" ({place})" if place else ""


def _what(call: Collective) -> str:
    sizes = ", ".join(f"{count:,} x {dtype}" for count, dtype in call.sizes[:4]) or "no tensors"
    return " ".join(filter(None, (sizes, call.detail)))


def _with(call: Collective) -> str:
    if call.peer is None:
        return f" in {_group(call)}"
    return f" {'to' if call.operation == SEND else 'from'} rank {call.peer}"


def _group(call: Collective) -> str:
    return f"group {ranks_text(call.group)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
