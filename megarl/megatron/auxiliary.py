"""One number for each text of a packed micro-batch, with gradients, though context parallelism cuts every text."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.megatron.packed import PackedBatch, zigzag
from megarl.megatron.sequences import sum_over_ranks


def text_values(output: Tensor, batch: PackedBatch, cp_group: dist.ProcessGroup | None) -> Tensor:
    """What the head gives at each text's last token, on every context parallel rank: [texts].

    Gradients go to the rank that holds the token; they are the sum of those that all ranks have for the value, so each
    of `batch.cp` ranks takes a `batch.cp`-th of a loss that all of them compute.

    Args:
        output: [tokens] of this rank.
        batch: of `packing.pack_texts`.
        cp_group: the context parallel group; needed with cp > 1, where this and its backward pass are collectives.
    """
    assert output.shape == (batch.num_tokens,), (output.shape, batch.num_tokens)
    bounds = np.cumsum([0, *batch.aligned])
    text_at = np.full(bounds[-1], -1)
    text_at[batch.first] = np.arange(len(batch.first))
    own = text_at[zigzag(bounds, batch.cp)[batch.cp_rank]]
    texts = torch.from_numpy(own[own >= 0]).to(output.device)
    # index_put also where no text ends on this rank: its backward pass has collectives that it must take part in.
    values = output.new_zeros(len(batch.first)).index_put((texts,), output[batch.live])
    if batch.cp == 1:
        return values
    assert cp_group is not None and cp_group.size() == batch.cp
    return sum_over_ranks(values, cp_group)
