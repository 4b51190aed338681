"""Fills a rank's tensors from a checkpoint that any layout saved: each chunk that has something for the rank is read once."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from megarl.checkpoints.dcp import Chunk, DCPReader, StoredTensor
from megarl.layout import Box
from megarl.megatron.checkpoint.places import OPTIMIZER, Item, relative


def mistakes_of(reader: DCPReader, items: Sequence[Item], padded: Mapping[str, int]) -> Iterator[str]:
    """Why a checkpoint cannot fill a rank's tensors, in words; nothing if it can. Reads no tensor.

    padded: as in `Places`; rows beyond the vocabulary may be there or not.
    """
    for item in items:
        stored = reader.tensors.get(item.key)
        if stored is None:
            yield f"{item.key} is missing; it should have shape {item.shape}"
        elif stored.dtype != item.tensor.dtype:
            yield f"{item.key} has dtype {stored.dtype}, this run has {item.tensor.dtype}"
        elif not _fits(stored.shape, item, padded):
            yield f"{item.key} has shape {stored.shape}, this run has {item.shape}"
        else:
            wanted = item.box.intersect(Box.whole(stored.shape))
            needed = wanted.numel if wanted is not None else 0
            found = sum(common.numel for _, common in _overlaps(stored, item.box))
            if found != needed:
                yield f"{item.key} is not whole: its chunks have {found} of {needed} elements at {item.box.start}"


def _fits(shape: tuple[int, ...], item: Item, padded: Mapping[str, int]) -> bool:
    if shape == item.shape:
        return True
    weight = item.key
    if weight.startswith(OPTIMIZER):
        weight = weight.removeprefix(OPTIMIZER).partition(".")[2]
    return weight in padded and shape[1:] == item.shape[1:] and shape[0] >= padded[weight]


def _overlaps(stored: StoredTensor, box: Box) -> Iterator[tuple[Chunk, Box]]:
    """The stored chunks that have a part of a box, with that part."""
    for chunk in stored.chunks:
        common = box.intersect(chunk.box)
        if common is not None:
            yield chunk, common


@torch.no_grad()
def fill(reader: DCPReader, items: Sequence[Item]) -> None:
    """Fill the tensors of `items` in place; rows of padding that the checkpoint lacks become zeros.

    Raises:
        ValueError: a file is damaged or not there.
    """
    wanted: dict[Chunk, list[tuple[Item, Box]]] = defaultdict(list)
    for item in items:
        stored = reader.tensors[item.key]
        if stored.shape != item.shape:
            item.tensor.zero_()
        for chunk, common in _overlaps(stored, item.box):
            wanted[chunk].append((item, common))
    for chunk in sorted(wanted, key=lambda chunk: (chunk.file, chunk.offset)):
        values = reader.load(chunk)
        for item, common in wanted[chunk]:
            leading = len(item.shape) - item.tensor.dim()
            target = item.tensor[relative(common, item.box, leading)]
            target.copy_(values[relative(common, chunk.box)].reshape(target.shape))
