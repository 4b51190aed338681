"""Log-probabilities of tokens that were drawn from a part of the vocabulary, and the entropies of these draws.

The part has the tokens that the sampler kept (top_p, top_k, min_p) with the weights of its time, even where other weights would keep others: so
the distributions of all policies that are compared are over the same tokens. DeepSeek-V3.2 trains in this way ("Keep Sampling Mask",
arXiv:2512.02556).

Promises:
- Only the product itself, and in the backward pass its gradient, have a number for each logit, for `chunk_tokens` tokens at a time and in the model's
  type. Of kept tokens there are further numbers, which the backward pass takes in place of logits.
- A second pass over the same batch has the same bits, with entropies or without.
- Tokens that are not kept have no gradient.

Tensor parallel ranks exchange a maximum and three sums a token, all tokens at once, and nothing in the backward pass.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.fused_head import (
    HeadShare,
    add_product,
    chunks_of,
    given_gradient,
    gradient_sum,
    logits_buffer,
)
from megarl.megatron.heads.log_probs import CHUNK_TOKENS, owned_labels, vocab_share
from megarl.megatron.packing import KeptVocabulary
from megarl.models import head_chunk_tokens


def kept_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    kept: KeptVocabulary,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int | None,
    tp_group: dist.ProcessGroup,
    with_entropy: bool,
) -> Tensor:
    """log p(label) at each position, and the entropy of p, for p = softmax(hidden @ W^T / temperature) over the position's kept tokens.

    Differentiable in `hidden` and `weight`, as `token_log_probs`, which has the other arguments, too.

    Args:
        labels: int64 [tokens], each of them one of the position's kept tokens.

    Returns: float32 [tokens, 2] (log-probability, entropy in nats), or [tokens, 1] without entropy; the same
        on all tensor-parallel ranks.
    """
    start, rows = vocab_share(weight, vocab_size, tp_group)
    if hidden.is_cuda:
        chunk_tokens = head_chunk_tokens(rows, weight.element_size(), chunk_tokens)
    chunk_tokens = CHUNK_TOKENS if chunk_tokens is None else chunk_tokens
    share = HeadShare(start, rows, temperature, chunk_tokens, tp_group, with_entropy)
    return _KeptLogProbs.apply(hidden, weight, labels, kept, share)


class _KeptLogProbs(torch.autograd.Function):
    """With l the kept logits over the temperature, z = logsumexp(l), p = exp(l - z), H = z - sum(p*l):

    d log p[y] / d l = onehot(y) - p,    d H / d l = -p * (log p + H),    and 0 for logits of other tokens.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, kept: KeptVocabulary, share: HeadShare
    ) -> Tensor:
        hidden = hidden.contiguous()
        rows, places, values = _kept_logits(hidden, weight, kept, share)
        is_label = kept.ids == labels.index_select(0, rows)
        peak = _segments(values, kept, "max")
        largest = peak.clone()
        if share.tp_group.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=share.tp_group)
        # Logits of other ranks are -inf here; each token has a kept one on some rank.
        distance = values - largest.index_select(0, rows)
        weights = distance.exp()
        near = distance.masked_fill(distance.isneginf(), 0.0)
        parts = [weights, near.masked_fill(~is_label, 0.0), *([weights * near] if share.with_entropy else [])]
        sums = torch.stack([_segments(part, kept, "sum") for part in parts])
        if share.tp_group.size() > 1:
            dist.all_reduce(sums, group=share.tp_group)
        log_sum = sums[0].log()
        output = [sums[1] - log_sum, *([log_sum - sums[2] / sums[0]] if share.with_entropy else [])]
        found = torch.stack(output, dim=1)
        ctx.save_for_backward(hidden, weight, rows, places, distance, is_label, log_sum, found)
        ctx.kept, ctx.share = kept, share
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, places, distance, is_label, log_sum, found = ctx.saved_tensors
        kept, share = ctx.kept, ctx.share
        each = grad.index_select(0, rows)
        log_p = distance - log_sum.index_select(0, rows)
        p = log_p.exp()
        slope = (is_label.float() - p) * each[:, 0]
        if share.with_entropy:
            entropy = found[:, 1].index_select(0, rows)
            slope -= p * (log_p.masked_fill(log_p.isneginf(), 0.0) + entropy) * each[:, 1]
        # Kept tokens of other ranks have no place here.
        slope = slope.masked_fill(distance.isneginf(), 0.0).div_(share.temperature)
        grad_hidden = torch.empty_like(hidden)
        total = None
        if ctx.needs_input_grad[1]:
            total = gradient_sum(weight) if weight.is_cuda else torch.zeros_like(weight, dtype=torch.float32)
        buffer = grad_logits = logits_buffer(hidden, share)
        for chunk in chunks_of(hidden.shape[0], share.chunk_tokens):
            grad_logits = buffer[: chunk.stop - chunk.start, : share.rows].zero_()
            own = slice(kept.bounds[chunk.start], kept.bounds[chunk.stop])
            if share.rows:
                # Each place occurs once, except the first, to which tokens of other ranks add 0.
                at = (rows[own] - chunk.start, places[own])
                grad_logits.index_put_(at, slope[own].to(grad_logits.dtype), accumulate=True)
            torch.mm(grad_logits, weight[: share.rows], out=grad_hidden[chunk])
            if total is not None:
                add_product(total[: share.rows], grad_logits, hidden[chunk])
        del buffer, grad_logits  # before a tensor as large as the weight is allocated
        return grad_hidden, None if total is None else given_gradient(weight, total), None, None, None


def _kept_logits(
    hidden: Tensor, weight: Tensor, kept: KeptVocabulary, share: HeadShare
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each kept token the position that it is kept at, its row on this rank (0 where it is another rank's) and its logit over the temperature,
    -inf where it is another rank's: int64, int64, float32 [sum of counts]."""
    tokens, number = hidden.shape[0], int(kept.bounds[-1])
    every = torch.arange(tokens, device=hidden.device)
    rows = every.repeat_interleave(kept.counts, output_size=number)
    places, owned = owned_labels(kept.ids.long(), share.start, share.rows)
    values = hidden.new_full((number,), -torch.inf, dtype=torch.float32)
    if not share.rows:  # all padding
        return rows, places, values
    buffer = logits_buffer(hidden, share)
    for chunk in chunks_of(tokens, share.chunk_tokens):
        logits = buffer[: chunk.stop - chunk.start, : share.rows]
        torch.mm(hidden[chunk], weight[: share.rows].t(), out=logits)
        own = slice(kept.bounds[chunk.start], kept.bounds[chunk.stop])
        values[own] = logits[rows[own] - chunk.start, places[own]].float().div_(share.temperature)
    return rows, places, values.masked_fill_(~owned, -torch.inf)


def _segments(values: Tensor, kept: KeptVocabulary, how: str) -> Tensor:
    """The maximum ("max") or the sum ("sum") of each position's values [sum of counts]: [positions]."""
    # The counts are not checked on the device, which the host would wait for.
    return torch.segment_reduce(values, how, lengths=kept.counts, unsafe=True)
