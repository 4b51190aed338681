"""The ranks of supervised training: fine-tuning, training of a reward model, direct preference optimization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from megarl.algorithms.metrics import layer_metrics
from megarl.algorithms.preference import (
    DPOOptions,
    KTOOptions,
    Pairs,
    dpo_loss,
    kto_loss,
    labelled_metrics,
    preference_loss,
    ranking_metrics,
)
from megarl.cluster.ranks import RankInfo
from megarl.config import DPOLossConfig
from megarl.data.preferences import ranking_lengths, texts_of
from megarl.data.trajectories import list_lengths
from megarl.megatron.build import runnable
from megarl.megatron.heads.outputs import value_head
from megarl.megatron.packing import PackedBatch
from megarl.megatron.sequences import sequence_ids, sum_over_ranks, text_values
from megarl.megatron.step import Head, StepResult, forward_only
from megarl.models.table import VALUE_HEAD
from megarl.models.weight_files import stored_tensors
from megarl.trainer.workers.dispatch import ModelSpec, RowColumns, compared_chats, compared_texts, labels
from megarl.trainer.workers.model import ModelWorker, Share
from megarl.trainer.workers.scalar_heads import RewardModelWorker

LossAndSums = tuple[torch.Tensor, dict[str, torch.Tensor]]


class SFTWorker(ModelWorker):
    """A rank of the model that is fine-tuned."""

    def train_examples(self, table: pa.Table, shares: list[Share], num_learnt: int) -> dict[str, float]:
        """One optimizer step on the negative log-likelihood, a mean over the `num_learnt` tokens of all ranks."""

        def loss(output: torch.Tensor, batch: PackedBatch) -> LossAndSums:
            total = -torch.where(batch.mask, output[:, 0], 0.0).sum()
            return total / num_learnt, {"loss": total.double(), "tokens": batch.mask.sum().double()}

        share = shares[self.coords.dp]
        batches = self.pack_examples(table, share, learnt=True)
        result = self.train(batches, self.lm_head(), loss, learnt=num_learnt)
        assert result.stats["tokens"] == num_learnt, (result.stats, num_learnt)
        return {
            "train/loss": result.stats["loss"] / num_learnt,
            **layer_metrics(result.stats),
            **{f"train/{name}": value for name, value in result.numbers().items()},
            "perf/tokens": float(sum(len(ids) for ids in table["input_ids"])),
        }

    def sum_losses(self, table: pa.Table, shares: list[Share]) -> float | None:
        """The summed negative log-likelihood of this data parallel rank's examples; None on all but one rank."""
        batches = self.pack_examples(table, shares[self.coords.dp])
        outputs = forward_only(runnable(self.chunks), batches, self.lm_head())
        if self.coords.pp != self.layout.pp - 1:
            return None
        total = torch.stack(
            [-output[:, 0][batch.mask].sum() for output, batch in zip(outputs, batches, strict=True)]
        )
        total = total.double().sum()
        if self.context_group is not None:
            torch.distributed.all_reduce(total, group=self.context_group)
        return None if self.coords.tp or self.coords.cp else float(total)


class RMWorker(RewardModelWorker):
    """A rank of the reward model.

    `head_init`: "zeros" or "normal"; the first weights of a head that the model's folder does not have.
    """

    def __init__(self, info: RankInfo, spec: ModelSpec, head_init: str) -> None:
        self.head_init = head_init
        super().__init__(info, spec)

    def load(self, path: str, head: str, *, trainable: bool) -> list[torch.nn.Module]:
        chunks = super().load(path, head, trainable=trainable)
        new = VALUE_HEAD not in stored_tensors(path)
        if new and self.head_init == "zeros" and hasattr(chunks[-1], "value_head"):
            chunks[-1].value_head.weight.data.zero_()
        return chunks

    def train_rankings(self, table: pa.Table, shares: list[Share]) -> dict[str, float]:
        """One optimizer step on the loss of all rankings of the table (`PREFERENCE_SCHEMA`).

        Args:
            shares: rows of the table; the texts of a ranking are in one micro-batch.
        """

        def loss(
            output: torch.Tensor, batch: PackedBatch, pairs: Pairs, margins: torch.Tensor
        ) -> LossAndSums:
            rewards = text_values(output, batch, self.context_group)
            return preference_loss(rewards, pairs, margins, table.num_rows)

        side = (texts_of, self.pack_texts, compared_texts)
        result = _train_compared(self, table, shares, side, value_head, loss)
        return _metrics(ranking_metrics(result.stats, table.num_rows), result, ranking_lengths(table).sum())


class DPOWorker(ModelWorker):
    """A rank of the policy."""

    def token_log_probs(self, table: pa.Table, shares: list[Share]) -> RowColumns | None:
        """The policy's log-probs of each chat's tokens but the first as column `log_probs`; 0 on tokens that are not trained on."""
        return self.compute_columns(table, shares, self.pack_examples, self.lm_head(), ["log_probs"])

    def train_preferences(self, table: pa.Table, shares: list[Share], how: DPOLossConfig) -> dict[str, float]:
        """One optimizer step on the loss of all rankings of the table.

        Args:
            table: `PREFERENCE_CHAT_SCHEMA`, and `ref_log_probs`: the reference's log-prob of each chat.
            shares: rows of the table; the chats of a ranking are in one micro-batch.
        """
        options = DPOOptions(how.beta, how.label_smoothing, how.loss_type, how.gamma)

        def loss(
            output: torch.Tensor, batch: PackedBatch, pairs: Pairs, reference: torch.Tensor
        ) -> LossAndSums:
            log_ratios = chat_sums(output[:, 0], batch, self.context_group) - reference
            lengths = chat_sums(torch.ones_like(output[:, 0]), batch, self.context_group)
            return dpo_loss(log_ratios, lengths, pairs, table.num_rows, options)

        side = (texts_of, self.pack_examples, compared_chats)
        result = _train_compared(self, table, shares, side, self.lm_head(), loss)
        return _metrics(ranking_metrics(result.stats, table.num_rows), result, ranking_lengths(table).sum())

    def train_labelled(
        self, table: pa.Table, shares: list[Share], how: DPOLossConfig, baseline: float
    ) -> dict[str, float]:
        """One optimizer step on KTO's loss of all examples of the table.

        Args:
            table: `LABELLED_SCHEMA`, and `ref_log_prob`: the reference's log-prob of each chat.
            shares: rows of the table.
            baseline: of the batch (`kto_baseline`).
        """
        options = KTOOptions(how.beta, how.desirable_weight, how.undesirable_weight)

        def loss(
            output: torch.Tensor, batch: PackedBatch, desirable: torch.Tensor, reference: torch.Tensor
        ) -> LossAndSums:
            log_ratios = chat_sums(output[:, 0], batch, self.context_group) - reference
            return kto_loss(log_ratios, desirable, baseline, table.num_rows, options)

        side = (lambda examples: examples, self.pack_examples, labels)
        result = _train_compared(self, table, shares, side, self.lm_head(), loss)
        metrics = labelled_metrics(result.stats, table.num_rows, baseline)
        return _metrics(metrics, result, list_lengths(table, "input_ids").sum())


def _train_compared(
    worker: ModelWorker,
    table: pa.Table,
    shares: list[Share],
    side: tuple[Callable, Callable, Callable],
    head: Head,
    loss_of: Callable[[torch.Tensor, PackedBatch, Any, torch.Tensor], LossAndSums],
) -> StepResult:
    """One optimizer step on a loss of whole sequences, such as one that compares the sequences of each ranking.

    Args:
        side: three functions of rows of the table: their sequences; the packing of these; the pairs (or labels) and the numbers that the
            loss compares.
        loss_of: the loss and its sums, of a micro-batch's outputs, pairs (or labels) and numbers.
    """
    share = shares[worker.coords.dp]
    sequences_of, pack, compared_of = side
    parts = [table.take(pa.array(rows, pa.int64())) for rows in share]
    sequences = [sequences_of(part) for part in parts]
    batches = [pack(texts, [list(range(texts.num_rows))])[0] for texts in sequences]
    # The schedule decides the order of micro-batches; the loss finds the pairs of each by its object.
    compared = {batch: compared_of(part) for batch, part in zip(batches, parts, strict=True)}
    cp = worker.layout.cp

    def loss(output: torch.Tensor, batch: PackedBatch) -> LossAndSums:
        pairs, numbers = compared[batch]
        total, sums = loss_of(output, batch, pairs.to(output.device), numbers.to(output.device))
        # Every context parallel rank computes the full loss, and their gradients are summed.
        return total / cp, {name: value / cp for name, value in sums.items()}

    return worker.train(batches, head, loss)


def _metrics(means: dict[str, float], result: StepResult, num_tokens: int) -> dict[str, float]:
    """A step's metrics; `means`: of its loss."""
    found = {**means, **result.numbers()}
    return {
        **{f"train/{name}": value for name, value in found.items()},
        "perf/tokens": float(num_tokens),
    }


def chat_sums(values: torch.Tensor, batch: PackedBatch, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum over the trained tokens of each chat, on every context parallel rank: [chats], rounded once, to the values' dtype.

    The log-ratio of a policy that is still the reference is then 0: added up in float32, 32k tokens would be a tenth of a nat off.

    Args:
        values: [tokens] of this rank.
        group: the context parallel group; None: there is one rank.
    """
    learnt = torch.where(batch.mask, values, 0.0).double()
    sums = learnt.new_zeros(len(batch.lengths)).index_add(0, sequence_ids(batch), learnt)
    return (sums if group is None else sum_over_ranks(sums, group)).to(values.dtype)
