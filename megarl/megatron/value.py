"""The value head: one number a token from the last stage's hidden states."""

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.megatron.packed import PackedBatch


def value_head(*, hidden_states: Tensor, context: tuple[PackedBatch, GPTModel], **_: Any) -> Tensor:
    """GPTModel's `output_processor` (megatron-core 0.19.2) for a model built with head="value".

    What `step.forward_only` and `step.train_step` take as `head`. The head is replicated over tensor-parallel
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
        # Every rank computes the same loss of all values, so each token's gradient is already whole on the
        # rank that holds the token: it is split back, not summed.
        values = gather_from_sequence_parallel_region(
            values, tensor_parallel_output_grad=False, group=model.pg_collection.tp
        )
    values = batch.live_rows(values.flatten())
    return values.new_zeros(batch.num_tokens).index_copy(0, batch.live, values)
