"""A frozen model's linear layers in float8: each weight is made from blocks for the layer's own computation, and again for
its backward pass, and is gone between them.

A layer's `weight` (of experts `weight0`, ...) is a float8 parameter next to its scales (`weight_scale_inv`;
see `megarl.models.float8`). While the layer computes, the weight itself stands in its place and the scales are no parameters of
the layer, since Transformer Engine refuses layers with parameters of several types; the weight that autograd would keep is
made anew when the backward pass needs it.

Guarantees, each asserted by a test: outputs and gradients equal, bit for bit, those of the model whose weights have been
quantised and dequantised; a model is built and loaded without ever having more than one layer's weights in another type.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl import platform
from megarl.models.computed import ComputedWeight, LowRankTerm
from megarl.models.float8 import FP8, SCALES, Block, dequantise, dequantise_all, in_blocks


@dataclass(frozen=True)
class Float8Base:
    """Which of a rank's weights are in float8.

    Attributes:
        shapes: local name -> shape (`base_weights`).
        block: rows and columns that share a scale.
    """

    shapes: dict[str, tuple[int, int]]
    block: Block

    def of_chunk(self, chunk: int) -> "Float8Base":
        """A model chunk's float8 weights, by their names in it."""
        prefix = f"{chunk}:"
        own = {
            name.removeprefix(prefix): shape for name, shape in self.shapes.items() if name.startswith(prefix)
        }
        return Float8Base(own, self.block)


@contextlib.contextmanager
def unallocated(base: Float8Base) -> Iterator[None]:
    """While this is active, modules that are built get parameters of these shapes without memory, on torch's device
    "meta"; `allocate` gives it to them."""
    shapes = set(base.shapes.values())

    def take(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if parameter is None or tuple(parameter.shape) not in shapes:
            return None
        return _like(parameter, parameter.data.to("meta"))

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(take)
    try:
        yield
    finally:
        hook.remove()


def allocate(model: torch.nn.Module, base: Float8Base) -> None:
    """Allocate the tensors that `unallocated` left without memory: the base in float8, others of its shapes in their own type."""
    layers: dict[torch.nn.Module, list[str]] = {}
    for name, parameter in list(model.named_parameters()):
        path, _, kind = name.rpartition(".")
        layer = model.get_submodule(path)
        if name in base.shapes:
            layers.setdefault(layer, []).append(kind)
        elif parameter.is_meta:
            setattr(layer, kind, _like(parameter, torch.empty_like(parameter.data, device=platform.device())))
    for layer, kinds in layers.items():
        hold_in_float8(layer, kinds, base.block)


def hold_in_float8(layer: torch.nn.Module, kinds: list[str], block: Block) -> None:
    """Turn the parameters `kinds` of a linear layer into blocks (zeros, to be loaded), from which it computes."""
    for kind in kinds:
        weight, device = layer.get_parameter(kind), platform.device()
        held = _like(weight, torch.zeros(weight.shape, dtype=FP8, device=device))
        held.block, held.exact_dtype = block, weight.dtype
        scales = torch.ones(in_blocks(weight.shape, block), dtype=torch.float32, device=device)
        setattr(layer, kind, held)
        layer.register_parameter(kind + SCALES, torch.nn.Parameter(scales, requires_grad=False))
    use = _LayerComputation(kinds)
    layer.register_forward_pre_hook(use.begin)
    layer.register_forward_hook(use.end, always_call=True)


def exact_weight(layer: torch.nn.Module, kind: str = "weight") -> Tensor:
    """A linear layer's weight: its own parameter, or a new tensor where it is held in float8."""
    weight = layer.get_parameter(kind)
    if weight.dtype != FP8:
        return weight
    return dequantise(weight.data, layer.get_parameter(kind + SCALES).data, weight.block, weight.exact_dtype)


def computed_weight(layer: torch.nn.Module, kind: str, term: LowRankTerm | None) -> ComputedWeight:
    """What a linear layer's weight is computed from, with adapters merged into it if `term` has any."""
    weight = layer.get_parameter(kind)
    if weight.dtype != FP8:
        return ComputedWeight(weight.data, None, None, weight.dtype, term)
    scales = layer.get_parameter(kind + SCALES).data
    return ComputedWeight(weight.data, scales, weight.block, weight.exact_dtype, term)


def _exact_weights(layer: torch.nn.Module, kinds: list[str]) -> Tensor:
    """Weights of one shape that a layer holds in float8, as one new tensor [weights, out, in]."""
    held = [layer.get_parameter(kind) for kind in kinds]
    scales = [layer.get_parameter(kind + SCALES).data for kind in kinds]
    return dequantise_all([weight.data for weight in held], scales, held[0].block, held[0].exact_dtype)


class _LayerComputation:
    """One computation of a layer with its weights in the place of their blocks."""

    def __init__(self, kinds: list[str]) -> None:
        self._kinds = kinds
        self._held: dict[str, torch.nn.Parameter] = {}  # the layer's own parameters, scales included
        self._saving = contextlib.ExitStack()

    def begin(self, layer: torch.nn.Module, inputs: tuple) -> None:
        """Forward pre-hook."""
        for kind in self._kinds:
            self._held[kind] = layer.get_parameter(kind)
        every = _exact_weights(layer, self._kinds)
        made = {
            kind: _like(self._held[kind], weight) for kind, weight in zip(self._kinds, every, strict=True)
        }
        storage, size = every.untyped_storage()._cdata, every[0].numel()
        anew: dict[int, Tensor] = {}  # weights that the backward pass has not asked for yet

        def pack(tensor: Tensor) -> Tensor | tuple:
            if tensor.untyped_storage()._cdata != storage:
                # Not the tensor itself: an output that held itself would never be freed.
                return tensor.detach()
            number, offset = divmod(tensor.storage_offset(), size)
            return number, tensor.shape, tensor.stride(), offset

        def unpack(packed: Tensor | tuple) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            number, shape, strides, offset = packed
            if number not in anew:  # all at once, as a layer asks for all
                anew.update(enumerate(_exact_weights(layer, self._kinds)))
            weight = anew.pop(number)
            return weight.as_strided(shape, strides, weight.storage_offset() + offset)

        self._saving.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        for kind, weight in made.items():
            self._held[kind + SCALES] = layer._parameters.pop(kind + SCALES)
            setattr(layer, kind, weight)

    def end(self, layer: torch.nn.Module, inputs: tuple, output: object) -> None:
        """Forward hook, also after an error."""
        self._saving.close()
        made = [layer._parameters[kind] for kind in self._kinds if kind in self._held]
        for name, held in self._held.items():
            layer._parameters[name] = held
        for weight in made:
            if weight.dtype != FP8:  # else an error came before it was made
                # Transformer Engine 2.18 keeps the parameter itself for its backward pass, which never looks at it
                # (module/layernorm_linear.py, `ctx.weight`).
                weight.data = weight.data.new_empty(0)
        self._held.clear()


def _like(parameter: torch.nn.Parameter, values: Tensor) -> torch.nn.Parameter:
    """A frozen parameter with these values and the marks that Megatron put on `parameter`."""
    made = torch.nn.Parameter(values, requires_grad=False)
    made.__dict__.update(parameter.__dict__)
    return made
