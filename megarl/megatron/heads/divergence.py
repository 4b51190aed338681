"""The divergence of two heads at each token, over the whole vocabulary."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.heads.log_probs import (
    CHUNK_TOKENS,
    HeadGradients,
    chunk_logits,
    owned_labels,
    vocab_share,
)


def token_divergence(
    hidden: Tensor,
    weight: Tensor,
    other_hidden: Tensor,
    other_weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int | None,
    tp_group: dist.ProcessGroup,
    beta: float = 1.0,
) -> Tensor:
    """The divergence of p and q at each position, and log q(label).

    p = softmax(hidden @ W^T / temperature) and q likewise of the other model. The divergence is the generalised Jensen-Shannon divergence of
    GKD (arXiv:2306.13649, equation 1), with its limits as TRL's GKDTrainer has them:

        beta 1: KL(p || q) = sum over the vocabulary of p (log p - log q);
        beta 0: KL(q || p);
        between: beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p.

    Differentiable in `hidden` and `weight` (the divergence only; the other model is a constant). As in `token_log_probs` the gradient of
    `hidden` is this rank's part.

    Args:
        hidden, other_hidden: [tokens, hidden], each the same on all tensor-parallel ranks; the models may differ in their widths.
        weight, other_weight: [padded vocab/tp, hidden], rank r's rows of the padded vocabulary.
        labels: int64 [tokens], in [0, vocab_size).
        chunk_tokens: None: CHUNK_TOKENS, since there are several tensors of a chunk's logits in float32.

    Returns: float32 [tokens, 2] (divergence in nats, log q(label)), the same on all tensor-parallel ranks.
    """
    assert 0.0 <= beta <= 1.0, beta
    start, rows = vocab_share(weight, vocab_size, tp_group)
    other = (other_hidden.detach(), other_weight.detach())
    chunk_tokens = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return _TokenDivergence.apply(
        hidden, weight, *other, labels, start, rows, temperature, chunk_tokens, tp_group, beta
    )


class _TokenDivergence(torch.autograd.Function):
    """With log-probabilities a = log p and b = log q over the vocabulary, l the logits of p over the temperature, and D the divergence:

    beta 1: d D / d l = p * (a - b - D);
    beta 0: d D / d l = p - q;
    between: d D / d l = (1 - beta) * p * (a - log m - KL(p || m)).
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
        beta: float,
    ) -> Tensor:
        tokens = hidden.shape[0]
        output = hidden.new_empty(tokens, 2, dtype=torch.float32)
        norms = hidden.new_empty(tokens, 2, dtype=torch.float32)  # logsumexp of p's and q's logits
        of_p = output[:, 0] if beta == 1.0 else hidden.new_zeros(tokens, dtype=torch.float32)
        for first in range(0, tokens, chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            p = chunk_logits(hidden[chunk], weight[:rows], temperature)
            q = chunk_logits(other_hidden[chunk], other_weight[:rows], temperature)
            local, owned = owned_labels(labels[chunk], start, rows)
            if beta == 1.0:
                output[chunk], norms[chunk] = _reduce_kl_chunk(p, q, local, owned, tp_group)
            else:
                output[chunk], norms[chunk], of_p[chunk] = _reduce_divergence(
                    p, q, local, owned, tp_group, beta
                )
            del p, q  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, other_hidden, other_weight, norms, of_p.clone())
        ctx.settings = (rows, temperature, chunk_tokens, beta)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, other_hidden, other_weight, norms, of_p = ctx.saved_tensors
        rows, temperature, chunk_tokens, beta = ctx.settings
        real, found = weight[:rows], HeadGradients(hidden, weight, rows, ctx.needs_input_grad[1])
        for first in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            log_p = chunk_logits(hidden[chunk], real, temperature).sub_(norms[chunk, :1])
            log_q = chunk_logits(other_hidden[chunk], other_weight[:rows], temperature).sub_(norms[chunk, 1:])
            slope = _slope(log_p, log_q, of_p[chunk, None], beta)
            grad_logits = slope.mul_(grad[chunk, :1] / temperature).to(weight.dtype)
            del log_p, log_q, slope  # before the next chunk's are made
            found.add(chunk, grad_logits)
            del grad_logits
        return found.hidden, found.weight(), *[None] * 9


def _slope(log_p: Tensor, log_q: Tensor, of_p: Tensor, beta: float) -> Tensor:
    """The divergence's gradient in the logits of p [chunk, rows]; overwrites both. `of_p`: KL(p || q) or KL(p || m), [chunk, 1]."""
    p = log_p.exp()
    if beta == 0.0:
        return p.sub_(log_q.exp_())
    if beta < 1.0:
        log_q = _mixture(log_p, log_q, beta)
    return log_p.sub_(log_q).sub_(of_p).mul_(p).mul_(1.0 if beta == 1.0 else 1.0 - beta)


def _mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """log(beta q + (1 - beta) p); overwrites log_q."""
    return torch.logaddexp(log_q.add_(math.log(beta)), log_p + math.log1p(-beta), out=log_q)


def _reduce_divergence(
    p: Tensor, q: Tensor, local: Tensor, owned: Tensor, tp_group: dist.ProcessGroup, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_reduce_kl_chunk` for other divergences, and KL(p || m) (for beta 0 zeros) [chunk]."""
    peaks = _peaks(p, q, tp_group)
    norms = torch.stack([(p - peaks[0, :, None]).exp_().sum(1), (q - peaks[1, :, None]).exp_().sum(1)])
    if tp_group.size() > 1:
        dist.all_reduce(norms, group=tp_group)
    norms = norms.log_().add_(peaks)
    log_p, log_q = p.sub_(norms[0, :, None]), q.sub_(norms[1, :, None])
    sums = p.new_zeros(3, len(p))  # of q's and p's parts of the divergence, and log q at the label
    if p.shape[1]:
        sums[2] = log_q.gather(1, local[:, None])[:, 0] * owned
        there = log_q.exp()
        mixed = log_p if beta == 0.0 else _mixture(log_p, log_q.clone(), beta)
        sums[0] = log_q.sub_(mixed).mul_(there).sum(1)
        if beta:
            sums[1] = (log_p - mixed).mul_(log_p.exp_()).sum(1)
    if tp_group.size() > 1:
        dist.all_reduce(sums, group=tp_group)
    divergence = sums[0] if beta == 0.0 else beta * sums[0] + (1.0 - beta) * sums[1]
    return torch.stack([divergence, sums[2]], dim=1), norms.t(), sums[1]


def _peaks(p: Tensor, q: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
    """The largest logits of both, over all ranks: [2, chunk]."""
    # A rank whose rows are all padding has nothing to take a maximum of.
    peaks = p.new_full((2, len(p)), -torch.inf)
    if p.shape[1]:
        peaks[0], peaks[1] = p.amax(dim=1), q.amax(dim=1)
    if tp_group.size() > 1:
        dist.all_reduce(peaks, dist.ReduceOp.MAX, group=tp_group)
    return peaks


def _reduce_kl_chunk(
    p: Tensor, q: Tensor, local: Tensor, owned: Tensor, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """From this rank's logits p and q [chunk, rows], which are overwritten: (KL(p || q), log q(label)) and the logarithms of both
    norms, each [chunk, 2]."""
    tokens, rows = p.shape
    peaks = _peaks(p, q, tp_group)
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
