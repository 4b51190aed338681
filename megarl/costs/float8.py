"""Bytes of training in float8: quantised tensors, and the copies of weights that a pass keeps.

As Transformer Engine 2.18 makes them (pytorch/tensor/float8_blockwise_tensor.py): a byte an element, and a scale in float32 for each 128
neighbours of a row, or of a column in the transposed copy that a weight's gradient needs; in a weight, for each block of 128 x 128. A weight
has both copies where a backward pass follows, else only the one by rows; they are there from the first micro-batch of a pass to its end.
"""

from collections.abc import Iterable
from math import prod

from megarl.config.schema.models import FLOAT8_BLOCK
from megarl.costs.tensors import LocalTensor, ModelUse, in_layer
from megarl.layout.grid import layers_of

_SCALE = 4  # bytes


def float8_layers(use: ModelUse, stage: int) -> frozenset[str]:
    """The names of a stage's layers that compute in float8."""
    return frozenset(
        f"{chunk}:decoder.layers.{index}."
        for chunk, layers in enumerate(layers_of(use.layout, use.config.num_layers, stage))
        for index, layer in enumerate(layers)
        if use.computes_in_float8(layer)
    )


def quantised(elements: int) -> int:
    """Bytes of a tensor with scales along one dimension."""
    return elements + _SCALE * -(-elements // FLOAT8_BLOCK)


def weight_copies(weights: Iterable[LocalTensor], layers: frozenset[str], backward: bool) -> int:
    """Bytes of the float8 copies of the weights of linear layers in `layers`."""
    total = 0
    for tensor in weights if layers else ():
        if tensor.projection and in_layer(tensor.name) in layers:
            rows, columns = (-(-size // FLOAT8_BLOCK) for size in tensor.shape)
            # A row of scales has a multiple of four.
            sides = [(rows, columns), (columns, rows)][: 1 + backward]
            total += sum(prod(tensor.shape) + _SCALE * a * (-(-b // 4) * 4) for a, b in sides)
    return total
