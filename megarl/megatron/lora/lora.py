"""Low-rank adapters on a Megatron model, in every layout: attached, started, switched on and off.

An adapter is a submodule of the layer whose output it changes, by a forward hook (a router's logits in its `gating`): the
layers, their names and their weights stay unchanged.

Guarantees, each asserted by a test: the gradients equal those of PEFT's adapters on the Hugging Face model in every
layout; with adapters off a layer's output is the same as without them.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megarl.config.schema.models import LoraConfig
from megarl.layout.boxes import Piece
from megarl.layout.grid import ParallelLayout, RankCoords, layers_of
from megarl.megatron.lora.adapter import Adapter, ExpertAdapter, LayerAdapters, adapters_in, start_streams
from megarl.megatron.parallel import coords
from megarl.models import MegatronPlace, ModelConfig, megatron_pieces
from megarl.models.lora import (
    ADAPTER,
    A,
    AdapterSlot,
    adapted_weights,
    adapter_pieces,
    adapter_slots,
    check_expert_groups,
    group_size,
    sharded_dimension,
)
from megarl.models.shards import Shapes


def attach_adapters(
    chunks: list[GPTModel],
    config: ModelConfig,
    layout: ParallelLayout,
    lora: LoraConfig,
    *,
    adapter: str = ADAPTER,
    seed: int = 1,
) -> list[torch.nn.Module]:
    """Freeze the model and give its linear layers adapters, whose outputs are 0; returns them.

    The only trainable parameters then are the adapters'. Call it before `wrap_for_training`, and with weights loaded
    if `lora.use_dora`.

    Args:
        adapter: the name of the submodule, so that a model may have several sets.
        seed: of A, which starts equal in every layout.

    Raises:
        ValueError: a pattern fits nothing; experts do not divide into groups in this layout.
    """
    weights = adapted_weights(config, lora)
    check_expert_groups(config, lora, layout.ep)
    place = coords()
    pieces = rank_pieces(config, layout, place)
    if lora.dropout:
        start_streams(seed)
    # A layer of experts has several slots, which one module holds.
    attached: list[tuple[torch.nn.Module, LayerAdapters]] = []
    by_module: dict[str, list[AdapterSlot]] = {}
    for slot in adapter_slots(pieces, weights):
        by_module.setdefault(slot.module, []).append(slot)
    for name, slots in by_module.items():
        chunk, path = name.split(":", 1)
        layer = chunks[int(chunk)].get_submodule(path)
        made = _make(chunks[int(chunk)], layer, slots, lora, weights)
        layer.register_module(adapter, made)
        attached.append((layer, made))
    # Freeze everything first: the adapters are then the only parameters with gradients.
    for chunk in chunks:
        chunk.requires_grad_(False)
        _start_gradients(chunk)
    for _, made in attached:
        made.requires_grad_(True)
    local = {
        f"{index}:{name}": parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }
    _start(local, adapter_pieces(pieces, weights, lora, adapter), weights, seed)
    if lora.use_dora:
        # Magnitudes are norms of the loaded weights, so they start after A and B have values.
        for layer, made in attached:
            made.start_magnitudes(layer)
    return [made for _, made in attached]


@contextlib.contextmanager
def only_adapters(chunks: list[torch.nn.Module], adapter: str | None) -> Iterator[None]:
    """While this is active, only the adapters of this name are on; None: none, the model is as it was loaded."""
    found = [(name, module, module.on) for chunk in chunks for _, name, module in adapters_in(chunk)]
    for name, module, _ in found:
        module.on = name == adapter
    try:
        yield
    finally:
        for _, module, was in found:
            module.on = was


def rank_pieces(config: ModelConfig, layout: ParallelLayout, place: RankCoords) -> list[Piece]:
    """The pieces of the model's weights that this rank has, and where they lie."""
    at = MegatronPlace(layout.tp, place.tp, layout.ep, place.ep, layout.etp, place.etp)
    return megatron_pieces(
        config,
        at,
        layers=layers_of(layout, config.num_layers, place.pp),
        first_stage=place.pp == 0,
        last_stage=place.pp == layout.pp - 1,
    )


def _make(
    chunk: GPTModel, layer: torch.nn.Module, slots: list[AdapterSlot], lora: LoraConfig, weights: Shapes
) -> LayerAdapters:
    """The adapters of a layer, hooked to it."""
    slot, settings = slots[0], chunk.config
    cut = sharded_dimension(slot, weights[slot.tensors[0]])
    if slot.number is None:
        made = Adapter(layer, slot, lora, cut, settings.sequence_parallel, settings.params_dtype)
        if isinstance(layer, TopKRouter):  # its output is which experts are chosen, not its linear layer's
            layer.gating = partial(_adapt_router, made, layer, layer.gating)
        else:
            layer.register_forward_hook(partial(_adapt, made, 1))
    else:
        size = group_size(weights, lora, slot.tensors[0])
        group = chunk.pg_collection.expt_tp
        made = ExpertAdapter(layer, slots, lora, cut, group, size, settings.params_dtype)
        layer.register_forward_hook(partial(_adapt, made, 2))  # tokens, and how many each expert has
    return made


def _adapt(
    adapter: LayerAdapters, num_inputs: int, layer: torch.nn.Module, inputs: tuple, output: tuple
) -> tuple | None:
    """Forward hook of a linear layer, whose output is (output, bias to be added later).

    num_inputs: how many of the layer's inputs the adapter is given.
    """
    return (adapter(layer, *inputs[:num_inputs], output[0]), *output[1:]) if adapter.on else None


def _adapt_router(
    adapter: Adapter, router: torch.nn.Module, gating: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    """In place of a router's `gating`, which makes logits [..., experts] of tokens [..., hidden]."""
    logits = gating(x)
    return adapter(router, x, logits) if adapter.on else logits


def _start_gradients(chunk: GPTModel) -> None:
    """Have gradients flow from the embedding on though it is frozen: layers that are computed again in the backward
    pass, and pipeline stages, need an input that asks for them."""
    if not chunk.pre_process:
        return

    def ask(module: torch.nn.Module, inputs: tuple, output: Tensor) -> None:
        if torch.is_grad_enabled() and not output.requires_grad:
            output.requires_grad_(True)

    chunk.embedding.register_forward_hook(ask)


@torch.no_grad()
def _start(local: Mapping[str, Tensor], pieces: list[Piece], weights: Shapes, seed: int) -> None:
    """A as PEFT draws it, uniform up to 1 / sqrt(in), by its name: the same in every layout. B stays 0."""
    written = set()
    for tensor, box, name, place in pieces:
        if not tensor.endswith(A) or (name, place) in written:
            continue
        written.add((name, place))
        columns = weights[tensor.removesuffix(A) + ".weight"][1]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {tensor}".encode()))
        drawn = torch.empty(box.size[0], columns).uniform_(-1, 1, generator=generator) / columns**0.5
        local[name][place.slices].copy_(drawn[box.slices])
