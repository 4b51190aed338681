"""Which engine answers which prompt, and when: engines get prompts as they have room for them.

Requests wait at the controller. A first wave fills the engines; then each gets further prompts as its responses finish, so that an engine
whose prompts have long answers gets fewer of them, and none idles while prompts wait. All requests of a prompt go to one engine, where
the first computes it and the others find it in the cache.

An engine has *room* by figures that cost nothing to know:

- an empty engine for as many requests as it computes at a time (rollout.max_num_seqs; with agents rollout.gateway.concurrency, if that is
  less), and as fit its KV cache: the tokens of the prompts, and half of the longest response for each request, as nobody knows the responses'
  lengths yet;
- another engine while few of its requests wait for a place within it. It says how many (`Landed.waiting`): a number in which the lengths of
  its responses, its cache and its shared prompts are all accounted for.

The few that may wait fill the places that become free between two calls: a quarter of its places, or as many as became free between
the last two; but no more than its share of the prompts that are left, so that at the end the last prompts go where there is room.

The controller calls all engines that have requests together (`EngineWorker.land`), `APART` seconds for each engine of the run after the
last time: a call takes new requests there and finished trajectories back.

Guarantees, each asserted by a test:
- all requests of a prompt that are sent together go to one engine, the one with fewest requests of those that have room;
- no engine without room gets a prompt, and while prompts wait every engine with room gets one;
- the requests of a lost engine go back into the queue; answers that the other engines gave at that moment are kept;
- requests that a failed generation has left behind are given up, and those of training in flight are not landed by a validation.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import pyarrow as pa

from megarl.cluster import WorkerGroup, WorkerLost
from megarl.data.sessions import num_sessions, request_of
from megarl.data.trajectories import list_lengths, take
from megarl.rollout.engine import EngineCapacity, EngineCounts, SamplingParams
from megarl.trainer.run.run import Run
from megarl.trainer.workers.dispatch import TRAINING, Landed

# Seconds between two calls of the engines, for each engine of the run: the controller needs a millisecond for a table.
APART = 0.05
SURPLUS = 0.25  # requests that may wait within an engine, as a part of those that it computes at a time
EXPECTED = 0.5  # of the longest response, in the first wave

Content = TypeVar("Content")
Part = tuple[pa.Table, SamplingParams]
"""Requests, and how their responses are sampled."""


@dataclass(frozen=True)
class PromptRequests(Generic[Content]):
    """The requests of a prompt that are to be sent.

    Attributes:
        uids: of the requests.
        tokens: of the prompt.
        longest: most tokens of a response.
        content: the requests, as the caller has them.
    """

    uids: Sequence[str]
    tokens: int
    longest: int
    content: Content

    @property
    def expected(self) -> float:
        """Tokens in the cache, when responses are as long as the first wave expects."""
        return self.tokens + EXPECTED * self.longest * len(self.uids)


@dataclass
class RequestQueue:
    """The requests that each engine has, and how much room it has for more.

    Attributes:
        of: whose requests they are (`EngineWorker.land`).
        capacities: by engine.
        engine_of: the rank of the engine that has a request, by the request's uid.
        waiting: by engine, how many of its requests wait within it.
        landed: by engine, the trajectories that it returned last.
        lost: ranks of engines that are gone.
        seconds: of generation since `take_idle`.
        busy: seconds in which an engine had an unfinished request, over all engines.
        counts: counts of the requests, over all engines.
        last: when a trajectory last came, by `time.monotonic`.
    """

    engines: WorkerGroup
    of: str = TRAINING
    capacities: dict[int, EngineCapacity] = field(default_factory=dict)
    engine_of: dict[str, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    landed: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    seconds: float = 0.0
    busy: float = 0.0
    counts: EngineCounts = field(default_factory=EngineCounts)
    last: float = 0.0
    _counted: float = 0.0

    @property
    def apart(self) -> float:
        """Seconds of a call of the engines."""
        return APART * self.engines.world_size

    @property
    def marks(self) -> set[str]:
        """Marks of the processes of engines that have requests."""
        working = {*self.engine_of.values()}
        return {process.mark for process in self.engines.processes if process.rank in working}

    def open(self, run: Run, *, anew: bool = False) -> None:
        """Before generation begins or continues: ask the engines how much they compute at a time, and which requests they have.

        Args:
            anew: have them give up requests that are left over from an earlier generation.

        Engines that were restarted before get weights, and lost ones are restarted, as in `exchange`.

        Raises:
            WorkerLost: an engine was lost that cannot be replaced.
        """
        while True:
            if run.restarts is not None:
                run.restarts.serve_all()
            try:
                self._ask(run, anew)
                return
            except WorkerLost as failure:
                self._lose(run, failure)
                self._revive(run, failure)

    def _ask(self, run: Run, anew: bool) -> None:
        alive = [engine for engine in range(self.engines.world_size) if engine not in self.lost]
        begun = run.wait(
            [self.engines.call_rank(engine, "begin_generation", self.of, anew) for engine in alive]
        )
        answers = dict(zip(alive, begun, strict=True))
        self.capacities = {engine: capacity for engine, (capacity, _) in answers.items()}
        self.engine_of = {uid: engine for engine, (_, uids) in answers.items() for uid in uids}
        self.waiting, self.landed = {}, {}
        self.last = self._counted = time.monotonic()

    def deal(
        self, prompts: Iterable[PromptRequests[Content]], count: int
    ) -> list[list[PromptRequests[Content]]]:
        """By engine, the prompts that it gets now; from now on it has their requests.

        Args:
            prompts: the prompts that wait; the first ones are dealt. Only as many are taken as there is room for, and one more.
            count: how many requests these prompts have in all.
        """
        held = Counter(self.engine_of.values())
        alive = [engine for engine in range(self.engines.world_size) if engine not in self.lost]
        room = {engine: self._room(engine, held[engine], -(-count // len(alive))) for engine in alive}
        cache = {
            engine: (1 + SURPLUS) * self.capacities[engine].tokens for engine in alive if not held[engine]
        }
        dealt: list[list[PromptRequests[Content]]] = [[] for _ in range(self.engines.world_size)]
        free = [(held[engine], engine) for engine in alive if room[engine] > 0]
        heapq.heapify(free)
        for prompt in prompts if free else ():
            # The engine with room that has the fewest requests; one whose cache is too full for this prompt gets no further prompt.
            while free:
                number, engine = heapq.heappop(free)
                if not dealt[engine] or cache.get(engine, prompt.expected) >= prompt.expected:
                    break
            else:
                break
            dealt[engine].append(prompt)
            self.engine_of |= dict.fromkeys(prompt.uids, engine)
            room[engine] -= len(prompt.uids)
            if engine in cache:
                cache[engine] -= prompt.expected
            if room[engine] > 0:
                heapq.heappush(free, (number + len(prompt.uids), engine))
            if not free:
                break
        return dealt

    def _room(self, engine: int, held: int, share: int) -> int:
        """How many further requests an engine with `held` requests has room for; `share`: its part of all that wait."""
        places = self.capacities[engine].requests
        surplus = max(1, min(max(int(SURPLUS * places), self.landed.get(engine, 0)), share))
        if not held:
            return places + surplus
        return min(places + surplus - held, surplus - self.waiting.get(engine, 0))

    def exchange(self, run: Run, parts: Sequence[Sequence[Part]]) -> list[pa.Table]:
        """Send the engines requests, by engine, and return trajectories that finish within `apart` seconds, or until all have finished.

        A lost engine is restarted at once, or, with `run.restarts.come_late`, when no other engine is left; no engine has its requests
        afterwards.

        Raises:
            WorkerLost: an engine was lost that cannot be replaced.
            WaitTimeout: no trajectory came for longer than run.phase_timeout.
        """
        working = {*self.engine_of.values()}  # with the requests that it gets now
        calls = {
            engine: self.engines.call_rank(engine, "land", self.apart, list(own), self.of)
            for engine, own in enumerate(parts)
            if engine in working
        }
        answers: dict[int, Landed] = {}
        failure: WorkerLost | None = None
        while calls and not answers:
            try:
                answers = dict(zip(calls, run.wait([*calls.values()], busy=self.marks), strict=True))
            except WorkerLost as found:
                self._lose(run, found)
                # Wait for the others all the same: an engine gives an answer only once, and then forgets the request.
                failure, calls = found, {rank: call for rank, call in calls.items() if rank not in self.lost}
        tables = [answer.table for answer in answers.values() if answer.table is not None]
        for table in tables:
            for uid in table["uid"].to_pylist():
                self.engine_of.pop(request_of(uid), None)
        self._note(answers)
        if tables or not self.engine_of:
            self.last = time.monotonic()
        marks = self.marks
        run.refuse_silence(self.last, [one for one in self.engines.processes if one.mark in marks])
        if failure is not None and self._revive(run, failure):
            self.open(run)
        return tables

    def _note(self, answers: Mapping[int, Landed]) -> None:
        now = time.monotonic()
        passed, self._counted = now - self._counted, now
        self.seconds += passed
        # Requests that wait for new weights between two phases count as unfinished, too: `min` leaves those seconds out.
        self.busy += sum(min(answer.busy, passed) for answer in answers.values())
        for answer in answers.values():
            self.counts += answer.counts
        self.waiting = {engine: answer.waiting for engine, answer in answers.items()}
        self.landed = {
            engine: 0 if answer.table is None else num_sessions(answer.table)
            for engine, answer in answers.items()
        }

    def _lose(self, run: Run, failure: WorkerLost) -> None:
        if run.restarts is None:
            raise failure
        self.lost.update(run.restarts.lose(failure))
        self.engine_of = {uid: engine for uid, engine in self.engine_of.items() if engine not in self.lost}

    def _revive(self, run: Run, failure: WorkerLost) -> bool:
        """After a loss: replace the engine, unless it would come late and there are others; returns whether it was replaced."""
        assert run.restarts is not None
        if run.restarts.come_late and len(self.lost) < self.engines.world_size:
            return False
        run.restarts.revive(failure)
        self.lost.clear()
        return True

    def close(self, run: Run) -> None:
        """After generation: replace lost engines that it continued without."""
        if self.lost:
            assert run.restarts is not None
            run.restarts.replace_lost()
            self.lost.clear()

    def take_idle(self) -> tuple[float, float]:
        """Seconds that engines were without a request since the last call, as their mean, and the seconds that passed."""
        seconds, busy = self.seconds, self.busy
        self.seconds = self.busy = 0.0
        return max(0.0, seconds - busy / self.engines.world_size), seconds

    def take_counts(self) -> EngineCounts:
        """The counts of requests since the last call."""
        taken, self.counts = self.counts, EngineCounts()
        return taken


def by_prompt(
    parts: Sequence[Part], is_missing: Callable[[str], bool]
) -> list[PromptRequests[dict[int, list[int]]]]:
    """Requests by prompt, in the order of the prompts' first ones; their content is row numbers by the number of their part.

    Args:
        is_missing: whether the request with a uid is to be sent.
    """
    found: dict[str, dict[int, list[int]]] = {}
    names = [requests["uid"].to_pylist() for requests, _ in parts]
    for number, (requests, _) in enumerate(parts):
        for row, prompt in enumerate(requests["prompt_uid"].to_pylist()):
            if is_missing(names[number][row]):
                found.setdefault(prompt, {}).setdefault(number, []).append(row)
    lengths = [list_lengths(requests, "prompt_ids") for requests, _ in parts]
    return [
        PromptRequests(
            [names[number][row] for number, rows in content.items() for row in rows],
            max(int(lengths[number][rows[0]]) for number, rows in content.items()),
            max(parts[number][1].max_new_tokens for number in content),
            content,
        )
        for content in found.values()
    ]


def joined(parts: Sequence[Part], prompts: Sequence[PromptRequests[dict[int, list[int]]]]) -> list[Part]:
    """The requests of prompts of `by_prompt`, one table for each part that has some."""
    rows: dict[int, list[int]] = {}
    for prompt in prompts:
        for number, own in prompt.content.items():
            rows.setdefault(number, []).extend(own)
    return [(take(parts[number][0], own), parts[number][1]) for number, own in sorted(rows.items())]
