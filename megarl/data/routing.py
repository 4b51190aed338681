"""The experts that engines routed tokens to, as a column of trajectories.

A trajectory of n tokens, prompt and response, has n - 1 entries: its last token was chosen, but never passed through the model. An
entry has the experts of all layers that have some, top_k of each, as unsigned integers of 1 byte where a layer has no more than 256
experts, else of 2: 58 x 8 bytes a token for DeepSeek-V3. In Arrow and Parquet it is a binary value of fixed size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

ROUTED_EXPERTS = "routed_experts"


@dataclass(frozen=True)
class RoutingShape:
    """The shape of an entry.

    Attributes:
        layers: how many layers of the model have experts.
        top_k: experts of a token in a layer.
        num_experts: of a layer.
    """

    layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype:
        """The type of an expert's number."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else "<u2")

    @property
    def token_bytes(self) -> int:
        """The bytes of an entry."""
        return self.layers * self.top_k * self.dtype.itemsize

    def any_experts(self, num_tokens: int) -> np.ndarray:
        """A valid choice for tokens that count nowhere, [num_tokens, layers, top_k]."""
        first = np.arange(self.top_k, dtype=self.dtype)
        return np.broadcast_to(first, (num_tokens, self.layers, self.top_k))


def routing_column(routings: Sequence[np.ndarray], shape: RoutingShape) -> pa.ListArray:
    """The routings of trajectories as a column.

    Args:
        routings: one a trajectory, [tokens - 1, layers, top_k] of the shape's dtype.
    """
    return list_of_binary(*routing_values(routings, shape))


def routing_values(routings: Sequence[np.ndarray], shape: RoutingShape) -> tuple[np.ndarray, np.ndarray]:
    """The entries of all trajectories, [total] of a void type, and where each trajectory's begin, int64 [trajectories + 1]."""
    offsets = np.cumsum([0, *(len(routing) for routing in routings)])
    flat = np.concatenate([np.empty((0, shape.layers, shape.top_k), shape.dtype), *routings])
    assert flat.dtype == shape.dtype, (flat.dtype, shape)
    return flat.reshape(-1).view(f"V{shape.token_bytes}"), offsets


def binary_lists(values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of float32 [number, n], each row's bytes as one value: [total] of a void type, and the lists' offsets, int64 [lists + 1]."""
    offsets = np.cumsum([0, *map(len, values)])
    flat = np.ascontiguousarray(np.concatenate(values), np.float32)
    return flat.reshape(-1).view(f"V{flat.shape[1] * flat.itemsize}"), offsets


def list_of_binary(flat: np.ndarray, offsets: np.ndarray) -> pa.ListArray:
    """A column of lists of binary values; flat [total] of a void type."""
    kind = pa.binary(flat.itemsize)
    values = pa.FixedSizeBinaryArray.from_buffers(kind, len(flat), [None, pa.py_buffer(flat)])
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def binary_values(values: pa.FixedSizeBinaryArray) -> np.ndarray:
    """The values of an array without nulls, [total] of a void type; a view."""
    width = values.type.byte_width
    whole = np.frombuffer(values.buffers()[1], np.uint8, len(values) * width, values.offset * width)
    return whole.view(f"V{width}")


def routings(
    table: pa.Table, rows: Sequence[int], shape: RoutingShape, layers: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The entries of `rows` end to end, [total, len(layers), top_k], and how many each row has, int64 [rows].

    Args:
        layers: the layers that are asked for, numbered among the layers that have experts.

    Raises:
        ValueError: there is no such column, or it is of another model.
    """
    if ROUTED_EXPERTS not in table.column_names:
        raise ValueError(
            f"the trajectories have no column {ROUTED_EXPERTS!r}, which actor_rollout_ref.actor.router_replay=rollout needs: they "
            "were generated without it"
        )
    column = table.column(ROUTED_EXPERTS).take(pa.array(rows, pa.int64())).combine_chunks()
    if column.type.value_type != pa.binary(shape.token_bytes):
        raise ValueError(
            f"column {ROUTED_EXPERTS!r} has entries of type {column.type.value_type}; the model, with {shape.layers} layers of "
            f"{shape.num_experts} experts, has {shape.token_bytes} bytes a token"
        )
    counts = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    values = binary_values(column.flatten()).view(shape.dtype).reshape(-1, shape.layers, shape.top_k)
    if values.size and values.max() >= shape.num_experts:
        raise ValueError(
            f"column {ROUTED_EXPERTS!r} names expert {values.max()} of a model with {shape.num_experts} experts"
        )
    return values[:, list(layers)], counts
