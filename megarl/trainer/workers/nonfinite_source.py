"""The trajectory and the rank that make a gradient non-finite; searched for only after an update has failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import torch

from megarl.megatron.build import runnable
from megarl.megatron.packing import PackedBatch
from megarl.megatron.sequences import sequence_ids
from megarl.megatron.step import Head, Loss, StepResult, forward_only

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

_NUM_NAMED = 3  # trajectories of a micro-batch

Names = Callable[[], Sequence[Sequence[str]]]


def trajectory_names(table: pa.Table, share: Sequence[Sequence[int]]) -> Sequence[Sequence[str]]:
    """The uids of a share's trajectories, by micro-batch."""
    uids = table["uid"].to_pylist()
    return [[uids[row] for row in rows] for rows in share]


def check_update(result: StepResult, least_scale: float, why: Callable[[], str]) -> None:
    """Check that an update was made, or skipped at a loss scale that can still be lowered.

    Args:
        least_scale: optim.min_loss_scale.
        why: gives the trajectory and rank that make the gradient non-finite, as text.

    Raises:
        FloatingPointError: the update was not made, and lowering the loss scale cannot help.
    """
    if result.ok:
        return
    if result.loss_scale is None:
        raise FloatingPointError(
            f"the gradient's norm is {result.grad_norm}; the update was not made: {why()}"
        )
    if result.loss_scale <= least_scale:
        raise FloatingPointError(
            f"the gradient is not finite even at the least loss scale, optim.min_loss_scale={least_scale:g}: float16 cannot "
            "hold it; train with megatron.dtype bfloat16 or float32"
        )


def find_source(
    chunks: Sequence[DistributedDataParallel],
    batches: Sequence[PackedBatch],
    head: Head,
    loss: Loss,
    names: Names | None,
) -> str:
    """Run the micro-batches forward again; returns text that names the first output or loss that is not finite.

    Called on all ranks of a model at once; every rank gets the same text.

    Args:
        names: gives the names of the sequences of each micro-batch; None: they have none.
    """
    outputs = forward_only(runnable(chunks), batches, head)
    own = None
    if outputs[0] is not None:
        own = _first(batches, outputs, loss, names() if names is not None else ())
    found: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    told = [f"{text}, on rank {rank}" for rank, text in enumerate(found) if text is not None]
    return told[0] if told else "outputs and loss are finite, so it is the backward pass"


@torch.no_grad()
def _first(
    batches: Sequence[PackedBatch],
    outputs: Sequence[torch.Tensor | None],
    loss: Loss,
    names: Sequence[Sequence[str]],
) -> str | None:
    """The first of this rank's micro-batches whose outputs or loss are not finite, as text; None: all are finite."""
    told = []
    for number, (batch, output) in enumerate(zip(batches, outputs, strict=True)):
        assert output is not None
        # For every micro-batch: the loss may have a collective over context parallel ranks.
        total, _ = loss(output, batch)
        texts = names[number] if number < len(names) else ()
        wrong = batch.mask & ~torch.isfinite(output.view(batch.num_tokens, -1)).all(-1)
        if bool(wrong.any()):
            text = int(sequence_ids(batch)[wrong][0])
            told.append(f"the model's outputs for {_named(number, texts[text : text + 1])}")
        elif not bool(torch.isfinite(total)):
            told.append(f"the loss of {_named(number, texts)}")
    return told[0] if told else None


def _named(number: int, texts: Sequence[str]) -> str:
    if not texts:
        return f"micro-batch {number}"
    more = ", ..." if len(texts) > _NUM_NAMED else ""
    return f"trajectory {', '.join(texts[:_NUM_NAMED])}{more} (micro-batch {number})"
