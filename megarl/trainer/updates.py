"""The optimizer steps of a step: the critic's and the actor's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from megarl.algorithms.metrics import add_sums, reduce_metrics
from megarl.algorithms.policy_loss import PolicyLossOptions
from megarl.config import TrainConfig
from megarl.trainer.dispatch import update_plan
from megarl.trainer.roles import Roles

if TYPE_CHECKING:
    import ray

    from megarl.trainer.run import Run


def update(
    run: Run, roles: Roles, batch: pa.Table, config: TrainConfig, step: int, seed: int
) -> dict[str, float]:
    """The critic's and the actor's updates; the actor waits out the critic's warm-up.

    Both at once, unless they make room for each other on the same devices.
    """
    table, metrics = run.put(batch), {}
    trains_actor = roles.critic is None or step > config.critic.warmup_steps
    trained = [
        name for name, there in (("critic", roles.critic is not None), ("actor", trains_actor)) if there
    ]
    for phase, names in roles.memory.turns(trained):
        with roles.memory.held(phase):
            calls = {name: _start_update(name, roles, batch, table, config, seed) for name in names}
            for name, refs in calls.items():
                metrics |= _update_metrics(name, run.wait(refs)[0])
    return metrics


def _start_update(
    name: str, roles: Roles, batch: pa.Table, table: ray.ObjectRef, config: TrainConfig, seed: int
) -> list[ray.ObjectRef]:
    """Call the update of "critic" or "actor" on `table`, which is `batch` in the object store."""
    agg = config.actor_rollout_ref.actor.loss_agg_mode
    if name == "critic":
        plan, counts = update_plan(batch, roles.critic.layout, roles.critic.cut, seed)
        return roles.critic.group.call(
            "update_values", table, plan, counts, agg, config.critic.cliprange_value
        )
    plan, counts = update_plan(batch, roles.actor.layout, roles.actor.cut, seed)
    return roles.actor.group.call("update_policy", table, plan, counts, agg, policy_loss_options(config))


def _update_metrics(name: str, steps: list[dict[str, float]]) -> dict[str, float]:
    own = ("grad_norm", "lr")
    sums = add_sums([{key: value for key, value in step.items() if key not in own} for step in steps])
    return {
        **reduce_metrics(sums, num_updates=len(steps)),
        f"{name}/grad_norm": float(np.mean([step["grad_norm"] for step in steps])),
        f"{name}/lr": steps[-1]["lr"],
    }


def policy_loss_options(config: TrainConfig) -> PolicyLossOptions:
    actor = config.actor_rollout_ref.actor
    return PolicyLossOptions(
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        entropy_coef=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_kind=actor.kl_loss_type if actor.use_kl_loss else None,
    )
