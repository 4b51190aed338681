"""Which values of a source go into which tensor of a target, and the tensors of one file put together."""

from collections import defaultdict
from functools import cached_property

import torch

from megarl.checkpoints.convert.sources import Source
from megarl.checkpoints.convert.targets import Item, Target
from megarl.layout import Box, Copy, make_plan
from megarl.models import keeps_float32

READ_ELEMENTS = 16 << 20  # no more of a Hugging Face tensor is read at a time


class Moves:
    """The copies of a conversion by the tensor that they fill, and that tensor's type."""

    def __init__(self, source: Source, target: Target, dtype: torch.dtype | None) -> None:
        self.source, self.target = source, target
        plan = make_plan(
            source.layout, target.layout, max_copy_bytes=READ_ELEMENTS
        )  # an element counts as one
        self._copies: dict[Item, list[Copy]] = {item: [] for item in target.items}
        places = {
            (item.local, item.box.start[: target.num_leading(item.local)]): item for item in target.items
        }
        for copy in plan.copies_to(0):
            at = copy.target_box.start[: target.num_leading(copy.target_local)]
            self._copies[places[copy.target_local, at]].append(copy)
        self._places = places
        self.dtypes = self._find_dtypes(dtype)

    def _find_dtypes(self, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
        """By target tensor: `dtype` (float32 for what is never anything else), or what its sources have."""
        found: dict[str, set[torch.dtype]] = defaultdict(set)
        for item, copies in self._copies.items():
            for copy in copies:
                chosen = torch.float32 if dtype and keeps_float32(copy.tensor) else dtype
                found[item.local].add(chosen or self.source.dtype(copy.source_local))
        mixed = [
            f"{local} ({', '.join(sorted(map(str, types)))})"
            for local, types in found.items()
            if len(types) > 1
        ]
        if mixed:
            raise ValueError(
                f"checkpoint {self.source.path} has several types where one tensor is made of them; "
                f"choose one with --dtype: {'; '.join(mixed)}"
            )
        return {local: next(iter(types)) for local, types in found.items()}

    def nbytes(self, item: Item) -> int:
        return item.box.numel * self.dtypes[item.local].itemsize

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.nbytes(item) for item in self.target.items)

    @cached_property
    def main_dtype(self) -> torch.dtype:
        """The type of most bytes."""
        totals: dict[torch.dtype, int] = defaultdict(int)
        for item in self.target.items:
            totals[self.dtypes[item.local]] += self.nbytes(item)
        return max(totals, key=totals.__getitem__)

    def files(self, shard_bytes: int) -> list[list[Item]]:
        """The items of each file: in order, up to `shard_bytes` a file."""
        files: list[list[Item]] = [[]]
        filled = 0
        for item in self.target.items:
            if files[-1] and filled + self.nbytes(item) > shard_bytes:
                files.append([])
                filled = 0
            files[-1].append(item)
            filled += self.nbytes(item)
        return files

    def assemble(self, items: list[Item]) -> dict[Item, torch.Tensor]:
        """The items' values; a vocabulary's padding is zero."""
        tensors = {}
        for item in items:
            padded = sum(copy.box.numel for copy in self._copies[item]) < item.box.numel
            make = torch.zeros if padded else torch.empty
            tensors[item] = make(item.box.size, dtype=self.dtypes[item.local])
        where = f"checkpoint {self.source.path}"
        for part in self.source.read([copy for item in items for copy in self._copies[item]]):
            local = part.copy.target_local
            item = self._places[local, part.box.start[: self.target.num_leading(local)]]
            place = part.box.inside(item.box, Box.whole(item.box.size))
            narrow_into(tensors[item][place.slices], part.values.reshape(place.size), where, part.copy.tensor)
            del part  # before the source reads the next
        return tensors


def narrow_into(target: torch.Tensor, values: torch.Tensor, where: str, name: str) -> None:
    """Copy values into a tensor of another type, perhaps.

    Raises:
        ValueError: a value is beyond the largest of that type, and would become infinite: of the tensor `name`, in `where`.
    """
    target.copy_(values)
    most = torch.finfo(target.dtype).max
    if most < torch.finfo(values.dtype).max and (lost := values.isfinite() & ~target.isfinite()).any():
        raise ValueError(
            f"{where}: {name} has values up to {values[lost].abs().max():g}, "
            f"{str(target.dtype).removeprefix('torch.')} holds none above {most:g}; choose another --dtype"
        )
