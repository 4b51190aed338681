"""Waits for calls, and explains what went wrong in which process.

Guarantees:

- `wait` raises within seconds when any process of the watched groups has died, whether or not it takes part in
  the calls and whether or not the other ranks hang in a collective;
- the root cause is reported: a death before the exceptions that it caused elsewhere ("connection closed by
  peer"), and of several exceptions the earliest;
- an exception ends the wait although other ranks still run;
- `stream` does the same for what generator methods yield, and keeps none of it.

How a death is noticed: Ray tells the owner of an actor when the actor's process has ended (20 ms after a
SIGKILL, Ray 2.60), and the owner's library keeps that state; asking it costs 0.3 us a process, no message and no
thread in the worker. A call that never returns, the usual alternative, needs a thread of its own in each worker,
and then Ray moves the user's methods out of the main thread. A machine that vanishes is noticed by Ray's health
check.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from megarl.cluster.hosts import dump_stacks, log_tail, on_node
from megarl.cluster.worker import RankError

if TYPE_CHECKING:
    from megarl.cluster.group import WorkerGroup

_POLL_SECONDS = 0.25
# How long after a first exception a death is still taken for its cause: gloo notices a closed connection at once,
# Ray the end of a process some 20 ms later, a loaded machine both much later.
_GRACE_SECONDS = 1.5
# How long to wait for the guard's word on how a process ended.
_EXIT_LINE_SECONDS = 2.0
_NODE_SECONDS = 5.0
_DEAD = 4  # ActorTableData.ActorState.DEAD

Source = ray.ObjectRef | ray.ObjectRefGenerator
"""A call's result, or the stream of a generator method."""


@dataclass(frozen=True)
class RankProcess:
    """One rank as the controller sees it; `pid` is 0, `mark` and `scratch` empty until the process has reported."""

    actor: ActorHandle
    role: str
    rank: int
    host: str
    node_id: str
    log_path: str
    pid: int = 0
    mark: str = ""
    scratch: str = ""

    @property
    def name(self) -> str:
        """Such as "actor rank 3"."""
        return f"{self.role} rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid or '?'} on {self.host})"


class WorkerDied(RuntimeError):
    """A process ended that should not have."""

    def __init__(self, process: RankProcess, cause: str, log_tail: str, others: Sequence[str] = ()) -> None:
        self.role, self.rank, self.host, self.pid = process.role, process.rank, process.host, process.pid
        self.cause, self.log_path, self.log_tail = cause, process.log_path, log_tail
        super().__init__(f"{process} died: {cause}{_log_part(process, log_tail)}{_others_part(others)}")


class WorkerFailed(RuntimeError):
    """A method (or the constructor) of a worker raised; `kind` and `message` are those of its exception."""

    def __init__(self, process: RankProcess, error: RankError, others: Sequence[str] = ()) -> None:
        self.role, self.rank, self.host, self.pid = process.role, process.rank, process.host, process.pid
        self.kind, self.message, self.remote_traceback = error.kind, error.message, error.remote_traceback
        self.log_path, self.log_tail = process.log_path, error.log_tail
        super().__init__(
            f"{process} raised {error}\n{_indent(error.remote_traceback)}"
            f"{_log_part(process, error.log_tail)}{_others_part(others)}"
        )


class WaitTimeout(TimeoutError):
    """Some calls were not answered in time; `silent` names their ranks."""

    def __init__(self, seconds: float, silent: Sequence[RankProcess], num_calls: int) -> None:
        self.silent = [process.name for process in silent]
        lines = [f"no answer within {seconds:g} s from {len(silent)} of {num_calls} calls; silent are:"]
        lines += [
            f"  {process}: the stacks of its threads are now at the end of {process.log_path}"
            if process.pid
            else f"  {process.name}: its process never came up; the machine is overloaded, or more groups "
            f"share its device than gpu_fraction allows"
            for process in silent
        ]
        super().__init__("\n".join(lines))


def is_dead(process: RankProcess) -> bool:
    """True once Ray knows that the process has ended."""
    return process.actor._get_local_state() == _DEAD


def wait(
    refs: Sequence[ray.ObjectRef], groups: Sequence["WorkerGroup"], timeout: float | None = None
) -> list[Any]:
    """Results of `refs`, in their order, while watching all processes of `groups`.

    Args:
        refs: what `call` and `call_each` of these groups returned.
        timeout: seconds; None waits for ever (deaths still end it).

    Raises:
        WorkerDied: a process of `groups` died, or did before.
        WorkerFailed: a call raised.
        WaitTimeout: calls were not answered within `timeout`.
    """
    processes = _processes(refs, groups)
    deadline = None if timeout is None else time.monotonic() + timeout
    results: dict[ray.ObjectRef, Any] = {}
    pending = list(dict.fromkeys(refs))
    while True:
        ready, pending = _next_ready(pending, deadline)
        for ref in ready:
            try:
                results[ref] = ray.get(ref)
            except ray.exceptions.RayError as error:
                raise _root_cause(ref, error, pending, processes) from None
        _refuse_deaths(processes)
        if not pending:
            return [results[ref] for ref in refs]
        if deadline is not None and time.monotonic() >= deadline:
            silent = list({_actor_id(ref): processes[_actor_id(ref)] for ref in pending}.values())
            _dump_stacks(silent)
            raise WaitTimeout(timeout, silent, len(refs))


def stream(streams: Sequence[ray.ObjectRefGenerator], groups: Sequence["WorkerGroup"]) -> Iterator[Any]:
    """What the streams of `stream_each` yield, as it comes, from any rank, until all have ended.

    Processes are watched while this waits for the next value, not while the caller works on the last one.

    Raises:
        WorkerDied: a process of `groups` died, or did before.
        WorkerFailed: a generator raised.
    """
    processes = _processes(streams, groups)
    pending = list(streams)
    _refuse_deaths(processes)
    while pending:
        ready, _ = _next_ready(pending, None)
        for source in ready:
            ref = next(source, None)
            if ref is None:
                pending.remove(source)
                continue
            try:
                value = ray.get(ref)
            except ray.exceptions.RayError as error:
                others = [other for other in pending if other is not source]
                raise _root_cause(source, error, others, processes) from None
            del ref  # the store may free what the caller drops
            yield value
        _refuse_deaths(processes)


def _processes(sources: Sequence[Source], groups: Sequence["WorkerGroup"]) -> dict[Any, RankProcess]:
    """The processes of `groups` by Ray's id of their actors, which must include those of `sources`."""
    processes = {process.actor._actor_id: process for group in groups for process in group.processes}
    strangers = [source for source in sources if _actor_id(source) not in processes]
    assert not strangers, (
        f"these calls are not on a process of the groups {[g.role for g in groups]}: {strangers}"
    )
    return processes


def _refuse_deaths(processes: dict[Any, RankProcess]) -> None:
    dead = [process for process in processes.values() if is_dead(process)]
    if dead:
        raise _died(dead[0], None, [f"{process} died, too" for process in dead[1:]])


def _next_ready(pending: list[Source], deadline: float | None) -> tuple[list[Source], list[Source]]:
    """(ready, still pending) after at most _POLL_SECONDS; as soon as one is ready, all that are."""
    if not pending:
        return [], []
    seconds = _POLL_SECONDS if deadline is None else min(_POLL_SECONDS, max(0.0, deadline - time.monotonic()))
    ray.wait(pending, num_returns=1, timeout=seconds, fetch_local=False)
    return ray.wait(pending, num_returns=len(pending), timeout=0, fetch_local=False)


def _root_cause(
    source: Source, error: Exception, pending: list[Source], processes: dict[Any, RankProcess]
) -> Exception:
    """What to report when `source` ended in `error`: looks a little longer for what may have caused it."""
    errors = {_actor_id(source): error}
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and not any(is_dead(process) for process in processes.values()):
        if not pending:
            time.sleep(0.05)
        ready, pending = _next_ready(pending, deadline)
        for other in ready:
            try:
                ray.get(next(other, []) if isinstance(other, ray.ObjectRefGenerator) else other)
            except ray.exceptions.RayError as other_error:
                errors.setdefault(_actor_id(other), other_error)
    reports = {
        key: _report(error) for key, error in errors.items() if isinstance(error, ray.exceptions.RayTaskError)
    }
    lines = {key: f"{processes[key]} raised {str(report).splitlines()[0]}" for key, report in reports.items()}
    # Ray's books first, then what looks like a death although Ray is not sure yet (an unreachable process).
    dead = [key for key, process in processes.items() if is_dead(process)]
    dead += [key for key in errors if key not in reports and key not in dead]
    if dead:
        others = [f"{processes[key]} died, too" for key in dead[1:]]
        others += [line for key, line in lines.items() if key not in dead]
        return _died(processes[dead[0]], errors.get(dead[0]), others)
    first = min(reports, key=lambda key: reports[key].time)
    return WorkerFailed(
        processes[first], reports[first], [line for key, line in lines.items() if key != first]
    )


def _report(error: ray.exceptions.RayTaskError) -> RankError:
    if isinstance(error.cause, RankError):
        return error.cause
    # Raised by Ray around our method: a result that cannot be pickled, an argument that was lost, ...
    return RankError(type(error.cause).__name__, str(error.cause), str(error), time.time(), "")


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
    return WorkerDied(process, cause or _words_of_ray(process, error), tail, others)


def _words_of_ray(process: RankProcess, error: Exception | None) -> str:
    """Why Ray says the process is dead; for processes that died before they had a guard."""
    if error is None:
        try:
            ray.get(process.actor.__ray_ready__.remote(), timeout=_NODE_SECONDS)
        except ray.exceptions.RayError as why:
            error = why
    return " ".join(str(error).split())


def _dump_stacks(silent: Sequence[RankProcess]) -> None:
    for node_id in {process.node_id for process in silent}:
        pids = [process.pid for process in silent if process.node_id == node_id and process.pid]
        on_node(node_id, _NODE_SECONDS, dump_stacks, pids)


def _actor_id(source: Source) -> Any:
    ref = source.completed() if isinstance(source, ray.ObjectRefGenerator) else source
    return ref.task_id().actor_id()


def _log_part(process: RankProcess, tail: str) -> str:
    where = f"log: {process.log_path} on {process.host}"
    return f"\n{where}, its last lines:\n{_indent(tail)}" if tail else f"\n{where} (empty)"


def _others_part(others: Sequence[str]) -> str:
    return f"\nalso: {'; '.join(others)}" if others else ""


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
