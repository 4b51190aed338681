"""A run that loses a process is started again by itself, from its last checkpoint.

Guarantee: what it ends with is what it would have ended with undisturbed, as after any resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from megarl.checkpoints import steps_in
from megarl.cluster import Premises, RayFailed, WorkerLost
from megarl.config import TrainConfig, TuningConfig
from megarl.trainer.run.preemption import REQUEUE, Preemption
from megarl.trainer.run.resumed import CHECKPOINTS

C = TypeVar("C", bound=TrainConfig | TuningConfig)


def supervised(config: C, train: Callable[[C, Premises | None], str], premises: Premises | None) -> str:
    """`train(config, premises)`, again after each loss of a process, as often as `trainer.max_restarts` allows; returns its result.

    Whatever the lost run still had is ended by then. A rank that raises is not a loss: it would raise again.

    Raises:
        WorkerLost, RayFailed: no restart is left; whatever else `train` raises.
    """
    allowed = config.trainer.max_restarts
    for number in range(allowed + 1):
        try:
            return train(config, premises)
        except (WorkerLost, RayFailed) as loss:
            if number == allowed:
                raise
            lines = [str(loss), f"starting again: {number + 1} of trainer.max_restarts={allowed}"]
        Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        config, premises = as_restarted(config), None  # they went with the run's cluster
    raise AssertionError("the last one returns or raises")


@contextmanager
def not_again_once_told(preemption: Preemption) -> Iterator[None]:
    """A run that was told to end and loses a process before it has is not started again here, but by who told it.

    Raises:
        SystemExit: with REQUEUE, for a loss.
    """
    try:
        yield
    except (WorkerLost, RayFailed) as loss:
        if preemption.requested is None:
            raise
        text = f"{loss}\nending, to be started again: the run was told to end ({preemption.requested})"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(REQUEUE) from loss


def as_restarted(config: C) -> C:
    """The configuration of a run's next start: it goes on from the run's own newest checkpoint, once there is one."""
    if not steps_in(Path(config.trainer.default_local_dir) / CHECKPOINTS):
        return config
    return replace(config, trainer=replace(config.trainer, resume_mode="auto", resume_from_path=None))
