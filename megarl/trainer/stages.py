"""The stages of a step, each a call that names what it does; where things run is decided below them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from megarl.algorithms.advantages import AdvantageBatch, AdvantageOptions, compute_advantages
from megarl.algorithms.kl import KLController, apply_kl_penalty, place_scores
from megarl.algorithms.metrics import add_sums, batch_metrics, reduce_metrics, rollout_difference
from megarl.algorithms.policy_loss import PolicyLossOptions
from megarl.config import AlgorithmConfig, TrainConfig
from megarl.data.trajectories import append_column, expand_prompts, list_lengths, ragged, sequence_lengths
from megarl.rewards.registry import RewardFunction
from megarl.rewards.scoring import score_trajectories
from megarl.rollout.engine import SamplingParams
from megarl.trainer.dispatch import (
    first_pass_plan,
    forward_plan,
    merge_columns,
    split_requests,
    update_plan,
)
from megarl.trainer.roles import Roles

if TYPE_CHECKING:
    import ray
    from transformers import PreTrainedTokenizerBase

    from megarl.cluster import WorkerGroup
    from megarl.trainer.run import Run


def generate(run: Run, engines: WorkerGroup, prompts: pa.Table, sampling: SamplingParams, n: int) -> pa.Table:
    """`n` trajectories for each prompt, in the prompts' order."""
    parts = split_requests(expand_prompts(prompts, n), engines.world_size)
    refs = engines.call_each("generate", [(part, sampling) for part in parts])
    return pa.concat_tables(run.wait(refs)).combine_chunks()


def score(
    batch: pa.Table, tokenizer: PreTrainedTokenizerBase, reward: RewardFunction | None
) -> tuple[pa.Table, dict[str, float]]:
    """Append `score`; other numbers that the reward function gave become metrics."""
    responses = tokenizer.batch_decode(batch["response_ids"].to_pylist(), skip_special_tokens=True)
    result = score_trajectories(
        uids=batch["uid"].to_pylist(),
        data_sources=batch["data_source"].to_pylist(),
        responses=responses,
        ground_truths=batch["ground_truth"].to_pylist(),
        extra_infos=batch["extra_info"].to_pylist(),
        custom=reward,
    )
    metrics = {f"reward/{name}": float(np.nanmean(values)) for name, values in result.metrics.items()}
    return append_column(batch, "score", np.asarray(result.scores)), metrics


def evaluate_models(run: Run, roles: Roles, batch: pa.Table, seed: int) -> pa.Table:
    """Append `old_log_probs`, `ref_log_probs` and `values`, as far as the algorithm uses them.

    All roles work on their part at once.

    Args:
        seed: that of the step's `update`.
    """
    table = run.put(batch)
    actor, ref, critic = roles.actor, roles.ref, roles.critic
    plan, _ = update_plan(batch, actor.layout, actor.cut, seed)
    calls = [
        actor.group.call("compute_log_probs", table, first_pass_plan(plan, actor.cut.epochs), "old_log_probs")
    ]
    if ref is not None:
        shares = forward_plan(batch, ref.layout, ref.cut)
        method = "compute_ref_log_probs" if ref.group is actor.group else "compute_log_probs"
        calls.append(ref.group.call(method, table, shares, "ref_log_probs"))
    if critic is not None:
        shares = forward_plan(batch, critic.layout, critic.cut)
        calls.append(critic.group.call("compute_values", table, shares))
    for refs in calls:
        batch = merge_columns(batch, run.wait(refs))
    return batch


def compute_batch_advantages(
    batch: pa.Table, algorithm: AlgorithmConfig, kl: KLController
) -> tuple[pa.Table, dict[str, float]]:
    """Append `token_level_rewards`, `advantages` and, with a critic, `returns`; adapts the KL coefficient."""
    column = {
        name: torch.tensor(ragged(batch, name)[0])
        for name in ("response_mask", "rollout_log_probs", "old_log_probs", "ref_log_probs", "values")
        if name in batch.column_names
    }
    offsets = torch.from_numpy(ragged(batch, "response_mask")[1])
    mask, scores = column["response_mask"], torch.tensor(batch["score"].to_numpy())
    metrics = rollout_difference(column["old_log_probs"], column["rollout_log_probs"], mask)
    if algorithm.use_kl_in_reward:
        rewards, mean_kl = apply_kl_penalty(
            scores,
            column["old_log_probs"],
            column["ref_log_probs"],
            mask,
            offsets,
            kl.coef,
            algorithm.kl_penalty,
        )
        metrics |= {"actor/ref_kl": mean_kl, "actor/kl_coef": kl.coef}
        kl.update(mean_kl, batch.num_rows)
    else:
        rewards = place_scores(scores, mask, offsets)
    result = compute_advantages(
        algorithm.adv_estimator,
        AdvantageBatch(rewards, mask, offsets, column.get("values"), batch["prompt_uid"].to_pylist()),
        AdvantageOptions(
            algorithm.gamma, algorithm.lam, algorithm.whiten_advantages, algorithm.norm_adv_by_std_in_grpo
        ),
    )
    truncated = torch.tensor([reason == "length" for reason in batch["finish_reason"].to_pylist()])
    metrics |= batch_metrics(
        scores, rewards, result.advantages, mask, offsets, truncated, result.returns, column.get("values")
    )
    new = {"token_level_rewards": rewards, "advantages": result.advantages, "returns": result.returns}
    for name, values in new.items():
        if values is not None:
            batch = append_column(batch, name, (values.numpy(), offsets.numpy()))
    return batch, metrics


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


def validate(
    run: Run,
    engines: WorkerGroup,
    prompts: pa.Table,
    sampling: SamplingParams,
    n: int,
    tokenizer: PreTrainedTokenizerBase,
    reward: RewardFunction | None,
    batch_size: int | None,
) -> tuple[pa.Table, dict[str, float]]:
    """Answer held-out prompts with the weights that the engines hold; the scored answers, mean scores as metrics."""
    size = batch_size or prompts.num_rows
    parts = [prompts.slice(start, size) for start in range(0, prompts.num_rows, size)]
    answers = pa.concat_tables([generate(run, engines, part, sampling, n) for part in parts])
    batch, extra = score(answers, tokenizer, reward)
    return batch, {f"val/{name}": value for name, value in {**mean_scores(batch), **extra}.items()}


def mean_scores(batch: pa.Table) -> dict[str, float]:
    """The mean score of all trajectories, and of each data source."""
    scores, sources = batch["score"].to_numpy(), np.asarray(batch["data_source"].to_pylist())
    by_source = {f"score/{name}": float(scores[sources == name].mean()) for name in sorted(set(sources))}
    return {"score/mean": float(scores.mean()), **by_source}


def throughput(batch: pa.Table, seconds: Mapping[str, float]) -> dict[str, float]:
    """Tokens a second of a step's phases: response tokens of generation, all tokens of the others."""
    generated = int(list_lengths(batch, "response_ids").sum())
    tokens = int(sequence_lengths(batch).sum())
    rates = {"generate": generated, "evaluate_models": tokens, "update": tokens}
    return {
        "perf/tokens": float(tokens),
        **{f"perf/{phase}_tokens_per_s": count / seconds[phase] for phase, count in rates.items()},
    }
