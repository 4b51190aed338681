"""From scores and log-probs to the advantages of a step."""

from __future__ import annotations

import pyarrow as pa
import torch

from megarl.algorithms.advantages import AdvantageBatch, AdvantageOptions, compute_advantages
from megarl.algorithms.kl import KLController, apply_kl_penalty, place_scores
from megarl.algorithms.metrics import batch_metrics, rollout_difference
from megarl.config import AlgorithmConfig
from megarl.data.trajectories import append_column, ragged


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
