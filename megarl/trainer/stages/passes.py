"""The models' part of a step before its updates: log-probs and values; and how fast its phases were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from megarl.config import (
    TrainConfig,
    full_kl_in_reward,
    is_single_update,
    needs_old_log_probs,
    needs_ref_log_probs,
)
from megarl.data.trajectories import append_column, ragged, sequence_lengths
from megarl.trainer.roles.types import Roles
from megarl.trainer.stages.nonfinite import COMPUTED, require_finite
from megarl.trainer.workers.dispatch import (
    READ,
    columns_of,
    first_pass_plan,
    forward_plan,
    merge_columns,
    update_plan,
)

if TYPE_CHECKING:
    from megarl.trainer.run.run import Run


def evaluate_models(run: Run, roles: Roles, batch: pa.Table, config: TrainConfig, seed: int) -> pa.Table:
    """Append `old_log_probs`, `ref_log_probs`, `full_kl` and `values`, as far as the algorithm uses them.

    All roles work on their part at once. With `algorithm.rollout_correction.bypass_mode` the old log-probs are those that
    the engine gave while it sampled; where a step is a single update, they are left to that (`is_single_update`).

    Args:
        seed: that of the step's `update`.

    Raises:
        NotFinite: one of these is not.
    """
    table = run.put(columns_of(batch, READ))
    actor, ref, critic = roles.actor, roles.ref, roles.critic
    calls = []
    wants_ref = ref is not None and needs_ref_log_probs(config)
    # One call where one group does both: each costs the controller time for every rank.
    both = wants_ref and ref.group is actor.group and needs_old_log_probs(config)
    if needs_old_log_probs(config):
        plan, _ = update_plan(batch, actor.layout, actor.cut, seed, run.plans)
        shares = run.put(first_pass_plan(plan, actor.cut.epochs))
        if both:
            of_ref = run.put(forward_plan(batch, ref.layout, ref.cut, run.plans))
            calls.append(
                (("actor", "ref"), actor.group.call("compute_both_log_probs", table, shares, of_ref))
            )
        else:
            method = "compute_full_kl" if full_kl_in_reward(config) else "compute_log_probs"
            calls.append((("actor",), actor.group.call(method, table, shares, "old_log_probs")))
    elif not is_single_update(config):
        batch = append_column(batch, "old_log_probs", ragged(batch, "rollout_log_probs"))
    if wants_ref and not both:
        shares = forward_plan(batch, ref.layout, ref.cut, run.plans)
        method = "compute_ref_log_probs" if ref.group is actor.group else "compute_log_probs"
        calls.append((("ref",), ref.group.call(method, table, run.put(shares), "ref_log_probs")))
    if critic is not None:
        shares = forward_plan(batch, critic.layout, critic.cut, run.plans)
        calls.append((("critic",), critic.group.call("compute_values", table, run.put(shares))))
    answers = [answer for names, refs in calls for answer in _by_role(names, run.wait(refs))]
    for _, results in answers:
        batch = merge_columns(batch, results, run.blocks)
    require_finite(batch, COMPUTED, answers)
    return batch


def _by_role(names: Sequence[str], results: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """What each rank has answered for each of the roles that a call was for: with several it gives a tuple, or None."""
    if len(names) == 1:
        yield names[0], results
        return
    for number, name in enumerate(names):
        yield name, [None if answer is None else answer[number] for answer in results]


def throughput(batch: pa.Table, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens a second of the phases that go through all tokens of a batch."""
    tokens = int(sequence_lengths(batch).sum())
    phases = ("evaluate_models", "update")
    rates = {f"perf/{phase}_tokens_per_s": tokens / seconds[phase] for phase in phases if phase in seconds}
    return {"perf/tokens": float(tokens), **rates}
