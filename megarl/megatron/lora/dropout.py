"""Dropout in adapters: random streams of their own, equal on ranks that hold the same numbers and on no others.

They are kept with Megatron's other streams, so layers that are computed again in the backward pass drop what they
dropped before. Megatron's own would not do: they are the same on all data and context parallel ranks (they start
weights there), and one of them is that of everything else that is random.
"""

import zlib

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

TENSOR, EXPERT, OWN = "lora-tensor-parallel", "lora-expert-tensor-parallel", "lora-own"
"""Streams: equal on the tensor parallel ranks of a layer, on those of an expert, on this rank alone."""


def start_streams(seed: int) -> None:
    """Begin the streams, unless they have begun; after `init_parallel`."""
    tracker = get_cuda_rng_tracker()
    groups = {
        TENSOR: parallel_state.get_tensor_model_parallel_group(),
        EXPERT: parallel_state.get_expert_tensor_parallel_group(),
        OWN: None,
    }
    for name, group in groups.items():
        if name in tracker.get_states():
            continue
        first = torch.distributed.get_rank()
        if group is not None:
            first = torch.distributed.get_process_group_ranks(group)[0]
        tracker.add(name, zlib.crc32(f"{seed} {name} {first}".encode()))


def drop(x: Tensor, share: float, stream: str) -> Tensor:
    """`x` with this share of its elements set to 0, and the others divided by what is left."""
    with get_cuda_rng_tracker().fork(stream):
        return torch.nn.functional.dropout(x, share, training=True)
