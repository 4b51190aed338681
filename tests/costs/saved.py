"""How many bytes autograd keeps for backward passes: the storages of saved tensors, each counted while it is kept."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch


@dataclass
class Kept:
    """Bytes that are kept now, their peak, and the tensors that were kept at the peak (by shape, type)."""

    now: int = 0
    peak: int = 0
    holders: Counter = field(default_factory=Counter)  # storage -> tensors that keep it
    shapes: dict[int, tuple] = field(default_factory=dict)
    at_peak: list[tuple] = field(default_factory=list)


class _SavedTensor:
    """Takes a saved tensor's place in the autograd graph, for as long as the graph keeps it."""

    def __init__(self, tensor: torch.Tensor, kept: Kept) -> None:
        self.tensor, self.kept = tensor, kept
        self.key, self.size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        kept.holders[self.key] += 1
        if kept.holders[self.key] == 1:
            kept.now += self.size
            kept.shapes[self.key] = (tuple(tensor.shape), str(tensor.dtype), self.size)
            if kept.now > kept.peak:
                kept.peak, kept.at_peak = kept.now, list(kept.shapes.values())

    def __del__(self) -> None:
        self.kept.holders[self.key] -= 1
        if not self.kept.holders[self.key]:
            self.kept.now -= self.size
            del self.kept.shapes[self.key], self.kept.holders[self.key]


@contextlib.contextmanager
def kept_tensors(but: Iterable[torch.Tensor]) -> Iterator[Kept]:
    """Counts within its `with` block; storages of `but` (parameters) and of integers (token ids) are left out."""
    kept, others = Kept(), {tensor.untyped_storage()._cdata for tensor in but}

    def pack(tensor: torch.Tensor) -> torch.Tensor | _SavedTensor:
        if tensor.untyped_storage()._cdata in others or not tensor.is_floating_point():
            return tensor
        return _SavedTensor(tensor, kept)

    def unpack(held: torch.Tensor | _SavedTensor) -> torch.Tensor:
        return held.tensor if isinstance(held, _SavedTensor) else held

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield kept
