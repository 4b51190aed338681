"""The outputs of a model's last stage for a packed batch: log-probabilities and further columns, hidden states, or values."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megarl.data.trajectories import REF_TOP_TOKENS
from megarl.megatron.heads.divergence import token_divergence
from megarl.megatron.heads.kept import kept_log_probs
from megarl.megatron.heads.log_probs import token_log_probs
from megarl.megatron.heads.top_tokens import chosen_log_probs, top_divergence, top_tokens
from megarl.megatron.packing import PackedBatch


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
    top: int = 0,
    beta: float = 1.0,
    predicted: Sequence[Tensor] = (),
    **unused: Any,
) -> Tensor:
    """GPTModel's `output_processor` (megatron-core 0.19.2): log-probabilities (and entropies) of the labels.

    The settings after `context` are bound by `lm_head`; GPTModel's other arguments are not needed.

    Args:
        hidden_states: [tokens (/tp with sequence parallelism) or live, 1, hidden].
        output_weight: the shared embedding's weight where embeddings are tied; None: the layer's own.
        context: the batch, and the model chunk.
        top: how many of the most likely tokens are given, too; 0: none.
        beta: which divergence (`token_divergence`) from the tokens in the field REF_TOP_TOKENS, where the batch has it.
        predicted: the states of each layer of multi-token prediction, as `hidden_states` (`megarl.megatron.prediction`).

    Returns: float32 [tokens, columns]. The first 2 or 1 columns are as `token_log_probs`, or `kept_log_probs` where the batch has kept
        tokens. Where it has another model's head, 2 more: the divergence from it and its log-probability of the label
        (`token_divergence`). Where it has the most likely tokens of another model as a field, one more: the divergence over these
        (`top_divergence`). With `top` 2 x top more: the model's own most likely tokens' log-probabilities, and their numbers. All these
        are 0 where the batch's mask is false. For each layer in `predicted` one more: its log-probability of its token; 0 where that
        does not count.
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
    if batch.kept is None:
        found = token_log_probs(hidden, weight, labels, with_entropy=with_entropy, **settings)
    else:
        assert batch.other is None and REF_TOP_TOKENS not in batch.fields and not top, "checked"
        found = kept_log_probs(hidden, weight, labels, batch.kept, with_entropy=with_entropy, **settings)
    if batch.other is not None:
        other = batch.other
        compared = token_divergence(
            hidden, weight, other.hidden, other.weight, labels, **settings, beta=other.beta
        )
        found = torch.cat([found, compared], dim=1)
    if REF_TOP_TOKENS in batch.fields:
        log_q, ids = batch.fields[REF_TOP_TOKENS].index_select(0, batch.live).chunk(2, dim=1)
        log_p = chosen_log_probs(hidden, weight, ids.long(), **settings)
        found = torch.cat([found, top_divergence(log_p, log_q, beta)[:, None]], dim=1)
    if top:
        ids, log_q = top_tokens(hidden, weight, top, **settings)
        found = torch.cat([found, log_q, ids.float()], dim=1)  # exact: there are fewer than 2^24 tokens
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
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
    top: int = 0,
    beta: float = 1.0,
) -> partial:
    """A `head` for `step.forward_only` and `step.train_step` that gives [tokens, 1 or 2] log-probabilities
    (and entropies) of a packed batch's labels, and what `lm_output_processor` adds to them."""
    return partial(
        lm_output_processor,
        vocab_size=vocab_size,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        top=top,
        beta=beta,
    )


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
