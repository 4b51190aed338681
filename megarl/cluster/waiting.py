"""Waits for calls, explains which process failed and why, and tells now and then which ranks have not answered.

Guarantees:

- `wait` raises within seconds when any process of the watched groups has died, in the calls or not, whether or not others hang;
- with a `Watch` it also raises when a process is stopped, or when no process that it waits for works any more (watch.py);
- the root cause is reported: a death before the exceptions that it caused elsewhere ("connection closed by
  peer"), these after all other exceptions, and the earliest of them first; where ranks waited in vain for others, the others are named;
- an exception ends the wait although other ranks still run;
- in groups that can be spared, a process that is not waited for may be dead;
- where a rank has several processes, it is lost with any of them.

How a death is noticed: Ray tells the owner of an actor when the actor's process has ended (20 ms after a SIGKILL, Ray 2.60),
and the owner's library keeps that state; reading it costs 0.3 us a process, no message and no thread in the worker. A call that
never returns, the usual alternative, needs a thread of its own in each worker, and then Ray moves the user's methods out of the
main thread. A machine that vanishes is noticed by Ray's health check.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from megarl.cluster.hosts import log_tail, on_node
from megarl.cluster.ranks import (
    RankError,
    RankProcess,
    RelayedErrors,
    WaitTimeout,
    Watched,
    WorkerDied,
    WorkerFailed,
    WorkerHung,
    listed,
    rank_error,
)
from megarl.cluster.report import stacks_of
from megarl.cluster.watch import Hang, Watch

_POLL_SECONDS = 0.25
# Each check for answers goes over all pending calls: a check for each of a thousand ranks' answers would take a million steps. So
# after the first answer others are awaited for a moment, the longer the more calls are pending.
_GATHER_SECONDS, _GATHER_SECONDS_EACH = 0.02, 2e-4
# Within this time after a first exception a death counts as its cause: gloo notices a closed connection at once, Ray a death 20 ms
# later.
GRACE_SECONDS = 1.5
# The same after an exception about a lost connection: a rank whose SGLang scheduler was killed has to notice that itself first.
_LOST_PEER_SECONDS = 10.0
# How long to wait for the guard's word on how a process ended.
_EXIT_LINE_SECONDS = 2.0
_NODE_SECONDS = 5.0
# Messages of gloo, NCCL (torch 2.13) and the links of a weight sync about a lost connection.
_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|reset by peer|closed its connection|could not be reached|broken pipe"
    r"|remote process exit",
    re.IGNORECASE,
)
# Messages of gloo and NCCL about a collective that has taken longer than the group's timeout (torch 2.13).
_COLLECTIVE_TIMEOUT = re.compile(
    r"timed? ?out (waiting|after|in)|collective operation timeout", re.IGNORECASE
)
Processes = dict[Any, RankProcess]
"""By Ray's id of their actors."""


@dataclass(frozen=True, slots=True)
class RelayedAnswer:
    """A rank's answer, one of several that its relay (relays.py) returns together."""

    ref: ray.ObjectRef
    index: int


def wait(
    refs: Sequence[ray.ObjectRef | RelayedAnswer],
    groups: Sequence[Watched],
    timeout: float | None = None,
    watch: Watch | None = None,
    spares: Collection[Watched] = (),
    missing: Callable[[Sequence[RankProcess]], None] = lambda processes: None,
    busy: Collection[str] = (),
) -> list[Any]:
    """Results of `refs`, in their order, while watching all processes of `groups`.

    Args:
        refs: calls, as `call` and `call_each` of these groups return them; empty: only check that all processes are well.
        timeout: seconds; None waits for ever (deaths still end it).
        watch: looks for processes that hang; None: no such check.
        spares: the ones of `groups` whose processes may be dead unless `refs` are calls of them.
        missing: called again and again with the processes that have not answered yet.
        busy: marks of ranks that should be working also when they have answered: `watch` treats them as ranks that are waited for.

    Raises:
        WorkerDied: a process of `groups` died, or did before.
        WorkerHung: a process of `groups` is stopped, or all that are waited for have long been idle.
        WorkerFailed: a call raised.
        WaitTimeout: calls were not answered within `timeout`.
    """
    pending: list[ray.ObjectRef] = list(
        dict.fromkeys(ref.ref if isinstance(ref, RelayedAnswer) else ref for ref in refs)
    )
    processes = _processes(pending, groups, spares)
    deadline = None if timeout is None else time.monotonic() + timeout
    results: dict[ray.ObjectRef, Any] = {}
    while True:
        ready, pending = _next_ready(pending, deadline)
        # An exception first: it names its cause, and a death that caused it is found with it.
        for number, (ref, value) in enumerate(zip(ready, _values(ready), strict=True)):
            if isinstance(value, ray.exceptions.RayError):
                raise _root_cause(ref, value, [*ready[number + 1 :], *pending], processes) from None
            results[ref] = value
        if (loss := next(_losses(processes, pending, watch, busy), None)) is not None:
            raise loss
        missing(_waited_for(pending, processes))
        if not pending:
            return [
                results[ref.ref][ref.index] if isinstance(ref, RelayedAnswer) else results[ref]
                for ref in refs
            ]
        if deadline is not None and time.monotonic() >= deadline:
            raise _timeout_error(timeout, pending, len(refs), processes)


def _values(refs: Sequence[ray.ObjectRef]) -> list[Any]:
    """Results of calls that have ended, and the errors of failed ones; fetched together, which costs half as much, unless any failed."""
    try:
        return ray.get(list(refs))
    except ray.exceptions.RayError:
        return [_value(ref) for ref in refs]


def _value(ref: ray.ObjectRef) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as error:
        return error


def _processes(
    sources: Sequence[ray.ObjectRef], groups: Sequence[Watched], spares: Collection[Watched]
) -> Processes:
    """The processes of `groups`, which must include all callees of `sources`; of `spares` only the ranks of `sources`."""
    processes = {process.actor._actor_id: process for group in groups for process in group.watched}
    called = {_actor_id(source) for source in sources}
    strangers = called - set(processes)
    assert not strangers, (
        f"some calls are not on a process of the groups {[g.role for g in groups]}: {strangers}"
    )
    spared = {process.actor._actor_id for group in spares for process in group.processes}
    ranks = {_rank_of(processes[key]) for key in called}
    return {
        key: process for key, process in processes.items() if key not in spared or _rank_of(process) in ranks
    }


def _rank_of(process: RankProcess) -> tuple[str, int]:
    return process.role, process.rank


def _losses(
    processes: Processes, pending: Sequence[ray.ObjectRef], watch: Watch | None, busy: Collection[str] = ()
) -> Iterator[WorkerDied | WorkerHung]:
    """The processes that are dead at the moment; where none is, the hang that `watch` finds, if any."""
    dead = [process for process in processes.values() if process.is_dead]
    for process in dead:
        yield _died(process, None, [f"{other} died, too" for other in dead if other is not process])
    if watch is None or dead:
        return
    ranks = {_rank_of(process) for process in _waited_for(pending, processes)}
    called = {process.mark for process in processes.values() if _rank_of(process) in ranks}
    hang = watch.look(list(processes.values()), (called | {*busy}) - {""})
    if hang is not None:
        yield _hung(hang)


def _waited_for(pending: Sequence[ray.ObjectRef], processes: Processes) -> list[RankProcess]:
    """The ranks of pending calls; for a relay all ranks of its share, since it alone knows which have answered."""
    called = [processes[key] for key in dict.fromkeys(_actor_id(source) for source in pending)]
    return [rank for process in called for rank in process.share or (process,)]


def loss_of(process: RankProcess, others: Sequence[str] = ()) -> WorkerDied | WorkerHung:
    """The error for a process that is dead, or that was found to hang; `others`: what its message tells besides."""
    if process.is_dead:
        return _died(process, None, others)
    return _hung(Hang((process,), "it was found to hang before"), others)


def _hung(hang: Hang, others: Sequence[str] = ()) -> WorkerHung:
    """The error for a hang; it names the rank that the others wait for, if the stacks show which one."""
    stacks = stacks_of(hang.processes)
    at_fault = [
        process
        for process, found in zip(hang.processes, stacks, strict=True)
        if found is None or not found.waits_for_others
    ]
    first, *further = at_fault or hang.processes
    named = [*others, *(f"{process} likewise" for process in further)]
    waiting = [process.name for process in hang.processes if process not in (first, *further)]
    if waiting:
        named.insert(0, f"{listed(waiting)} wait in a collective")
    tail = on_node(first.node_id, _NODE_SECONDS, log_tail, first.log_path)
    return WorkerHung(first, hang.cause, tail[0] if tail is not None else "", named)


def _timeout_error(
    timeout: float, pending: Sequence[ray.ObjectRef], num_calls: int, processes: Processes
) -> WaitTimeout:
    silent = _waited_for(pending, processes)
    found = zip(silent, stacks_of(silent), strict=True)  # also written to the logs that the message names
    if any(processes[_actor_id(ref)].share for ref in pending):
        silent = [process for process, stacks in found if stacks is None or stacks.is_called] or silent
    return WaitTimeout(timeout, silent, num_calls)


def _next_ready(
    pending: list[ray.ObjectRef], deadline: float | None
) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    """(ready, still pending) after at most _POLL_SECONDS; once one call is ready, others get a moment to become ready, too."""
    if not pending:
        return [], []
    seconds = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
    ready, _ = ray.wait(pending, num_returns=1, timeout=seconds, fetch_local=False)
    more = max(_GATHER_SECONDS, _GATHER_SECONDS_EACH * len(pending)) if ready else 0
    return ray.wait(pending, num_returns=len(pending), timeout=more, fetch_local=False)


def _root_cause(
    source: ray.ObjectRef, error: Exception, pending: list[ray.ObjectRef], processes: Processes
) -> Exception:
    """The exception to report when `source` ended in `error`: waits a little longer for a death or error that may have caused it."""
    errors, silent = _errors_of(source, error, processes)
    deadline = time.monotonic() + (_LOST_PEER_SECONDS if _LOST_PEER.search(str(error)) else GRACE_SECONDS)
    while time.monotonic() < deadline and not any(process.is_dead for process in processes.values()):
        if not pending:
            time.sleep(0.05)
        ready, pending = _next_ready(pending, deadline)
        for other in ready:
            try:
                ray.get(other)
            except ray.exceptions.RayError as other_error:
                more, still_silent = _errors_of(other, other_error, processes)
                errors, silent = more | errors, [*silent, *still_silent]
    reports = {
        key: rank_error(error) if isinstance(error, ray.exceptions.RayTaskError) else error
        for key, error in errors.items()
        if isinstance(error, ray.exceptions.RayTaskError | RankError)
    }
    lines = {key: f"{processes[key]} raised {str(report).splitlines()[0]}" for key, report in reports.items()}
    # Deaths that Ray has recorded come first, then processes that cannot be reached although Ray is not sure yet.
    dead = [key for key, process in processes.items() if process.is_dead]
    dead += [key for key in errors if key not in reports and key not in dead]
    if dead:
        others = [f"{processes[key]} died, too" for key in dead[1:]]
        others += [line for key, line in lines.items() if key not in dead]
        return _died(processes[dead[0]], errors.get(dead[0]), others)
    first = min(reports, key=lambda key: (bool(_LOST_PEER.search(reports[key].message)), reports[key].time))
    others = [line for key, line in lines.items() if key != first]
    if _COLLECTIVE_TIMEOUT.search(reports[first].message):
        others = _missing([*silent, *_waited_for(pending, processes)], processes[first].role) + others
    return WorkerFailed(processes[first], reports[first], others)


def _missing(pending: Sequence[RankProcess], role: str) -> list[str]:
    """The ranks that did not come to a collective of `role`: they are in none, and still work on the call.

    A rank whose call has ended, though its answer has not arrived, took part: it is named only if there is no other.
    """
    candidates = [process for process in pending if process.role == role]
    elsewhere = [
        (process, stacks)
        for process, stacks in zip(candidates, stacks_of(candidates), strict=True)
        if stacks is None or not stacks.waits_for_others
    ]
    missing = [
        process for process, stacks in elsewhere if stacks is None or not stacks.processes or stacks.is_called
    ] or [process for process, _ in elsewhere]
    return [f"missing in the collective: {listed([*map(str, missing)])}"] if missing else []


def _errors_of(
    source: ray.ObjectRef, error: Exception, processes: Processes
) -> tuple[dict[Any, Exception], list[RankProcess]]:
    """The errors that ended a call, by process, and the processes that have not answered; for a relay's call both are about its ranks."""
    called = processes[_actor_id(source)]
    cause = getattr(error, "cause", None)
    if not isinstance(cause, RelayedErrors):
        return {_actor_id(source): error}, []
    ranks = {process.rank: process for process in called.share}
    errors = {ranks[rank].actor._actor_id: one for rank, one in cause.errors.items()}
    return errors, [ranks[rank] for rank in cause.silent]


def _died(process: RankProcess, error: Exception | None, others: Sequence[str]) -> WorkerDied:
    tail, cause = "", ""
    deadline = time.monotonic() + _EXIT_LINE_SECONDS
    while not cause and time.monotonic() < deadline:
        time.sleep(0.05)
        found = on_node(process.node_id, _NODE_SECONDS, log_tail, process.log_path)
        if found is None:
            cause = "its machine does not answer"
        else:
            tail, cause = found
    return WorkerDied(process, cause or _reason_of_ray(process, error), tail, others)


def _reason_of_ray(process: RankProcess, error: Exception | None) -> str:
    """Ray's own reason for a death; for processes that died before they had a guard."""
    if error is None:
        try:
            ray.get(process.actor.__ray_ready__.remote(), timeout=_NODE_SECONDS)
        except ray.exceptions.RayError as why:
            error = why
    return " ".join(str(error).split())


def _actor_id(source: ray.ObjectRef) -> Any:
    return source.task_id().actor_id()


class MissingReporter:
    """Called again and again with the processes that have not come up; passes a line to `say` once in `every` seconds."""

    def __init__(self, say: Callable[[str], None], of: int, every: float = 20.0) -> None:
        """`of`: the number of processes at the beginning."""
        self._say, self._of, self._every = say, of, every
        self._begun = self._said = time.monotonic()

    def __call__(self, processes: Sequence[RankProcess]) -> None:
        now = time.monotonic()
        if not processes or now - self._said < self._every:
            return
        self._said = now
        names = listed([f"{process.name} ({process.host})" for process in processes])
        self._say(
            f"  after {now - self._begun:.0f} s {len(processes)} of {self._of} processes have yet to come up: {names}"
        )
