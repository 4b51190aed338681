"""PPO-ptx (InstructGPT, arXiv:2203.02155): an auxiliary language-model loss in the policy's updates.

The examples of a mini-batch are further micro-batches of its one pass through the pipeline, with a head and a loss of their
own: gradients of both kinds are summed before they are reduced and the optimizer takes its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from megarl.algorithms.policy_loss import ptx_loss
from megarl.config import TrainConfig
from megarl.data.loader import TableLoader
from megarl.data.sft import SftDataset, trained_tokens
from megarl.data.trajectories import list_lengths
from megarl.layout.grid import ParallelLayout
from megarl.trainer.workers.dispatch import MicroBatching, Plan, plan_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.megatron.packing import PackedBatch
    from megarl.megatron.step import Head, Loss
    from megarl.trainer.workers.model import ModelWorker

WEIGHTS = "ptx_weights"  # a field of the micro-batches of this loss, which tells them from trajectories


@dataclass(frozen=True)
class PtxUpdate:
    """The auxiliary language-model loss of a step's updates.

    Attributes:
        plan: rows of the table of examples, by mini-batch, by data parallel rank, by micro-batch.
        counts: the number of trained tokens of each mini-batch's examples.
        coef: factor of their mean negative log-likelihood.
    """

    plan: Plan
    counts: list[int]
    coef: float


def load_ptx(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> TableLoader | None:
    """The loader of data.ptx, whose position can be resumed; None: the run has no auxiliary loss.

    Raises:
        ValueError: names the file or row that is wrong.
    """
    data, texts = config.data, config.data.ptx
    if texts is None:
        return None
    examples = SftDataset(
        texts.files,
        tokenizer,
        max_length=texts.max_length,
        prompt_key=texts.prompt_key,
        response_key=texts.response_key,
        text_key=texts.text_key,
        truncation=texts.truncation,
        chat_template_kwargs=data.apply_chat_template_kwargs,
        tools_key=data.tools_key,
        section="data.ptx",
    )
    return TableLoader(examples, texts.batch_size, shuffle=True, seed=data.seed)


def plan_ptx(
    batches: Sequence[pa.Table], layout: ParallelLayout, batching: MicroBatching, coef: float
) -> tuple[pa.Table, PtxUpdate]:
    """The examples of a step's mini-batches, one table of `SFT_SCHEMA` each, as one table and the rows of each rank."""
    plan: Plan = []
    counts, start = [], 0
    for batch in batches:
        lengths = list_lengths(batch, "input_ids")
        shares = plan_rows(
            lengths, layout, batching.max_tokens, batching.micro_batch_size, batching.pair_share
        )
        plan.append([[[start + row for row in micro] for micro in share] for share in shares])
        counts.append(trained_tokens(batch))
        start += batch.num_rows
    return pa.concat_tables(batches), PtxUpdate(plan, counts, coef)


def pack_ptx(worker: ModelWorker, examples: pa.Table, how: PtxUpdate, number: int) -> list[PackedBatch]:
    """This rank's micro-batches of the examples of mini-batch `number`, each token with its weight in the loss."""
    weight = how.coef / max(how.counts[number], 1)
    return [
        replace(batch, fields={WEIGHTS: batch.mask.float() * weight})
        for batch in worker.pack_examples(examples, how.plan[number][worker.coords.dp], learnt=True)
    ]


def with_ptx(head: Head, loss: Loss, text_head: Head) -> tuple[Head, Loss]:
    """A head and a loss that apply the given ones to trajectories, and the auxiliary ones to micro-batches of examples.

    Args:
        text_head: log-probs of examples [tokens, 1 or 2], at temperature 1.
    """

    def either_head(*, context: tuple[PackedBatch, Any], **given: Any) -> torch.Tensor:
        chosen = text_head if WEIGHTS in context[0].fields else head
        return chosen(context=context, **given)

    def either_loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if WEIGHTS in batch.fields:
            return ptx_loss(output[:, 0], batch.fields[WEIGHTS], batch.mask)
        return loss(output, batch)

    return either_head, either_loss
