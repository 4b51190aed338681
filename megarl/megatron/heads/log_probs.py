"""Log-probabilities and entropies of tokens, from hidden states and a vocab-parallel head."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.fused_head import HeadShare, add_product, fused_log_probs, gradient_sum
from megarl.models import head_chunk_tokens

CHUNK_TOKENS = 1024  # where the configuration names no number: on a CPU, and of divergences


def vocab_share(weight: Tensor, vocab_size: int, tp_group: dist.ProcessGroup) -> tuple[int, int]:
    """The first token of this rank's rows, and how many of them are no padding.

    Args:
        weight: [padded vocab/tp, hidden], rank r's rows of the padded vocabulary.
        vocab_size: real vocabulary; rows from there on are padding.
    """
    share = weight.shape[0]
    start = tp_group.rank() * share
    return start, min(max(vocab_size - start, 0), share)


def chunk_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """float32 [chunk, rows]; the product itself runs in the model's dtype, as in Megatron and SGLang."""
    return (hidden @ weight.t()).float().div_(temperature)


def owned_labels(labels: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row of each label on this rank (0 where it is another rank's), and whether it is this rank's."""
    local = labels - start
    owned = (local >= 0) & (local < rows)
    return local.masked_fill(~owned, 0), owned


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int | None,
    tp_group: dist.ProcessGroup,
    with_entropy: bool,
) -> Tensor:
    """log p(label) at each position, and the entropy of p, for p = softmax(hidden @ W^T / temperature).

    Differentiable in `hidden` and `weight`. The gradient of `hidden` is this rank's part: the caller sums it
    over tensor-parallel ranks. Labels must lie in [0, vocab_size).

    Args:
        hidden: [tokens, hidden], the same on all tensor-parallel ranks.
        weight: [padded vocab/tp, hidden], rank r's rows of the padded vocabulary.
        labels: int64 [tokens].
        vocab_size: real vocabulary; rows from there on are padding.
        chunk_tokens: None: CHUNK_TOKENS on a CPU, `head_chunk_tokens` on a GPU.

    Returns: float32 [tokens, 2] (log-probability, entropy in nats), or [tokens, 1] without entropy; the same
        on all tensor-parallel ranks.
    """
    start, rows = vocab_share(weight, vocab_size, tp_group)
    if hidden.is_cuda:
        chunk_tokens = head_chunk_tokens(rows, weight.element_size(), chunk_tokens)
        keep = torch.is_grad_enabled()
        share = HeadShare(start, rows, temperature, chunk_tokens, tp_group, with_entropy, keep)
        return fused_log_probs(hidden, weight, labels, share)
    chunk_tokens = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return _TokenLogProbs.apply(
        hidden, weight, labels, start, rows, temperature, chunk_tokens, tp_group, with_entropy
    )


class _TokenLogProbs(torch.autograd.Function):
    """With l the logits over the temperature, z = logsumexp(l), p = exp(l - z), H = z - sum(p*l):

    d log p[y] / d l = onehot(y) - p,    d H / d l = -p * (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        start: int,
        rows: int,
        temperature: float,
        chunk_tokens: int,
        tp_group: dist.ProcessGroup,
        with_entropy: bool,
    ) -> Tensor:
        tokens = hidden.shape[0]
        output = hidden.new_empty(tokens, 2 if with_entropy else 1, dtype=torch.float32)
        log_norm = hidden.new_empty(tokens, dtype=torch.float32)
        real = weight[:rows]
        for first in range(0, tokens, chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            logits = chunk_logits(hidden[chunk], real, temperature)
            local, owned = owned_labels(labels[chunk], start, rows)
            peak, sums = _reduce_chunk(logits, local, owned, tp_group, with_entropy)
            log_sum = sums[0].log()
            log_norm[chunk] = peak + log_sum
            output[chunk, 0] = sums[1] - log_sum
            if with_entropy:
                output[chunk, 1] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, labels, log_norm, output)
        ctx.settings = (start, rows, temperature, chunk_tokens, with_entropy)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_norm, output = ctx.saved_tensors
        start, rows, temperature, chunk_tokens, with_entropy = ctx.settings
        real, found = weight[:rows], HeadGradients(hidden, weight, rows, ctx.needs_input_grad[1])
        for first in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            grad_logits = _grad_logits(
                chunk_logits(hidden[chunk], real, temperature),
                log_norm[chunk],
                grad[chunk, 0],
                grad[chunk, 1] if with_entropy else None,
                output[chunk, 1] if with_entropy else None,
            )
            local, owned = owned_labels(labels[chunk], start, rows)
            if rows:
                grad_logits.scatter_add_(1, local[:, None], (grad[chunk, 0] * owned)[:, None])
            found.add(chunk, grad_logits.div_(temperature).to(weight.dtype))
        return found.hidden, found.weight(), *[None] * 7


def _reduce_chunk(
    logits: Tensor, local: Tensor, owned: Tensor, tp_group: dist.ProcessGroup, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Maxima m [chunk] and, with d = l - m, the sums over the vocabulary [2 or 3, chunk] of exp(d), of d at the
    label, and of exp(d)*d. Overwrites `logits`."""
    # A rank whose rows are all padding has nothing to take a maximum of.
    peak = logits.amax(dim=1) if logits.shape[1] else logits.new_full((logits.shape[0],), -torch.inf)
    if tp_group.size() > 1:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=tp_group)
    logits -= peak[:, None]
    sums = logits.new_zeros(3 if with_entropy else 2, logits.shape[0])
    if logits.shape[1]:
        sums[1] = logits.gather(1, local[:, None])[:, 0] * owned
        if with_entropy:
            weights = logits.exp()
            sums[0] = weights.sum(dim=1)
            sums[2] = weights.mul_(logits).sum(dim=1)
        else:
            sums[0] = logits.exp_().sum(dim=1)
    if tp_group.size() > 1:
        dist.all_reduce(sums, group=tp_group)
    return peak, sums


def _grad_logits(
    logits: Tensor, log_norm: Tensor, grad: Tensor, grad_entropy: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """-p * (g + g_H * (log p + H)): the gradient of the logits but for the labels' own term. Reuses `logits`."""
    log_p = logits.sub_(log_norm[:, None])
    p = log_p.exp()
    if grad_entropy is None:
        return p.mul_(-grad[:, None])
    factor = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad[:, None])
    return p.mul_(factor)


class HeadGradients:
    """Gradients chunk by chunk: of `token_log_probs` on a CPU, or of a divergence, in addition to those of `token_log_probs` for the same states and
    weight in one graph.

    Attributes:
        hidden: [tokens, hidden]; of the hidden states, this rank's part.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, rows: int, with_weight: bool) -> None:
        """`rows`: rows of the weight that are no padding. `with_weight`: whether the weight has a gradient; a frozen one has none."""
        self._states, self._weight, self._rows = hidden, weight, rows
        self.hidden, self._total = torch.empty_like(hidden), None
        if with_weight:
            # Summed over chunks in float32 whatever the weight's dtype; a bfloat16 sum would lose late chunks.
            # On a GPU in the gradient buffer, where there is one: `fused_log_probs` has added its part there.
            on_gpu = weight.is_cuda
            self._total = gradient_sum(weight) if on_gpu else torch.zeros_like(weight, dtype=torch.float32)

    def add(self, chunk: slice, grad_logits: Tensor) -> None:
        """Add the gradients of a chunk of tokens; `grad_logits`: [chunk, rows], of the logits, in the weight's type."""
        self.hidden[chunk] = grad_logits @ self._weight[: self._rows]
        if self._total is not None:
            add_product(self._total[: self._rows], grad_logits, self._states[chunk])

    def weight(self) -> Tensor | None:
        """The weight's gradient for autograd; None where it is in the gradient buffer: `fused_log_probs` gives autograd a tensor for both."""
        if self._total is None or self._total is getattr(self._weight, "main_grad", None):
            return None
        return self._total.to(self._weight.dtype)
