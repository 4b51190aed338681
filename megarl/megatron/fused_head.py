"""Log-probabilities and entropies of a vocab-parallel language model head on a GPU: cuBLAS's products, one Triton kernel a chunk of logits.

Promises:
- Logits exist once, in the model's type, for `chunk_tokens` tokens at a time; the forward pass reads them once, the backward pass
  overwrites them by their gradients. Nothing in float32 has a number for each logit.
- Of the chunk that the forward pass computes last, which is the largest, logits are kept for the backward pass; of others they are computed
  again. A batch that fits one chunk has three products, and no fourth.
- Tensor parallel ranks exchange four numbers a token, all tokens in one gathering, and none in the backward pass; every rank gets the
  same bits.
- The gradient of a weight with a float32 gradient buffer (`main_grad` of Megatron's data parallel gradients) is added to it within the product, and
  computed nowhere else.

Why the products are not part of the kernel: of a thousand logits a product with H = 3584 takes 12 ns on an H100 (2 H operations a logit, at 60 % of
989 TFLOP/s), while writing and reading them in bfloat16 takes 1.2 ns (4 bytes a logit, 3.35 TB/s). Logits that are never in memory would
save a tenth of a product; and they would cost one more, since both gradients need each logit's: with none stored, both products would
compute the logits anew. What can be saved are the passes over logits in float32, 40 bytes a logit forward and 58 backward in the torch code of
`heads`, 29 ns in all; 4 and 8 bytes, 3.6 ns, remain.

Executed as a shadow and interpreted on a CPU (tests/megatron); an H100 has run it (docs/gpu.md).
"""

from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK = 4096  # logits that a program has at a time; in bfloat16 16 a thread, two loads of 16 bytes
WARPS = 8
TOKENS = 128  # that a program of `combine_ranks` has
ALIGNED = 16  # bytes: cuBLAS's fast products take rows that begin at multiples of it


class HeadShare(NamedTuple):
    """A rank's share of a head: its rows of the vocabulary begin at `start`; `rows` of them are no padding. `keep`: there will be a backward
    pass."""

    start: int
    rows: int
    temperature: float
    chunk_tokens: int
    tp_group: dist.ProcessGroup
    with_entropy: bool
    keep: bool = True


def fused_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor, share: HeadShare) -> Tensor:
    """As `heads.log_probs.token_log_probs`, for tensors on a GPU.

    Args:
        hidden: [tokens, hidden]. weight: [padded vocab/tp, hidden]. labels: int64 [tokens].

    Returns: float32 [tokens, 1 or 2].
    """
    return _FusedLogProbs.apply(hidden, weight, labels, share)


class _FusedLogProbs(torch.autograd.Function):
    """With l the logits over the temperature, z = logsumexp(l), p = exp(l - z), H = z - sum(p*l):

    d log p[y] / d l = onehot(y) - p,    d H / d l = -p * (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, share: HeadShare) -> Tensor:
        hidden, labels = hidden.contiguous(), labels.contiguous()
        tokens = hidden.shape[0]
        statistics = hidden.new_empty(tokens, 4, dtype=torch.float32)
        buffer, logits = logits_buffer(hidden, share), None
        for chunk in chunks_of(tokens, share.chunk_tokens):
            logits = _chunk_logits(buffer, hidden[chunk], weight, share)
            _reduce(logits, labels[chunk], statistics[chunk], share)
        output, norms = combined(_gathered(statistics, share.tp_group), share.with_entropy)
        ctx.save_for_backward(hidden, weight, labels, norms)
        ctx.share = share
        ctx.buffer, ctx.logits = (buffer, logits) if share.keep else (None, None)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, norms = ctx.saved_tensors
        share, grad = ctx.share, grad.contiguous()
        # They are overwritten: a second backward pass would have to compute them.
        buffer, logits = ctx.buffer, ctx.logits
        ctx.buffer = ctx.logits = None
        if buffer is None:
            buffer = logits_buffer(hidden, share)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = gradient_sum(weight) if ctx.needs_input_grad[1] else None
        for chunk in reversed(chunks_of(hidden.shape[0], share.chunk_tokens)):
            if logits is None:
                logits = _chunk_logits(buffer, hidden[chunk], weight, share)
            _differentiate(logits, labels[chunk], norms[chunk], grad[chunk], share)
            torch.mm(logits, weight[: share.rows], out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight[: share.rows], logits, hidden[chunk])
            logits = None
        del buffer, logits  # before a tensor as large as the weight is allocated
        return grad_hidden, None if grad_weight is None else given_gradient(weight, grad_weight), None, None


def chunks_of(tokens: int, chunk_tokens: int) -> list[slice]:
    """Chunks of `chunk_tokens` tokens; the first one has the remainder, so that the last one, whose logits are kept, is as large as any."""
    first = tokens % chunk_tokens
    bounds = ([0] if first else []) + list(range(first, tokens + 1, chunk_tokens))
    return [slice(*bound) for bound in pairwise(bounds)]


def logits_buffer(hidden: Tensor, share: HeadShare) -> Tensor:
    """Memory for the logits of the largest chunk, [tokens, rows rounded up for alignment]."""
    unit = ALIGNED // hidden.element_size()
    return hidden.new_empty(min(share.chunk_tokens, hidden.shape[0]), -(-share.rows // unit) * unit)


def _chunk_logits(buffer: Tensor, hidden: Tensor, weight: Tensor, share: HeadShare) -> Tensor:
    """[chunk, rows] within the buffer, rounded to the model's type as in Megatron and SGLang; the temperature is not in them."""
    logits = buffer[: hidden.shape[0], : share.rows]
    return torch.mm(hidden, weight[: share.rows].t(), out=logits)


def _reduce(logits: Tensor, labels: Tensor, statistics: Tensor, share: HeadShare) -> None:
    kernels().reduce_logits[(len(logits),)](logits, labels, statistics, **_over_logits(logits, share))


def _over_logits(logits: Tensor, share: HeadShare) -> dict[str, Any]:
    """The arguments that kernels over a chunk's logits have in common."""
    return {
        "stride": logits.stride(0),
        "start": share.start,
        "rows": share.rows,
        "inverse_temperature": 1.0 / share.temperature,
        "BLOCK": BLOCK,
        "WITH_ENTROPY": share.with_entropy,
        "num_warps": WARPS,
    }


def _gathered(statistics: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[tp, tokens, 4]."""
    if group.size() == 1:
        return statistics[None]
    tokens, numbers = statistics.shape
    found = statistics.new_empty(group.size() * tokens, numbers)
    dist.all_gather_into_tensor(found, statistics, group=group)
    return found.view(group.size(), tokens, numbers)


def combined(statistics: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """Outputs [tokens, 1 or 2] and norms [tokens, 3] of the statistics of all ranks, [tp, tokens, 4]."""
    ranks, tokens, _ = statistics.shape
    output = statistics.new_empty(tokens, 1 + with_entropy)
    norms = statistics.new_empty(tokens, 3)
    if tokens:
        kernels().combine_ranks[(-(-tokens // TOKENS),)](
            statistics, norms, output, tokens, ranks, TOKENS, with_entropy
        )
    return output, norms


def _differentiate(logits: Tensor, labels: Tensor, norms: Tensor, grad: Tensor, share: HeadShare) -> None:
    if not share.rows:  # all padding
        return
    grid = (len(logits), -(-share.rows // BLOCK))
    kernels().differentiate_logits[grid](logits, labels, norms, grad, **_over_logits(logits, share))


def kernels() -> ModuleType:
    from megarl.megatron import head_kernels

    return head_kernels


# The gradient of an output weight.


def gradient_sum(weight: Tensor) -> Tensor:
    """The float32 tensor to which parts of a weight's gradient are added: its part of the gradient buffer, as in Megatron's own layers
    (megatron-core 0.19.2, tensor_parallel/layers.py), or zeros where it has none."""
    # Megatron-FSDP makes buffers for each pass, and the one that a weight still names may be gone.
    buffer = None if hasattr(weight, "__fsdp_param__") else getattr(weight, "main_grad", None)
    if buffer is None or buffer.dtype != torch.float32:
        return torch.zeros_like(weight, dtype=torch.float32)
    return buffer


def add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add grad_logits^T hidden to the float32 `total` within the product. cuBLAS does so for factors in bfloat16 and float16 (torch from 2.10 on);
    a CPU has no such product."""
    if hidden.dtype == total.dtype:
        total.addmm_(grad_logits.t(), hidden)
    elif total.is_cuda:
        torch.addmm(total, grad_logits.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        total += grad_logits.t() @ hidden


def given_gradient(weight: Tensor, total: Tensor) -> Tensor | None:
    """The gradient that a backward pass gives autograd for a weight whose gradient is in `total` (`gradient_sum`).

    Where `total` is in the gradient buffer, it is a tensor without values: Megatron's hook, which starts the reduction of a bucket, asks
    for a gradient and does not read it (`grad_added_to_main_grad`). But the hook reads it where the weight is the embedding's too
    (`zero_out_wgrad`): then the embedding's own gradient alone must come through autograd, and None adds nothing to it.
    """
    if total is not getattr(weight, "main_grad", None):
        return total.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return None if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
