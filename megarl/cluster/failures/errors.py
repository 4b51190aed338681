"""A rank as the controller sees it, and the errors that name it."""

import time
from collections.abc import Sequence
from pathlib import Path

import ray

from megarl.cluster.ranks import RankError, RankProcess


def rank_error(error: ray.exceptions.RayTaskError) -> RankError:
    """What a call has raised, as its rank has told it."""
    if isinstance(error.cause, RankError):
        return error.cause
    # Raised by Ray around our method: a result that cannot be pickled, an argument that was lost, ...
    return RankError(type(error.cause).__name__, str(error.cause), str(error), time.time(), "")


class RunFailure(RuntimeError):
    """A process of a run, or of Ray, does not do what it should.

    Attributes:
        report: the file that says more, where there is one.
        headline: who did what, in a line; empty: the message is as short.
    """

    report: Path | None = None
    headline: str = ""

    def name_report(self, path: Path) -> None:
        """Add the report's path to the message, and below what its log had to say once more who it was."""
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
    """A process on which nobody can count any more."""


class WorkerDied(WorkerLost):
    """A process ended that should not have."""

    def __init__(self, process: RankProcess, cause: str, log_tail: str, others: Sequence[str] = ()) -> None:
        details = _log_part(process, log_tail) + _others_part(others)
        super().__init__(process, cause, f"{process} died: {cause}", details, log_tail)


class WorkerHung(WorkerLost):
    """A process lives, but is stopped, or its call does not come to an end."""

    def __init__(self, process: RankProcess, cause: str, log_tail: str, others: Sequence[str] = ()) -> None:
        details = _log_part(process, log_tail) + _others_part(others)
        super().__init__(process, cause, f"{process} hangs: {cause}", details, log_tail)


class WorkerFailed(RankFailure):
    """A method (or the constructor) of a worker raised; `kind` and `message` are those of its exception."""

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
            for process in silent
        ]
        super().__init__("\n".join(lines))


def _log_part(process: RankProcess, tail: str) -> str:
    where = f"log: {process.log_path} on {process.host}"
    return f"\n{where}, its last lines:\n{_indent(tail)}" if tail else f"\n{where} (empty)"


def _others_part(others: Sequence[str]) -> str:
    return f"\nalso: {'; '.join(others)}" if others else ""


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
