"""Distributed checkpoints as Megatron itself saves and loads them, on the ranks of a layout."""

import os
import queue
from typing import Any

import torch

from megarl.checkpoints.hf.load import load_hf_weights
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, local_parameters
from megarl.megatron.layer_spec import layer_modules, layer_spec
from megarl.megatron.parallel import init_parallel
from megarl.megatron.transformer_config import rope_arguments, transformer_config
from megarl.models import padded_vocab_size, read_model_config


def build(rank: int, world: int, layout: dict[str, Any], model: str) -> list[Any]:
    """This rank's chunks of the model at the Hugging Face folder `model`, with random weights."""
    layout = ParallelLayout(world=world, **layout)
    init_parallel(layout, rank, world)
    return build_model(read_model_config(model), layout, dtype=torch.float32, trainable=False)


def sharded_states(chunks: list[Any], metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    """Megatron's own description of the chunks, under the names that Megatron-LM gives them."""
    from megatron.core import parallel_state

    metadata = {
        **(metadata or {}),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    return {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)
    }


def save(
    rank: int,
    world: int,
    layout: dict[str, Any],
    model: str,
    folder: str,
    stacked: bool | None = None,
) -> None:
    """Load the model's weights into the layout and save them with Megatron; `stacked`: whether layers are stacked; None: Megatron's default."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    chunks = build(rank, world, layout, model)
    config = read_model_config(model)
    load_hf_weights(model, config, ParallelLayout(world=world, **layout), rank, local_parameters(chunks))
    metadata = {} if stacked is None else {"non_homogeneous_layers": not stacked}
    if stacked and config.moe is not None:  # the value that Megatron-LM sets where all layers have experts
        for chunk in chunks:
            chunk.config.moe_layer_freq = 1
    # Megatron-core 0.19.2 starts a process for a queue even where it saves in the same process.
    filesystem_async._results_queue = queue.Queue()
    states = sharded_states(chunks, metadata)
    if rank == 0:
        os.makedirs(folder)
    torch.distributed.barrier()
    dist_checkpointing.save(states, folder, content_metadata=metadata)
    filesystem_async._results_queue = None


def load(
    rank: int,
    world: int,
    layout: dict[str, Any],
    model: str,
    folder: str,
) -> list[str]:
    """Load a checkpoint with Megatron, as Megatron-LM does; returns the parameters that differ from the model's weights."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    chunks = build(rank, world, layout, model)
    metadata = dist_checkpointing.load_content_metadata(folder)
    states, missing, unexpected = dist_checkpointing.load(
        sharded_states(chunks, metadata), folder, strict=StrictHandling.RETURN_ALL
    )
    assert not unexpected, unexpected
    assert not [key for key in missing if "_extra_state" not in key], missing
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(states["model" if len(chunks) == 1 else f"model{index}"], strict=True)
    loaded = {name: tensor.clone() for name, tensor in local_parameters(chunks).items()}
    config = read_model_config(model)
    expected = {name: torch.full_like(tensor, torch.nan) for name, tensor in loaded.items()}
    load_hf_weights(model, config, ParallelLayout(world=world, **layout), rank, expected)
    return [name for name, tensor in loaded.items() if not torch.equal(tensor, expected[name])]


def load_with_mtp(
    rank: int, world: int, model: str, folder: str
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Load a checkpoint into a model with its multi-token prediction layers, on one rank.

    Returns: the model's parameters, and the names of further entries of the checkpoint.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config, layout = read_model_config(model), ParallelLayout(world=1)
    init_parallel(layout, rank, world)
    settings = transformer_config(config, layout, torch.float32, None)
    settings.mtp_num_layers = config.num_mtp_layers
    with layer_modules():
        spec = layer_spec(settings, None, last=False)
        chunk = GPTModel(
            config=settings,
            transformer_layer_spec=spec,
            mtp_block_spec=get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=True),
            vocab_size=padded_vocab_size(config, 1),
            max_sequence_length=config.max_position_embeddings,
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            **rope_arguments(config),
        )
    metadata = dist_checkpointing.load_content_metadata(folder)
    states, missing, unexpected = dist_checkpointing.load(
        sharded_states([chunk], metadata), folder, strict=StrictHandling.RETURN_ALL
    )
    assert not unexpected, unexpected
    chunk.load_state_dict(states["model"], strict=True)
    return local_parameters([chunk]), sorted(missing)
