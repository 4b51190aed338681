"""Micro-batches through the pipeline: a forward pass alone, or forward, backward and one optimizer step.

Promises:
- Losses are sums: gradients are summed over micro-batches, data and context parallel ranks and divided by
  nothing, so how a batch is cut into micro-batches or spread over ranks changes none of them.
- Gradients are reduced once a step.
- Every rank returns the same `StepResult`, though losses exist on the last pipeline stage only.

Schedules are Megatron's: 1F1B, interleaved with virtual stages. All data-parallel ranks pass the same number
of micro-batches, a multiple of the pipeline stages with virtual stages; micro-batches may differ in tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl import platform
from megarl.megatron.build import gather_parameters, unwrap
from megarl.megatron.float8 import forget_float8_weights
from megarl.megatron.fsdp import release
from megarl.megatron.optimizer import loss_scale, optimizer_step, zero_gradients
from megarl.megatron.packing import PackedBatch

# GPTModel's `output_processor`, settings bound (`logprobs.lm_head(...)`, `value.value_head`): it turns the last
# stage's hidden states, of all positions or of the live ones (`PackedBatch.live_rows`), into outputs with one row a token of the batch.
Head = Callable[..., Tensor]

# (outputs, batch) -> (loss summed over this rank's tokens, sums to be reported).
Loss = Callable[[Tensor, PackedBatch], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on every rank.

    Attributes:
        grad_norm: of the full gradient, before clipping.
        lr: the learning rate of this step.
        stats: the losses' sums over micro-batches, data and context parallel ranks.
        ok: False if the step was left out because the gradient was not finite.
        loss_scale: factor of the loss in the backward pass (float16); None: there was none.
    """

    grad_norm: float
    lr: float
    stats: dict[str, float]
    ok: bool
    loss_scale: float | None = None

    def numbers(self) -> dict[str, float]:
        """Logged values other than losses: grad_norm, lr, and in float16 loss_scale and skipped (1 for a step that was left out, else 0)."""
        found = {"grad_norm": self.grad_norm, "lr": self.lr}
        if self.loss_scale is not None:
            found |= {"loss_scale": self.loss_scale, "skipped": float(not self.ok)}
        return found


@torch.no_grad()
def forward_only(
    chunks: Sequence[GPTModel | DistributedDataParallel], micro_batches: Sequence[PackedBatch], head: Head
) -> list[Tensor | None]:
    """The head's outputs for each micro-batch on the last pipeline stage; None for each on the others.

    Runs in evaluation mode and without gradients, whatever mode the chunks are in.
    """
    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        outputs = _run_schedule(chunks, micro_batches, head, loss=None)
    finally:
        forget_pass(chunks)
        release(chunks)
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
    return outputs or [None] * len(micro_batches)


def train_step(
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    micro_batches: Sequence[PackedBatch],
    head: Head,
    loss: Loss,
) -> StepResult:
    """Sum the gradients of `loss` over all micro-batches of all ranks, and take one optimizer step."""
    scale = loss_scale(optimizer)
    zero_gradients(chunks, optimizer)
    stats = _reduce_stats(_run_schedule(chunks, micro_batches, head, loss))
    forget_pass(chunks)
    grad_norm, ok, lr = optimizer_step(optimizer, scheduler)
    release(chunks)
    return StepResult(grad_norm=grad_norm, lr=lr, stats=stats, ok=ok, loss_scale=scale)


def with_predictions(loss: Loss, depth: int, weight: float, prefix: str) -> Loss:
    """A loss that adds the loss of MTP layers to another one; MTP layers' outputs are the last columns.

    The added loss is weight / depth times the sum of -log p over the layers and the tokens that count: equations 24 and 25 of arXiv:2412.19437 where
    `weight` is the coefficient over the number of these tokens.

    Args:
        depth: number of MTP layers.
        prefix: of the names of the sums that are reported, mtp_loss (nats) and mtp_tokens, each over all layers.
    """

    def both(output: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        value, sums = loss(output[:, :-depth], batch)
        total = -output[:, -depth:].sum()
        assert batch.later is not None
        tokens = torch.full((), sum(batch.later.counts), dtype=torch.double, device=output.device)
        return value + total * (weight / depth), {
            **sums,
            f"{prefix}mtp_loss": total.double(),
            f"{prefix}mtp_tokens": tokens,
        }

    return both


def forget_pass(chunks: Sequence[torch.nn.Module]) -> None:
    """Release what modules keep of a pass: the stage's input of the last micro-batch, float8 copies of weights, and tables of angles.

    Megatron-core 0.19.2 keeps the tables of the last 32 lengths of a micro-batch's longest sequence, which seldom come again. Each may lie in a
    large block of the device's memory, all of which would then stay taken while other roles compute.
    """
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    for chunk in unwrap(list(chunks)):
        chunk.decoder.input_tensor = None
        if chunk.config.fp8 is not None:
            forget_float8_weights(chunk)


def _run_schedule(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[PackedBatch],
    head: Head,
    loss: Loss | None,
) -> list[Any]:
    """On the last stage the collected results of each micro-batch: outputs without a loss, stats with one."""
    _check_counts(len(micro_batches))

    def gathered_head(*args: Any, **options: Any) -> Any:
        # A head reads its module's weight without a forward pass of the module, before which Megatron gathers it.
        gather_parameters(chunks[-1:])
        return head(*args, **options)

    def forward_step(iterator: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Tensor, Callable]:
        batch = next(iterator)
        outputs = model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=None,
            packed_seq_params=batch.packed_seq_params(live_only=True),
            output_processor=head if loss is None else gathered_head,
            output_processor_context=(batch, unwrap([model])[0]),
        )

        def collect(outputs: Tensor, non_loss_data: bool = False) -> Any:
            if non_loss_data:
                return outputs
            loss_sum, stats = loss(outputs, batch)
            # The third value counts tokens to divide gradients by, which `finalize_gradients` ignores. It
            # must be there: with two values the schedule divides the loss by the number of micro-batches.
            no_tokens = torch.zeros((), dtype=torch.int, device=loss_sum.device)
            return loss_sum, no_tokens, {name: value.detach() for name, value in stats.items()}

        return outputs, collect

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].num_tokens,  # not used: stages tell each other their tensors' shapes
        micro_batch_size=1,
        forward_only=loss is None,
        collect_non_loss_data=loss is None,
    )


def _check_counts(count: int) -> None:
    """Ranks that run different schedules would wait for each other for ever; this stops them at once."""
    group = parallel_state.get_data_parallel_group()
    if group.size() == 1:
        assert count > 0, "no micro-batches"
        return
    bounds = torch.tensor([count, -count], device=platform.device())
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    most, least = bounds[0].item(), -bounds[1].item()
    assert most == least > 0, f"data parallel ranks have from {least} to {most} micro-batches; {count} here"


def _reduce_stats(collected: list[dict[str, Tensor]]) -> dict[str, float]:
    """Sums over micro-batches, data and context parallel ranks; every pipeline stage gets them."""
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    stats: dict[str, float] = {}
    if last:
        # Micro-batches of several kinds report sums of several names, in the same order on every rank.
        names = list(dict.fromkeys(name for entry in collected for name in entry))
        nothing = torch.zeros((), dtype=torch.double, device=platform.device())
        sums = torch.stack(
            [torch.stack([entry.get(name, nothing).double() for name in names]) for entry in collected]
        ).sum(0)
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        stats = dict(zip(names, sums.tolist(), strict=True))
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        # Other stages do not know the names either, so an object is sent.
        message = [stats]
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(
            message, src=source, group=parallel_state.get_pipeline_model_parallel_group()
        )
        stats = message[0]
    return stats
