"""Gradient buffers and optimizer states of a rank, as Megatron-core 0.19.2 lays them out.

Trained parameters of a model chunk lie end to end in buffers, one of dense weights and one of experts; with the
distributed optimizer each starts at a multiple of 64 elements, and a bucket's end is padded to one of the ranks that share
it (and of 128), which each have an equal part of its states. Frozen parameters are in no buffer and have no states. States
that are on the host pass through slots on the device (`megarl.megatron.host_adam`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from megarl.costs.parameters import LocalTensor, StageTensors, weight_bytes
from megarl.layout.grid import ParallelLayout

ALIGNMENT, PADDING = 64, 128  # elements: of a parameter's start, of a bucket's end
GRADIENT = 4  # bytes: gradients are summed in float32
MOMENTS = 8  # bytes: Adam's two, in float32
SLOTS, BUCKET = 3, 8 << 20  # of states on the host: buckets on the device, elements of each


@dataclass(frozen=True)
class TrainingBytes:
    """Of a rank, in bytes.

    Attributes:
        weights: frozen and trained ones, without adapters.
        adapters: trained, as far as they are in buffers with the padding of these.
        gradients: of trained parameters alone.
        optimizer: float32 copies of trained parameters that are not float32, and Adam's moments; or the slots for these.
        host: of these, where they are on the host (without what aligns them).
    """

    weights: int
    adapters: int
    gradients: int
    optimizer: int
    host: int = 0


def training_bytes(
    tensors: StageTensors,
    layout: ParallelLayout,
    *,
    itemsize: int,
    distributed: bool = True,
    overlap: bool = False,
    on_host: bool = False,
    first_stage: bool = True,
    fp8_block: tuple[int, int] | None = None,
    replica: tuple[int, int] = (0, 0),
) -> TrainingBytes:
    """What a rank of the stage holds.

    Args:
        itemsize: bytes of a parameter.
        distributed: `use_distributed_optimizer`. overlap: `overlap_grad_reduce`, which makes buckets. on_host: `optimizer_cpu_offload`.
        first_stage: of the pipeline, the only one that has buckets.
        fp8_block: blocks of the frozen projections, if they are in float8.
        replica: which of the ranks that share a dense weight's states (over data and context parallel ranks), and an
            expert's, it is.
    """
    trained = tensors.trained
    frozen = [tensor for tensor in tensors.weights if not tensor.trained]
    elements = states = sum(tensor.numel for tensor in trained)
    if distributed:
        buffers = list(_buffers(trained, layout, overlap and first_stage))
        elements = sum(buffer.numel for buffer in buffers)
        states = sum(buffer.elements_of(replica[int(buffer.expert)]) for buffer in buffers)
    own = itemsize * elements  # trained parameters, with what pads them
    if tensors.adapters:
        own = weight_bytes([tensor for tensor in tensors.weights if tensor.trained], itemsize)  # a value head
    return TrainingBytes(
        weights=weight_bytes(frozen, itemsize, fp8_block) + own,
        adapters=itemsize * elements - own,
        gradients=GRADIENT * elements,
        optimizer=_state(itemsize) * (SLOTS * BUCKET * (states > 0) if on_host else states),
        host=_state(itemsize) * states if on_host else 0,
    )


def _state(itemsize: int) -> int:
    """Bytes of an element's optimizer states: parameters in float32 are their own copy."""
    return MOMENTS + (4 if itemsize < 4 else 0)


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a chunk: its buckets, as (first element, end with padding), and where its parameters lie in it."""

    expert: bool
    ranks: int
    buckets: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return self.buckets[-1][1]

    def elements_of(self, rank: int) -> int:
        """Elements of parameters in the part of `rank` of each bucket."""
        total = 0
        for first, end in self.buckets:
            size = (end - first) // self.ranks
            low, high = first + rank * size, first + (rank + 1) * size
            total += sum(max(0, min(stop, high) - max(start, low)) for start, stop in self.spans)
        return total


def _buffers(trained: Sequence[LocalTensor], layout: ParallelLayout, buckets: bool) -> Iterator[_Buffer]:
    for chunk in sorted({tensor.chunk for tensor in trained}):
        for expert in (False, True):
            tensors = [tensor for tensor in trained if tensor.chunk == chunk and tensor.expert == expert]
            if tensors:
                ranks = layout.expert_dp if expert else layout.dp * layout.cp
                limit = max(40_000_000, 1_000_000 * layout.dp)
                yield _lay_out(tensors, ranks, limit if buckets and chunk == 0 else None)


def _lay_out(tensors: Sequence[LocalTensor], ranks: int, limit: int | None) -> _Buffer:
    """From the last parameter to the first; a bucket ends where it has `limit` elements, and around an embedding that
    another stage shares."""
    buckets: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    start, first = 0, 0  # of the next parameter, of the bucket

    def close(end: int) -> int:
        unit = lcm(ranks, PADDING)
        buckets.append((first, -(-end // unit) * unit))
        return buckets[-1][1]

    for tensor in reversed(tensors):
        start = -(-start // ALIGNMENT) * ALIGNMENT
        if tensor.shared and start > first:
            start = first = close(start)
        spans.append((start, start + tensor.numel))
        start += tensor.numel
        if tensor.shared or (limit is not None and start - first >= limit):
            start = first = close(start)
    if start > first:
        close(start)
    return _Buffer(tensors[0].expert, ranks, tuple(buckets), tuple(spans))
