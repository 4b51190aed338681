"""The spans of all processes, on the controller's clock. It never waits for a process: a request of one round is answered by the next."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import ray

from megarl.cluster.hosts import submit
from megarl.util.spans import Span

if TYPE_CHECKING:
    from megarl.cluster.group import WorkerGroup
    from megarl.cluster.ranks import RankProcess

_CLOCK_SECONDS = 10.0  # until a node must have told its time
_CLOCK_ROUNDS = 5


class SpanCollector:
    """Requests the spans of processes, one call at a time for each, and collects the answers."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[RankProcess, ray.ObjectRef]] = {}  # by mark
        self._ahead: dict[str, int] = {ray.get_runtime_context().get_node_id(): 0}  # by node, ns

    def ask(self, groups: Collection[WorkerGroup]) -> None:
        """Request spans from all living processes that have answered the last request."""
        processes = [process for group in groups for process in group.processes]
        self._compare_clocks({process.node_id for process in processes} - self._ahead.keys())
        for process in processes:
            if process.mark not in self._asked and not process.is_dead:
                self._asked[process.mark] = process, process.actor.take_spans.remote()

    def answers(self, seconds: float = 0.0) -> Iterator[tuple[RankProcess, list[Span]]]:
        """Answers that have come, or come within `seconds`; none from processes that have died since."""
        refs = {ref: mark for mark, (_, ref) in self._asked.items()}
        if not refs:
            return
        ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=seconds)
        for ref in ready:
            process, _ = self._asked.pop(refs[ref])
            try:
                spans = ray.get(ref)
            except ray.exceptions.RayError:  # it died, which the next wait reports
                continue
            ahead = self._ahead.get(process.node_id, 0)
            yield process, [span._replace(begin=span.begin - ahead, end=span.end - ahead) for span in spans]

    def _compare_clocks(self, nodes: Collection[str]) -> None:
        """Learn how far the clocks of new nodes are ahead; a node that does not answer counts as synchronous."""
        if nodes:  # all at once, since the first question starts a process on each node, which takes a second
            first = [submit(node, time.time_ns) for node in nodes]
            ray.wait(first, num_returns=len(first), timeout=_CLOCK_SECONDS)
        for node in nodes:
            answers = (_time_of(node) for _ in range(_CLOCK_ROUNDS))
            self._ahead[node] = clock_ahead(list(takewhile(lambda answer: answer is not None, answers)))


def _time_of(node: str) -> tuple[int, int, int] | None:
    sent = time.time_ns()
    try:
        theirs = ray.get(submit(node, time.time_ns), timeout=_CLOCK_SECONDS)
    except ray.exceptions.RayError:  # as in hosts.on_node
        return None
    return sent, theirs, time.time_ns()


def clock_ahead(rounds: Sequence[tuple[int, int, int]]) -> int:
    """Nanoseconds that another clock is ahead, from questions: (sent, its time, answered); 0 without any.

    From the quickest question, which counts as answered in the middle of its time (Cristian, "Probabilistic clock
    synchronization", 1989): the error is at most half of that time.
    """
    if not rounds:
        return 0
    sent, theirs, answered = min(rounds, key=lambda round: round[2] - round[0])
    return theirs - (sent + answered) // 2
