"""The exact KL between two vocab-parallel language model heads at each token, without holding their logits.

Promises:
- The largest temporary tensors have `chunk_tokens` rows of this rank's share of the vocabulary, a few of them; logits are
  never gathered over tensor-parallel ranks. A chunk costs two all-reduces, as those of `logprobs` do.
- Two heads that are equal have a KL of exactly 0, and pass no gradient.
- Sums are in float32 whatever the models' dtype; rows that pad the vocabulary take no probability.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.vocab import chunk_logits, owned_labels, vocab_share


def token_full_kl(
    hidden: Tensor,
    weight: Tensor,
    other_hidden: Tensor,
    other_weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
    tp_group: dist.ProcessGroup,
) -> Tensor:
    """KL(p || q) = sum over the vocabulary of p (log p - log q) at each position, and log q(label).

    p = softmax(hidden @ W^T / temperature) and q likewise of the other model. Differentiable in `hidden` and
    `weight` (KL only; the other model is a constant). As in `token_log_probs` the gradient of `hidden` is this rank's part.

    Args:
        hidden, other_hidden: [tokens, hidden], each the same on all tensor-parallel ranks.
        weight, other_weight: [padded vocab/tp, hidden], rank r's rows of the padded vocabulary.
        labels: int64 [tokens], in [0, vocab_size).

    Returns: float32 [tokens, 2] (KL in nats, log q(label)), the same on all tensor-parallel ranks.
    """
    start, rows = vocab_share(weight, vocab_size, tp_group)
    other = (other_hidden.detach(), other_weight.detach())
    return _TokenFullKL.apply(
        hidden, weight, *other, labels, start, rows, temperature, chunk_tokens, tp_group
    )


class _TokenFullKL(torch.autograd.Function):
    """With log-probabilities a = log p and b = log q over the vocabulary, and l the logits of p over the temperature:

    d KL / d l = p * (a - b - KL).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        other_hidden: Tensor,
        other_weight: Tensor,
        labels: Tensor,
        start: int,
        rows: int,
        temperature: float,
        chunk_tokens: int,
        tp_group: dist.ProcessGroup,
    ) -> Tensor:
        tokens = hidden.shape[0]
        output = hidden.new_empty(tokens, 2, dtype=torch.float32)
        norms = hidden.new_empty(tokens, 2, dtype=torch.float32)  # logsumexp of p's and q's logits
        for first in range(0, tokens, chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            p = chunk_logits(hidden[chunk], weight[:rows], temperature)
            q = chunk_logits(other_hidden[chunk], other_weight[:rows], temperature)
            local, owned = owned_labels(labels[chunk], start, rows)
            output[chunk], norms[chunk] = _reduce_kl_chunk(p, q, local, owned, tp_group)
        ctx.save_for_backward(hidden, weight, other_hidden, other_weight, norms, output)
        ctx.settings = (rows, temperature, chunk_tokens)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, other_hidden, other_weight, norms, output = ctx.saved_tensors
        rows, temperature, chunk_tokens = ctx.settings
        real = weight[:rows]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for first in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            log_p = chunk_logits(hidden[chunk], real, temperature).sub_(norms[chunk, :1])
            log_q = chunk_logits(other_hidden[chunk], other_weight[:rows], temperature).sub_(norms[chunk, 1:])
            p = log_p.exp()
            factor = log_p.sub_(log_q).sub_(output[chunk, :1]).mul_(grad[chunk, :1] / temperature)
            grad_logits = factor.mul_(p).to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ real
            if grad_weight is not None:
                grad_weight[:rows] += grad_logits.t() @ hidden[chunk]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 8


def _reduce_kl_chunk(
    p: Tensor, q: Tensor, local: Tensor, owned: Tensor, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """From this rank's logits p and q [chunk, rows], which are overwritten: (KL, log q(label)) and the logarithms of both
    norms, each [chunk, 2]."""
    tokens, rows = p.shape
    # A rank whose rows are all padding has nothing to take a maximum of.
    peaks = p.new_full((2, tokens), -torch.inf)
    if rows:
        peaks[0], peaks[1] = p.amax(dim=1), q.amax(dim=1)
    if tp_group.size() > 1:
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=tp_group)
    p -= peaks[0, :, None]
    q -= peaks[1, :, None]
    sums = p.new_zeros(4, tokens)  # of exp(p), exp(q), exp(p) * (p - q), and q at the label
    if rows:
        sums[3] = q.gather(1, local[:, None])[:, 0] * owned
        difference = p - q
        weights = p.exp_()
        sums[0] = weights.sum(dim=1)
        sums[2] = difference.mul_(weights).sum(dim=1)
        sums[1] = q.exp_().sum(dim=1)
    if tp_group.size() > 1:
        dist.all_reduce(sums, group=tp_group)
    log_sums = sums[:2].log()
    kl = sums[2] / sums[0] - (log_sums[0] - log_sums[1])
    return torch.stack([kl, sums[3] - log_sums[1]], dim=1), (peaks + log_sums).t()
