"""The ranks of direct preference optimization."""

from __future__ import annotations

import pyarrow as pa
import torch
import torch.distributed as dist

from megarl.algorithms.preference import dpo_loss, dpo_metrics
from megarl.config import DPOLossConfig
from megarl.data.preferences import chats_of, ranking_lengths
from megarl.megatron.packing import PackedBatch
from megarl.megatron.parallel import context_parallel_group
from megarl.megatron.sequences import sequence_ids, sum_over_ranks
from megarl.trainer.workers.model import ModelWorker, RowColumns, Share
from megarl.trainer.workers.rankings import compared_chats


class DPOWorker(ModelWorker):
    """A rank of the policy."""

    def token_log_probs(self, table: pa.Table, shares: list[Share]) -> RowColumns | None:
        """The policy's log-probs of each chat's tokens but the first as column `log_probs`; 0 on those that are not learnt."""
        share = shares[self.coords.dp]
        return self.forward_columns(
            self.chunks, self.pack_examples(table, share), share, self.lm_head(), ["log_probs"]
        )

    def train_preferences(self, table: pa.Table, shares: list[Share], how: DPOLossConfig) -> dict[str, float]:
        """One optimizer step on the loss of all rankings of the table.

        Args:
            table: `PREFERENCE_CHAT_SCHEMA`, and `ref_log_probs`: of each chat its reference's log-prob.
            shares: rows of the table; the chats of a ranking are in one micro-batch.
        """
        share = shares[self.coords.dp]
        chats = [chats_of(table, rows) for rows in share]
        batches = [self.pack_examples(micro, [list(range(micro.num_rows))])[0] for micro in chats]
        # Micro-batches come to the loss as the schedule has them; each is known by its object.
        compared = {batch: compared_chats(table, rows) for batch, rows in zip(batches, share, strict=True)}
        cp = self.layout.cp
        group = context_parallel_group() if cp > 1 else None

        def loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            pairs, reference = compared[batch]
            log_ratios = chat_log_probs(output[:, 0], batch, group) - reference.to(output.device)
            total, sums = dpo_loss(
                log_ratios,
                pairs.to(output.device),
                table.num_rows,
                how.beta,
                how.label_smoothing,
                how.loss_type,
            )
            # Every context parallel rank has all of it, and the sum over them is what counts.
            return total / cp, {name: value / cp for name, value in sums.items()}

        result = self.train(batches, self.lm_head(), loss)
        metrics = {**dpo_metrics(result.stats, table.num_rows), **result.numbers()}
        return {
            **{f"train/{name}": value for name, value in metrics.items()},
            "perf/tokens": float(ranking_lengths(table).sum()),
        }


def chat_log_probs(
    log_probs: torch.Tensor, batch: PackedBatch, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The log-prob of what is learnt of each chat, on every context parallel rank: [chats].

    Args:
        log_probs: [tokens] of this rank.
        group: the context parallel group; None: there is one rank.
    """
    learnt = torch.where(batch.mask, log_probs, 0.0)
    sums = learnt.new_zeros(len(batch.lengths)).index_add(0, sequence_ids(batch), learnt)
    return sums if group is None else sum_over_ranks(sums, group)
