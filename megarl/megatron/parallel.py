"""The process groups that carry a parallel layout (see `megarl.layout.grid`).

Guarantee, with a test of its own: after `destroy_parallel` the same process can take a place in any other
layout.
"""

from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as tensor_parallel_random
from torch.distributed import Store

from megarl import platform
from megarl.layout.grid import ParallelLayout, RankCoords


def init_parallel(
    layout: ParallelLayout,
    rank: int,
    world_size: int,
    *,
    init_method: str | None = None,
    store: Store | None = None,
    timeout_s: float = 600,
    seed: int = 1,
) -> None:
    """Take this process's place in `layout`: torch.distributed, Megatron's groups, random streams.

    Args:
        init_method, store: where ranks meet ("file:///path", or a store that they share); not needed where the default
            process group exists already, which is then used as it is.
        timeout_s: after this time, in seconds, a collective that others did not join raises.
        seed: of Megatron's random streams (it adds the ranks to it where streams must differ).
    """
    assert layout.world == world_size, (layout, world_size)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            platform.backend(),
            init_method=init_method,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (rank, world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=timeout_s / 60,
    )
    tensor_parallel_random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def coords() -> RankCoords:
    """This process's place, as Megatron's groups have it."""
    return RankCoords(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
    )


def context_parallel_group() -> torch.distributed.ProcessGroup:
    """The ranks that share this rank's sequences."""
    return parallel_state.get_context_parallel_group()


def destroy_parallel() -> None:
    """Leave the layout and the process group, so that this process can join another one."""
    parallel_state.destroy_model_parallel()
    # megatron-core 0.19.2 leaves these two behind: groups of the old layout, and random streams whose
    # next initialisation would be skipped.
    parallel_state._global_process_group_list = None
    tensor_parallel_random.initialize_rng_tracker(force_reset=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
