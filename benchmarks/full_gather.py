"""The usual way of giving an engine new weights, to measure megarl's against: every rank gathers every full tensor.

This is what verl 0.9 and slime do after each update, in the form that suits a CPU best: tensors go in buckets, each bucket
is one all-gather over the trainer ranks (of exactly what each has to give, replicas once: broadcasts that
run at the same time, as gloo's own all-gather wants equal parts), and what every rank holds anyway is not gathered. Each rank so has every full tensor, in memory that its engine rank
maps; the engine rank copies its slices of them into its parameters. Nothing is verified.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from megarl.layout import Box, Copy, Layout, make_plan


@dataclass(frozen=True)
class FullGather:
    """The way from `source` (trainer ranks) through `whole` (full tensors) to `target` (engine ranks)."""

    source: Layout
    whole: Layout
    target: Layout
    dtype: torch.dtype
    bucket_bytes: int

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {piece.tensor: piece.box.size for piece in self.whole.pieces(0)}

    @cached_property
    def buckets(self) -> list[list[str]]:
        """Names of the tensors of each bucket; one that is larger than a bucket is alone in it."""
        buckets: list[list[str]] = [[]]
        filled = 0
        for name, shape in self.shapes.items():
            size = torch.Size(shape).numel() * self.dtype.itemsize
            if filled and filled + size > self.bucket_bytes:
                buckets.append([])
                filled = 0
            buckets[-1].append(name)
            filled += size
        return buckets

    @cached_property
    def common(self) -> set[str]:
        """Tensors that every rank holds as a whole."""
        whole = [
            {
                piece.tensor
                for piece in self.source.pieces(rank)
                if piece.box == Box.whole(self.shapes[piece.tensor])
            }
            for rank in range(self.source.num_ranks)
        ]
        return set.intersection(*whole)

    @cached_property
    def bucket_size(self) -> int:
        """Bytes of the full tensors of the fullest bucket."""
        return max(sum(torch.Size(self.shapes[name]).numel() for name in names) for names in self.buckets) * (
            self.dtype.itemsize
        )

    def contributions(self) -> list[list[list[Copy]]]:
        """By bucket and rank, what the rank contributes to the all-gather."""
        plan = make_plan(self.source, self.whole)
        bucket_of = {name: index for index, names in enumerate(self.buckets) for name in names}
        found: list[list[list[Copy]]] = [[[] for _ in range(self.source.num_ranks)] for _ in self.buckets]
        for copy in plan.copies:
            if copy.tensor not in self.common:
                found[bucket_of[copy.tensor]][copy.source_rank].append(copy)
        return found

    def views(self, flat: torch.Tensor, bucket: int) -> dict[str, torch.Tensor]:
        """The full tensors of a bucket, laid end to end in `flat`."""
        sizes = [torch.Size(self.shapes[name]).numel() for name in self.buckets[bucket]]
        parts = flat[: sum(sizes)].split(sizes)
        return {
            name: part.view(self.shapes[name]) for name, part in zip(self.buckets[bucket], parts, strict=True)
        }


class Gatherer:
    """A trainer rank: `gather` puts the full tensors of a bucket into `self.full`."""

    def __init__(
        self, way: FullGather, rank: int, parameters: Mapping[str, torch.Tensor], full: torch.Tensor
    ) -> None:
        self.way, self.rank, self.parameters, self.full = way, rank, parameters, full
        self.contributions = way.contributions()
        self.sizes = [
            [sum(copy.box.numel for copy in copies) for copies in bucket] for bucket in self.contributions
        ]
        most = [max(sizes) for sizes in zip(*self.sizes, strict=True)]
        self.buffers = [torch.empty(size, dtype=way.dtype) for size in most]
        self.bytes_received = 0
        held = {piece.tensor: piece for piece in way.source.pieces(rank) if piece.tensor in way.common}
        self.held = {name: parameters[piece.local][piece.local_box.slices] for name, piece in held.items()}

    @property
    def extra_bytes(self) -> int:
        """Of the buffers that the gathering takes."""
        return sum(tensor.nbytes for tensor in (*self.buffers, self.full))

    def gather(self, bucket: int) -> None:
        views, sizes = self.way.views(self.full, bucket), self.sizes[bucket]
        parts = [buffer[:size] for buffer, size in zip(self.buffers, sizes, strict=True)]
        at = 0
        for copy in self.contributions[bucket][self.rank]:
            parts[self.rank][at : at + copy.box.numel].view(copy.box.size).copy_(
                self.parameters[copy.source_local][copy.source_box.slices]
            )
            at += copy.box.numel
        works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts) if len(part)]
        for work in works:
            work.wait()
        self.bytes_received += (sum(sizes) - sizes[self.rank]) * self.way.dtype.itemsize
        for part, copies in zip(parts, self.contributions[bucket], strict=True):
            at = 0
            for copy in copies:
                views[copy.tensor][copy.box.slices].copy_(part[at : at + copy.box.numel].view(copy.box.size))
                at += copy.box.numel
        for name, view in views.items():
            if name in self.held:
                view.copy_(self.held[name])


def loader(
    way: FullGather, rank: int, parameters: Mapping[str, torch.Tensor], full: torch.Tensor
) -> Callable[[int], None]:
    """For an engine rank: a function that copies its slices of a bucket's full tensors into its parameters."""
    pieces: dict[str, list] = {}
    for piece in way.target.pieces(rank):
        pieces.setdefault(piece.tensor, []).append(piece)

    def load(bucket: int) -> None:
        for name, tensor in way.views(full, bucket).items():
            for piece in pieces.get(name, ()):
                parameters[piece.local][piece.local_box.slices].copy_(tensor[piece.box.slices])

    return load
