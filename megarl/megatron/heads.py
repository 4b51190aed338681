"""The outputs of a vocab-parallel language model head, without holding its logits: log-probabilities, entropy, the divergence from another
head; and the value head.

On a GPU log-probabilities and entropies are computed by `fused_head`; this file's torch code computes the same on a CPU, and divergences on both.

Promises:
- The largest temporary tensors have `chunk_tokens` rows of this rank's share of the vocabulary (one of them for log-probabilities, a few
  for a divergence): logits are computed a chunk of tokens at a time, reduced to a few numbers a token, dropped, and recomputed in the
  backward pass. The only other large tensor is the output weight's own gradient.
- Logits are never gathered over tensor-parallel ranks; a chunk costs two all-reduces, of its maxima and of a few
  sums a token, and one more for divergences other than the KL (on a GPU all chunks together cost one gathering of four numbers a token).
- Rows that pad the vocabulary take no probability: they are left out of every product.
- `lm_head` spends nothing on tokens that do not count, such as prompts.
- Two heads that are equal have a KL of exactly 0, and pass no gradient.
- A divergence's sums are in float32 whatever the models' dtype.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megarl.megatron.fused_head import (
    HeadShare,
    add_product,
    fused_log_probs,
    given_gradient,
    gradient_sum,
)
from megarl.megatron.packing import PackedBatch
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
        real = weight[:rows]
        grad_hidden = torch.empty_like(hidden)
        # Summed over chunks in float32 whatever the weight's dtype; a bfloat16 sum would lose late chunks.
        # A frozen weight has none.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
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
            grad_logits = grad_logits.div_(temperature).to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ real
            if grad_weight is None:
                continue
            if weight.dtype == torch.float32:
                grad_weight[:rows].addmm_(grad_logits.t(), hidden[chunk])
            else:
                grad_weight[:rows] += grad_logits.t() @ hidden[chunk]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 7


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


def lm_output_processor(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    context: tuple[PackedBatch, Any],
    vocab_size: int,
    temperature: float,
    chunk_tokens: int | None,
    with_entropy: bool,
    predicted: Sequence[Tensor] = (),
    **unused: Any,
) -> Tensor:
    """GPTModel's `output_processor` (megatron-core 0.19.2): log-probabilities (and entropies) of the labels.

    The settings after `context` are bound by `lm_head`; GPTModel's other arguments are not needed.

    Args:
        hidden_states: [tokens (/tp with sequence parallelism) or live, 1, hidden].
        output_weight: the shared embedding's weight where embeddings are tied; None: the layer's own.
        context: the batch, and the model chunk.
        predicted: the states of each layer of multi-token prediction, as `hidden_states` (`megarl.megatron.prediction`).

    Returns: float32 [tokens, 2 or 1], as `token_log_probs`, and, where the batch has another model's head, 2 more
        columns: the divergence from it and its log-probability of the label (`token_divergence`). 0 where the batch's mask is
        false. Of each layer in `predicted` one more: its log-probability of its token; 0 where that does not count.
    """
    batch, model = context
    weight = output_layer.weight if output_weight is None else output_weight
    hidden, labels = _live_hidden(hidden_states, output_layer, batch), batch.labels[batch.live]
    settings = {
        "vocab_size": vocab_size,
        "temperature": temperature,
        "chunk_tokens": chunk_tokens,
        "tp_group": output_layer.tp_group,
    }
    found = token_log_probs(hidden, weight, labels, with_entropy=with_entropy, **settings)
    if batch.other is not None:
        other = batch.other
        compared = token_divergence(
            hidden, weight, other.hidden, other.weight, labels, **settings, beta=other.beta
        )
        found = torch.cat([found, compared], dim=1)
    found = found.new_zeros(batch.num_tokens, found.shape[1]).index_copy(0, batch.live, found)
    if not predicted:
        return found
    assert batch.later is not None
    weight = weight.detach() if model.config.mtp_detach_heads else weight
    columns = [found]
    for states, (ids, live) in zip(predicted, batch.later.rows(), strict=True):
        hidden = _whole_hidden(states, output_layer).index_select(0, live)
        own = token_log_probs(hidden, weight, ids, with_entropy=False, **settings)
        columns.append(own.new_zeros(batch.num_tokens, 1).index_copy(0, live, own))
    return torch.cat(columns, dim=1)


def _live_hidden(hidden_states: Tensor, output_layer: torch.nn.Module, batch: PackedBatch) -> Tensor:
    """[live, hidden], the same on all tensor-parallel ranks, which sum its gradient."""
    return batch.live_rows(_whole_hidden(hidden_states, output_layer))


def _whole_hidden(hidden_states: Tensor, output_layer: torch.nn.Module) -> Tensor:
    """The states of all of a rank's positions, [tokens or live, hidden], the same on all tensor-parallel ranks, which sum its gradient."""
    group = output_layer.tp_group
    if output_layer.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=group
        )
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
    return hidden.flatten(0, 1)


def hidden_head(
    *, hidden_states: Tensor, output_layer: torch.nn.Module, context: tuple[PackedBatch, Any], **unused: Any
) -> Tensor:
    """A `head` for `step.forward_only` that gives the last hidden states of a packed batch's live positions,
    [live, hidden], for `OtherHead`."""
    return _live_hidden(hidden_states, output_layer, context[0])


def head_weight(model: GPTModel) -> Tensor:
    """This rank's rows of the output weight of a model chunk that has the head, [padded vocab/tp, hidden]."""
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )


def lm_head(
    *, vocab_size: int, temperature: float = 1.0, chunk_tokens: int | None = None, with_entropy: bool = False
) -> partial:
    """A `head` for `step.forward_only` and `step.train_step` that gives [tokens, 1 or 2] log-probabilities
    (and entropies) of a packed batch's labels."""
    return partial(
        lm_output_processor,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
    )


# The divergence of two heads at each token, over the whole vocabulary.


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
        ctx.save_for_backward(hidden, weight, other_hidden, other_weight, norms, of_p.clone())
        ctx.settings = (rows, temperature, chunk_tokens, beta)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, other_hidden, other_weight, norms, of_p = ctx.saved_tensors
        rows, temperature, chunk_tokens, beta = ctx.settings
        real = weight[:rows]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # With a gradient buffer, where `fused_log_probs` of the same weight has added its part.
            grad_weight = (
                gradient_sum(weight) if weight.is_cuda else torch.zeros_like(weight, dtype=torch.float32)
            )
        for first in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(first, first + chunk_tokens)
            log_p = chunk_logits(hidden[chunk], real, temperature).sub_(norms[chunk, :1])
            log_q = chunk_logits(other_hidden[chunk], other_weight[:rows], temperature).sub_(norms[chunk, 1:])
            slope = _slope(log_p, log_q, of_p[chunk, None], beta)
            grad_logits = slope.mul_(grad[chunk, :1] / temperature).to(weight.dtype)
            grad_hidden[chunk] = grad_logits @ real
            if grad_weight is None:
                continue
            if weight.is_cuda:
                add_product(grad_weight[:rows], grad_logits, hidden[chunk])
            else:
                grad_weight[:rows] += grad_logits.t() @ hidden[chunk]
        if grad_weight is not None:
            grad_weight = (
                given_gradient(weight, grad_weight) if weight.is_cuda else grad_weight.to(weight.dtype)
            )
        return grad_hidden, grad_weight, *[None] * 9


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


def value_head(*, hidden_states: Tensor, context: tuple[PackedBatch, GPTModel], **_: Any) -> Tensor:
    """GPTModel's `output_processor` (megatron-core 0.19.2) for a model built with head="value".

    A `head` for `step.forward_only` and `step.train_step`. It is replicated over tensor-parallel
    ranks; with sequence parallelism each applies it to its own tokens only and `finalize_gradients` sums its
    gradient, otherwise every rank computes the same.

    Args:
        hidden_states: [tokens (/tp with sequence parallelism) or live, 1, hidden].
        context: the batch, and the chunk whose `value_head.weight` is [1, hidden].

    Returns: float32 [tokens], the same on all tensor-parallel ranks. 0 where the batch's mask is false.
    """
    batch, model = context
    # In float32 whatever the model's dtype: bfloat16 would round the values themselves to three digits.
    weight = model.value_head.weight.float()
    values = torch.nn.functional.linear(hidden_states.float(), weight)  # [tokens (/tp), 1, 1]
    if model.config.sequence_parallel:
        # Every rank computes the same loss of all values, so each token's gradient is already complete on the
        # rank that holds the token: it is split back, not summed.
        values = gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=model.pg_collection.tp
        )
    values = batch.live_rows(values.flatten())
    return values.new_zeros(batch.num_tokens).index_copy(0, batch.live, values)
