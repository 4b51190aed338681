"""The actor's ranks on tokens drawn from a part of the vocabulary: log-probs, ratios and gradients equal those of Hugging Face's model."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from megarl.algorithms.aggregate import LossAggregation
from megarl.algorithms.policy_loss import PolicyLossOptions
from megarl.config import LoraConfig
from megarl.data.kept import KEPT_COUNTS, KEPT_IDS
from megarl.data.trajectories import from_lists, from_ragged
from megarl.trainer.workers.dispatch import PolicyUpdate, merge_columns
from tests.megatron.hf import VOCAB, make_table
from tests.ranks import RankPool
from tests.trainer.workers.test_actor import TEMPERATURE, models, plan_of  # noqa: F401
from tests.trainer.workers.test_teacher import SHARE, make

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
ENTROPY = 0.1


def kept_table() -> pa.Table:
    """Trajectories whose live tokens were each drawn from 1 to 9 kept tokens."""
    table, generator = make_table(), np.random.default_rng(4)
    ids, counts = [], []
    for response, mask in zip(
        table["response_ids"].to_pylist(), table["response_mask"].to_pylist(), strict=True
    ):
        sets = []
        for token, live in zip(response, mask, strict=True):
            others = np.setdiff1d(generator.permutation(VOCAB)[: generator.integers(0, 9)], [token])
            sets.append(generator.permutation([*others, token]) if live else [])
        counts.append([len(own) for own in sets])
        ids.append([token for own in sets for token in own])
    for name, lists in ((KEPT_IDS, ids), (KEPT_COUNTS, counts)):
        table = table.append_column(name, from_ragged(*from_lists(lists, np.int32)))
    return table


def plain_loop(policy, reference) -> tuple[list[torch.Tensor], list[torch.Tensor], float, float]:
    """With Hugging Face's models: log-probs of policy and reference (0 on masked tokens), the mean entropy, and the norm of the gradient of an
    on-policy update."""
    table = kept_table()
    total = sum(sum(mask) for mask in table["response_mask"].to_pylist())
    found, judged, entropies = [], [], 0.0
    policy.zero_grad()
    for row in table.to_pylist():
        ids, start = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["prompt_ids"]) - 1
        logits = policy(ids).logits[0, start:-1] / TEMPERATURE
        with torch.no_grad():
            other = reference(ids).logits[0, start:-1] / TEMPERATURE
        bounds, own, theirs = np.cumsum([0, *row[KEPT_COUNTS]]), [], []
        for at, (token, live) in enumerate(zip(row["response_ids"], row["response_mask"], strict=True)):
            if not live:
                own.append(torch.zeros(()))
                theirs.append(torch.zeros(()))
                continue
            kept = row[KEPT_IDS][bounds[at] : bounds[at + 1]]
            log_p, log_q = (one[at, kept].log_softmax(-1) for one in (logits, other))
            own.append(log_p[kept.index(token)])
            theirs.append(log_q[kept.index(token)])
            entropy = -(log_p.exp() * log_p).sum()
            entropies += entropy.item() / total
            # At a ratio of 1 PPO's surrogate has the same gradient as -A log p.
            loss = -row["advantages"][at] * own[-1] - ENTROPY * entropy
            (loss / total).backward(retain_graph=True)
        found.append(torch.stack(own).detach())
        judged.append(torch.stack(theirs))
    norm = torch.stack([parameter.grad.norm() for parameter in policy.parameters()]).norm().item()
    policy.zero_grad()
    return found, judged, entropies, norm


def _learn(rank: int, world: int, folders: list[str], megatron: dict[str, Any]) -> tuple:
    table, worker = kept_table(), make(rank, world, folders, megatron, LoraConfig())
    both: list[Any] = [None] * world
    dist.all_gather_object(both, worker.compute_both_log_probs(table, [SHARE], [SHARE]))
    for part in (0, 1):
        table = merge_columns(table, [None if found is None else found[part] for found in both])
    options = PolicyLossOptions(0.2, 0.2, None, entropy_coef=ENTROPY)
    how = PolicyUpdate(LossAggregation("token-mean"), options, None, None, seed=0)
    (step,) = worker.update_policy(table, *plan_of(SHARE), how)
    return table["old_log_probs"].to_pylist(), table["ref_log_probs"].to_pylist(), step


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_update_is_that_of_a_plain_loop(ranks: RankPool, models, name: str) -> None:  # noqa: F811
    found, judged, entropy, norm = plain_loop(*(model for _, model in models))
    folders = [folder for folder, _ in models]
    for old, ref, step in ranks.run(_learn, folders, LAYOUTS[name], world=2):
        for rows, wanted in ((old, found), (ref, judged)):
            for row, own in zip(rows, wanted, strict=True):
                np.testing.assert_allclose(row, own.numpy(), rtol=1e-4, atol=1e-5)
        assert step["actor/ratio"] == step["actor/tokens"] and step["actor/ppo_kl"] == 0.0
        assert step["actor/entropy"] / step["actor/tokens"] == pytest.approx(entropy, rel=1e-4)
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-3)
