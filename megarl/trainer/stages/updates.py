"""The trained models' part of a step: log-probs and values, then the optimizer steps of the critic and the actor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from megarl.algorithms.aggregate import LossAggregation
from megarl.algorithms.kl import FULL_KL, TOP_K
from megarl.algorithms.metrics import add_sums, first_difference, reduce_metrics
from megarl.algorithms.policy_loss import ClipCov, KLCov, PolicyLossOptions
from megarl.cluster import WorkerGroup
from megarl.config import (
    ActorConfig,
    TrainConfig,
    full_kl_in_reward,
    is_single_update,
    needs_old_log_probs,
    needs_ref_log_probs,
    top_k_in_loss,
)
from megarl.config.resolve import TEACHER
from megarl.data.routing import ROUTED_EXPERTS
from megarl.data.trajectories import (
    REF_PROMPT_IDS,
    REF_TOP_TOKENS,
    append_column,
    ragged,
    replace_column,
    sequence_lengths,
    take,
)
from megarl.data.trajectories import TEACHER as TEACHER_COLUMN
from megarl.trainer.roles.device_memory import gpu_turns
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.run import Run
from megarl.trainer.stages.advantages import Controls
from megarl.trainer.stages.judging import Judging
from megarl.trainer.stages.nonfinite import COMPUTED, require_finite
from megarl.trainer.workers.dispatch import (
    EXPERT_VIOLATION,
    LEARNT,
    READ,
    ROUTER_Z_LOSS,
    PolicyUpdate,
    columns_of,
    first_pass_plan,
    forward_plan,
    merge_columns,
    packing_metrics,
    rows_to_share,
    update_plan,
)
from megarl.trainer.workers.ptx import plan_ptx


def evaluate_models(run: Run, roles: Roles, batch: pa.Table, config: TrainConfig, seed: int) -> pa.Table:
    """Append `old_log_probs`, `ref_log_probs`, `full_kl` and `values`, as far as the algorithm uses them.

    All roles compute at once, but roles that share GPUs take turns. With `algorithm.rollout_correction.bypass_mode` the old log-probs
    are the engine's; where a step is a single update, the update computes them (`is_single_update`).

    Args:
        seed: of the step's `update`.

    Raises:
        NotFinite: a computed number is not finite.
    """
    table = run.put(columns_of(batch, READ))
    actor, ref, critic = roles.actor, roles.ref, roles.critic
    calls: Calls = []
    wants_ref = ref is not None and needs_ref_log_probs(config)
    asked, read = reference_batch(batch), table
    if asked is not batch:
        read = run.put(columns_of(asked, READ))
    # One call where one group does both: each costs the controller time for every rank.
    shared = wants_ref and ref.group is actor.group and asked is batch
    top = top_k_in_loss(config)
    both = shared and needs_old_log_probs(config) and not top
    if needs_old_log_probs(config):
        plan, _ = update_plan(batch, actor.layout, actor.batching, seed, run.plans)
        shares = run.put(first_pass_plan(plan, actor.batching.epochs))
        if both:
            of_ref = run.put(forward_plan(batch, ref.layout, ref.batching, run.plans))
            calls.append((("actor", "ref"), actor.group, ("compute_both_log_probs", table, shares, of_ref)))
        else:
            method = "compute_full_kl" if full_kl_in_reward(config) else "compute_log_probs"
            calls.append((("actor",), actor.group, (method, table, shares, "old_log_probs")))
    elif not is_single_update(config):
        batch = append_column(batch, "old_log_probs", ragged(batch, "rollout_log_probs"))
    if wants_ref and not both:
        plans = run.plans if asked is batch else None
        shares = run.put(forward_plan(asked, ref.layout, ref.batching, plans))
        if top:
            how = ("compute_ref_top_tokens", read, shares, config.actor_rollout_ref.actor.kl_loss_top_k)
        else:
            method = "compute_ref_log_probs" if ref.group is actor.group else "compute_log_probs"
            how = (method, read, shares, "ref_log_probs")
        calls.append((("ref",), ref.group, how))
    judged_rows = _judged_rows(roles, asked) if needs_ref_log_probs(config) else {}
    calls += _teacher_calls(run, roles.teachers, asked, read, config, judged_rows)
    # Engines have devices of their own, and work all the time that the others do.
    count = config.actor_rollout_ref.actor.kl_loss_top_k if top else 0
    engines = {role: judge for role, judge in roles.judges.items() if role in judged_rows}
    judging = Judging(run, engines, asked, read, judged_rows, count)
    if critic is not None:
        shares = run.put(forward_plan(batch, critic.layout, critic.batching, run.plans))
        calls.append((("critic",), critic.group, ("compute_values", table, shares)))
    answers = []
    for turn in gpu_turns([group for _, group, _ in calls]):
        # The calls of a turn are made before any is waited for, so that they run at once.
        begun = [(names, group.call(*call)) for names, group, call in (calls[number] for number in turn)]
        answers += [answer for names, refs in begun for answer in _by_role(names, run.wait(refs))]
    answers += judging.results().items()
    judged = [(name, results) for name, results in answers if name.startswith(TEACHER)]
    if judged:  # each teacher has its own rows
        batch = merge_columns(batch, [part for _, results in judged for part in results], run.blocks)
    for name, results in answers:
        if not name.startswith(TEACHER):
            batch = merge_columns(batch, results, run.blocks)
    require_finite(batch, COMPUTED, answers)
    return batch


_LENGTHS = ["prompt_ids", "response_ids"]  # columns that plans are made of
Calls = list[tuple[tuple[str, ...], WorkerGroup, tuple[Any, ...]]]  # roles, group, method and arguments


def _judged_rows(roles: Roles, asked: pa.Table) -> dict[str, np.ndarray]:
    """By role, the rows that each of several teachers judges, or a reference that engines serve.

    Raises:
        ValueError: the trajectories do not name their teachers, or name an unknown one.
    """
    if "ref" in roles.judges:
        return {"ref": np.arange(asked.num_rows)}
    known = [*roles.teachers, *(role.removeprefix(TEACHER) for role in roles.judges)]
    if not known:
        return {}
    if TEACHER_COLUMN not in asked.column_names:
        raise ValueError(
            f"actor_rollout_ref.teachers: the trajectories have no column {TEACHER_COLUMN!r}, so that nothing says who judges them; give prompts as rows "
            "with their data source"
        )
    names = np.array(asked[TEACHER_COLUMN].to_pylist())
    unknown = sorted(set(names.tolist()) - {*known})
    if unknown:
        raise ValueError(
            f"actor_rollout_ref.teachers has {', '.join(known)}, and trajectories are to be judged by {unknown[0]!r}"
        )
    return {f"{TEACHER}{name}": np.flatnonzero(names == name) for name in known}


def _teacher_calls(
    run: Run,
    teachers: Mapping[str, Role],
    asked: pa.Table,
    read: ray.ObjectRef,
    config: TrainConfig,
    judged: Mapping[str, np.ndarray],
) -> Calls:
    """The calls by which several teachers judge the trajectories of their rows, however many each has.

    Args:
        asked: the trajectories as references read them, which `read` refers to.
        judged: the rows of each teacher, by its role; empty: none is judged.
    """
    top, calls = top_k_in_loss(config), []
    for name, teacher in teachers.items():
        rows = judged.get(f"{TEACHER}{name}", ())
        if not len(rows):
            continue
        # Ranks share rows evenly: the first rows are repeated until that is possible, and computed again.
        filled = np.resize(rows, rows_to_share(len(rows), teacher.layout))
        shares = forward_plan(take(asked.select(_LENGTHS), filled), teacher.layout, teacher.batching)
        numbered = [[[int(filled[row]) for row in micro] for micro in share] for share in shares]
        method = "compute_ref_top_tokens" if top else "compute_log_probs"
        last = config.actor_rollout_ref.actor.kl_loss_top_k if top else "ref_log_probs"
        how = (method, read, run.put(numbered), last)
        calls.append(((f"{TEACHER}{name}",), teacher.group, how))
    return calls


def reference_batch(batch: pa.Table) -> pa.Table:
    """The trajectories as the reference reads them: after prompts of its own where there are any (`data.ref_prompt_key`)."""
    if REF_PROMPT_IDS not in batch.column_names:
        return batch
    # The engine's routing is of the policy's prompts; a reference's routers choose themselves in any case.
    kept = batch.drop_columns([name for name in (ROUTED_EXPERTS,) if name in batch.column_names])
    return replace_column(kept, "prompt_ids", batch[REF_PROMPT_IDS].combine_chunks())


def _by_role(names: Sequence[str], results: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """The results of a call for each of its roles: a rank of several roles returns a tuple, or None."""
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


def update(
    run: Run,
    roles: Roles,
    batch: pa.Table,
    config: TrainConfig,
    controls: Controls,
    step: int,
    seed: int,
    ptx_batches: Iterator[pa.Table] | None = None,
) -> dict[str, float]:
    """The critic's and the actor's updates; the actor is not trained during the critic's warm-up.

    Both run at once, unless they make room for each other on the same devices or share GPUs. Adapts the coefficient of the KL loss.

    Args:
        ptx_batches: batches of data.ptx, one for each mini-batch of the actor; None: there is no auxiliary loss.
    """
    actor = config.actor_rollout_ref.actor
    table, how, metrics = run.put(learning_columns(batch, actor)), policy_update(actor, controls, seed), {}

    def start(name: str, role: Role) -> tuple[list[ray.ObjectRef], dict[str, float]]:
        """Call the update of "critic" or "actor"; also returns metrics of its plan."""
        plan, counts = update_plan(batch, role.layout, role.batching, seed, run.plans)
        packing = packing_metrics(name, plan, batch, role.layout, role.batching)
        # Arguments that are not in the object store are pickled for each rank: 0.7 s for a thousand ranks.
        shared = (table, run.put(plan), run.put(counts))
        if name == "critic":
            own = (run.put(how.aggregation), config.critic.cliprange_value, config.critic.vf_coef)
            return role.group.call("update_values", *shared, *own), packing
        if ptx_batches is None:
            return role.group.call("update_policy", *shared, run.put(how)), packing
        examples = list(itertools.islice(ptx_batches, len(plan)))
        joined, ptx = plan_ptx(examples, role.layout, role.batching, actor.ptx_coef)
        own = (run.put(how), run.put(joined), run.put(ptx))
        return role.group.call("update_policy", *shared, *own), packing

    trained = {"critic": roles.critic} if roles.critic is not None else {}
    if roles.critic is None or step > config.critic.warmup_steps:
        trained["actor"] = roles.actor
    for phase, names in roles.memory.turns([*trained]):
        with roles.memory.held(phase):
            calls = {name: start(name, trained[name]) for name in names}
            for name, (refs, packing) in calls.items():
                metrics |= packing
                steps = run.wait(refs)[0]
                metrics |= _update_metrics(name, steps)
                if name == "actor" and steps and config.algorithm.rollout_correction.bypass_mode:
                    metrics |= first_difference(steps[0])
    if actor.use_kl_loss:
        metrics["actor/kl_loss_coef"] = controls.kl_loss.coef
        controls.kl_loss.update(metrics.get("actor/kl_loss", 0.0), batch.num_rows)
    return metrics


def learning_columns(batch: pa.Table, actor: ActorConfig) -> pa.Table:
    """The columns of trajectories that the updates use."""
    names = LEARNT
    if "old_log_probs" not in batch.column_names:  # the update compares its own with the engine's
        names = (*names, "rollout_log_probs")
    if actor.use_kl_loss and actor.kl_loss_type != FULL_KL:
        names = (*names, REF_TOP_TOKENS if actor.kl_loss_type == TOP_K else "ref_log_probs")
    return columns_of(batch, names)


def _update_metrics(name: str, steps: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of the updates of "critic" or "actor"; `steps` has an entry for each update."""
    if not steps:  # no mini-batch had a live token
        return {f"{name}/updates": 0.0}
    own = ("grad_norm", "lr", "loss_scale", "skipped", "stopped_early")
    difference = {key: value for key, value in steps[0].items() if key.startswith("training/")}
    violations = [key for key in steps[0] if key.startswith(EXPERT_VIOLATION)]
    own = (*own, *difference, *violations, ROUTER_Z_LOSS)
    sums = add_sums([{key: value for key, value in step.items() if key not in own} for step in steps])
    metrics = reduce_metrics(sums, num_updates=len(steps)) | difference
    metrics |= {f"{name}/lr": steps[-1]["lr"], f"{name}/updates": float(len(steps))}
    taken = [step["grad_norm"] for step in steps if not step.get("skipped")]
    if taken:
        metrics[f"{name}/grad_norm"] = float(np.mean(taken))
    if "loss_scale" in steps[-1]:  # float16
        metrics[f"{name}/loss_scale"] = steps[-1]["loss_scale"]
        metrics[f"{name}/skipped_steps"] = float(len(steps) - len(taken))
    means = {key: float(np.mean([step[key] for step in steps])) for key in violations}
    if means:
        metrics |= {f"{name}/{key}": value for key, value in means.items()}
        metrics[f"{name}/expert_violation_max"] = max(means.values())
        metrics[f"{name}/expert_violation_mean"] = float(np.mean(list(means.values())))
    if ROUTER_Z_LOSS in steps[0]:
        metrics[f"{name}/{ROUTER_Z_LOSS}"] = float(np.mean([step[ROUTER_Z_LOSS] for step in steps]))
    if "stopped_early" in steps[-1]:
        metrics[f"{name}/stopped_early"] = steps[-1]["stopped_early"]
    return metrics


def policy_update(actor: ActorConfig, controls: Controls, seed: int) -> PolicyUpdate:
    """The options of the actor's updates in a step; `actor` is resolved."""
    loss = actor.policy_loss
    select: ClipCov | KLCov | None = None
    if loss.loss_mode == "clip_cov":
        select = ClipCov(loss.clip_cov_ratio, loss.clip_cov_lb, loss.clip_cov_ub)
    elif loss.loss_mode == "kl_cov":
        select = KLCov(loss.kl_cov_ratio)
    options = PolicyLossOptions(
        clip_low=controls.clip_low,
        clip_high=controls.clip_high,
        clip_c=actor.clip_ratio_c,
        entropy_coef=actor.entropy_coeff,
        kl_coef=controls.kl_loss.coef if actor.use_kl_loss else 0.0,
        kl_kind=actor.kl_loss_type if actor.use_kl_loss else None,
        kl_beta=actor.kl_loss_beta,
        pg_coef=actor.pg_loss_coef,
        loss_mode=loss.loss_mode,
        tau_pos=actor.tau_pos,
        tau_neg=actor.tau_neg,
        ppo_kl_coef=loss.ppo_kl_coef,
    )
    aggregation = LossAggregation(actor.loss_agg_mode, actor.loss_scale_factor)
    of_routers = actor.expert_bias_update_rate, actor.router_z_loss_coef
    return PolicyUpdate(aggregation, options, select, actor.target_kl, seed, *of_routers)
