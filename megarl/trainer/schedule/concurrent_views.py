"""The two halves of a step that work at once: one collects trajectories, the other learns. Each has a view of run and roles."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.trainer.roles.device_memory import Recover, nothing_is_replaced
from megarl.trainer.schedule.background import Background, InterruptedWatch

if TYPE_CHECKING:
    from megarl.trainer.roles.restarts import LaterRestarts
    from megarl.trainer.roles.types import Roles
    from megarl.trainer.run.run import Run

View = tuple["Run", "Roles"]


def two_halves(
    run: Run,
    roles: Roles,
    background: Background[Any],
    later: LaterRestarts,
    busy: Callable[[], Collection[str]] = tuple,
) -> tuple[View, View]:
    """(run, roles) as the half that collects, in the background, and the one that learns see them.

    Either watches its own groups' processes, obeys what ends the other, and times its own phases.

    Args:
        later: how engines are started anew that are lost meanwhile.
        busy: marks of processes that should be at work, though no call waits for them.
    """
    judge = [roles.reward_model.group] if roles.reward_model is not None else []
    collecting = [roles.engines, *judge]
    learning = [group for group in run.groups if group not in collecting]
    assert run.watch is not None, "a run with engines"
    idle_timeout, cluster = run.watch.idle_timeout, run.watch.cluster
    phases = [*run.phases]
    collector = replace(
        run,
        watched=collecting,
        watch=InterruptedWatch(idle_timeout, cluster, background.obey, busy),
        interrupt=background.obey,
        seconds={},
        phases=phases,
        beside=run.phases,
        restarts=later if run.restarts is not None else None,
    )
    learner = replace(
        run,
        watched=learning,
        watch=InterruptedWatch(idle_timeout, cluster, background.check),
        interrupt=background.check,
        beside=phases,
    )
    return (
        (collector, _with_memory_of(roles, collector, collecting, later.replace_lost)),
        (learner, _with_memory_of(roles, learner, learning, nothing_is_replaced)),
    )


def _with_memory_of(roles: Roles, run: Run, groups: list, recover: Recover) -> Roles:
    return replace(roles, memory=roles.memory.half(run, groups, recover))
