"""Another model's most likely tokens at each position, and the divergence of two models over these and all others together.

With S the k most likely tokens of the other model, q, both distributions have k + 1 outcomes: each token of S, and all others as one. Their divergence
is at most that over the whole vocabulary, which it is for k = vocabulary - 1, and 0 exactly where both give S the same probabilities.
For each token k numbers and log-probabilities travel, whatever the layout and the place of the other model.
"""

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

LEAST = 1e-7  # probability of all other tokens; float32 does not tell smaller ones from rounding


@torch.no_grad()
def top_tokens(
    hidden: Tensor,
    weight: Tensor,
    count: int,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int | None,
    tp_group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """The `count` most likely tokens at each position, of equals the first ones, and their log-probabilities.

    Args:
        hidden: [tokens, hidden], the same on all tensor-parallel ranks.
        weight: [padded vocab/tp, hidden], rank r's rows of the padded vocabulary.
        count: at most vocab_size.

    Returns: int64 and float32 [tokens, count], the same on all tensor-parallel ranks, the most likely first.
    """
    assert 0 < count <= vocab_size, (count, vocab_size)
    start, rows = vocab_share(weight, vocab_size, tp_group)
    chunk_tokens = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    ids = hidden.new_empty(len(hidden), count, dtype=torch.int64)
    found = hidden.new_empty(len(hidden), count, dtype=torch.float32)
    for first in range(0, len(hidden), chunk_tokens):
        chunk = slice(first, first + chunk_tokens)
        logits = chunk_logits(hidden[chunk], weight[:rows], temperature)
        best, places = logits.topk(min(count, rows), dim=1)
        norm = logits.logsumexp(dim=1, keepdim=True)
        if tp_group.size() > 1:
            best, places, norm = _of_all_ranks(best, places + start, norm, count, tp_group)
        ids[chunk], found[chunk] = places, best - norm
        del logits  # before the next chunk's are made
    return ids, found


def _of_all_ranks(
    best: Tensor, places: Tensor, norm: Tensor, count: int, tp_group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits [chunk, count] of all ranks, their tokens, and the logarithm of all ranks' norm, in one gathering."""
    own = best.new_full((len(best), 2 * count + 1), -torch.inf)
    own[:, : best.shape[1]] = best
    # Numbers of tokens are exact in float32 up to 2^24.
    own[:, count : count + places.shape[1]] = places.float()
    own[:, -1:] = norm
    parts = [torch.empty_like(own) for _ in range(tp_group.size())]
    dist.all_gather(parts, own, group=tp_group)
    logits = torch.cat([part[:, :count] for part in parts], dim=1)
    tokens = torch.cat([part[:, count:-1] for part in parts], dim=1)
    norm = torch.cat([part[:, -1:] for part in parts], dim=1).logsumexp(dim=1, keepdim=True)
    best, at = logits.topk(count, dim=1)
    return best, tokens.gather(1, at).long(), norm


def top_divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """The generalised Jensen-Shannon divergence (as `token_divergence`) over some tokens and all others together.

    Args:
        log_p: [tokens, k]; log-probabilities of the model that learns. log_q: of the other one.

    Returns: [tokens], in nats; differentiable in `log_p`.
    """
    log_p, log_q = (torch.cat([one, _others(one)], dim=1) for one in (log_p, log_q))
    if beta == 1.0:
        return (log_p.exp() * (log_p - log_q)).sum(dim=1)
    if beta == 0.0:
        return (log_q.exp() * (log_q - log_p)).sum(dim=1)
    mixed = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * (log_q.exp() * (log_q - mixed)).sum(dim=1) + (1.0 - beta) * (
        log_p.exp() * (log_p - mixed)
    ).sum(dim=1)


def _others(log_probs: Tensor) -> Tensor:
    """The logarithm of what some tokens' probabilities leave to all others, [tokens, 1]."""
    return (1.0 - log_probs.exp().sum(dim=1, keepdim=True)).clamp(min=LEAST).log()


def chosen_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int | None,
    tp_group: dist.ProcessGroup,
) -> Tensor:
    """As `token_log_probs`, of several labels at each position.

    Args:
        labels: int64 [tokens, k], in [0, vocab_size), all different at a position.

    Returns: float32 [tokens, k].
    """
    start, rows = vocab_share(weight, vocab_size, tp_group)
    chunk_tokens = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    return _ChosenLogProbs.apply(hidden, weight, labels, start, rows, temperature, chunk_tokens, tp_group)


class _ChosenLogProbs(torch.autograd.Function):
    """With l the logits over the temperature and p their softmax, d log p[y] / d l = onehot(y) - p for each label y."""

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
    ) -> Tensor:
        output = hidden.new_empty(labels.shape, dtype=torch.float32)
        norms = hidden.new_empty(len(hidden), 1, dtype=torch.float32)
        for first in range(0, len(hidden), chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            logits = chunk_logits(hidden[chunk], weight[:rows], temperature)
            local, owned = owned_labels(labels[chunk], start, rows)
            values = logits.gather(1, local) * owned if rows else output.new_zeros(local.shape)
            norm = logits.logsumexp(dim=1, keepdim=True)
            if tp_group.size() > 1:
                parts = [torch.empty_like(norm) for _ in range(tp_group.size())]
                dist.all_gather(parts, norm, group=tp_group)
                norm = torch.cat(parts, dim=1).logsumexp(dim=1, keepdim=True)
                dist.all_reduce(values, group=tp_group)
            output[chunk], norms[chunk] = values - norm, norm
            del logits  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, labels, norms)
        ctx.settings = (start, rows, temperature, chunk_tokens)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, norms = ctx.saved_tensors
        start, rows, temperature, chunk_tokens = ctx.settings
        real, found = weight[:rows], HeadGradients(hidden, weight, rows, ctx.needs_input_grad[1])
        for first in range(0, len(hidden), chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            logits = chunk_logits(hidden[chunk], real, temperature)
            slope = logits.sub_(norms[chunk]).exp_().mul_(-grad[chunk].sum(dim=1, keepdim=True))
            if rows:
                local, owned = owned_labels(labels[chunk], start, rows)
                slope.scatter_add_(1, local, grad[chunk] * owned)
            grad_logits = slope.div_(temperature).to(weight.dtype)
            del logits, slope  # each before the next chunk's are made
            found.add(chunk, grad_logits)
            del grad_logits
        return found.hidden, found.weight(), *[None] * 6
