"""Slices on a GPU, many in one launch: read into a slot with their checksums, written into parameters, or hashed where they lie.

Guarantees:

- bytes and checksums are those of the torch code, `copy_`, `read_values`, `read_scales` and `multilinear`, as a CPU computes them; a
  NaN that is converted stays one;
- the number of launches does not depend on the number of slices, and the host does not wait: one clears the checksums, one takes
  all slices that are converted, one all that are quantised, with the scales;
- the addresses and sizes that a launch needs are brought to the device once (`SliceTable`), and again only when they have changed.

On a GPU torch itself (2.13) divides by a number like 448 by multiplying with its rounded reciprocal (BinaryDivTrueKernel.cu): 55 % of
its scales differ in the last bit from the quotients, which a CPU and these kernels compute.

A program takes a tile of a few thousand elements of one slice, or one block of quantised weights; hashes of tiles are added by atomic
additions of integers, whose sum does not depend on their order. The kernels (`triton_kernels`) are imported and compiled with the first
launch. They were interpreted on a CPU, and an H100 has run them (docs/gpu.md).
"""

from collections.abc import Sequence
from types import ModuleType

import torch

from megarl.weight_sync.packets import ALIGNMENT, checksum
from megarl.weight_sync.slice_table import TILE, SliceTable, power_of_two

STRIP = 2048  # elements of a block that a program has at a time
SMALLEST_PRODUCT = 16  # rows, columns and inner dimension of a product of matrices in Triton


def read_slices(table: SliceTable, slot: torch.Tensor, checksums: torch.Tensor) -> None:
    """Write the slices of a table `of_reads` into the slot, row-major, and the hashes of the written bytes into `checksums`.

    Args:
        slot: uint8, from an address that is a multiple of 16.
        checksums: int64 [slices], contiguous.
    """
    assert checksums.shape == (table.count,) and checksums.is_contiguous() and checksums.dtype == torch.int64
    _check_slot(table, slot)
    checksums.zero_()
    _launch_copies(table, slot, checksums, to_slot=True)
    if len(table.block_tiles):
        rows, columns = table.block
        computing, least = table.computing, 1 if table.computing is None else SMALLEST_PRODUCT
        width = max(least, power_of_two(columns))
        strip = max(least, min(STRIP // width, power_of_two(rows)))
        rank = computing.rank if computing is not None else 0
        kernels().read_blocks[(len(table.block_tiles),)](
            table.blocks,
            table.block_tiles,
            slot,
            checksums,
            rows,
            columns,
            strip,
            width,
            computing is not None,
            max(SMALLEST_PRODUCT, power_of_two(rank)) if rank else 0,
            # Products of bfloat16 and float16 numbers are exact in tf32, whose sums are float32.
            "ieee" if computing is not None and computing.exact else "tf32",
            enable_fp_fusion=False,  # each operation rounds, as torch's
        )


def write_slices(table: SliceTable, slot: torch.Tensor) -> None:
    """Copy the slices of a table `of_tensors` from the slot into their places in parameters of the same types."""
    _check_slot(table, slot)
    _launch_copies(table, slot, slot, from_slot=True)


def checksums_of(table: SliceTable) -> torch.Tensor:
    """The hashes of the slices of a table `of_tensors` where they lie: int64 [slices]."""
    checksums = torch.zeros(table.count, dtype=torch.int64, device=table.copies.device)
    _launch_copies(table, checksums, checksums)
    return checksums


def checksums_in_place(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The checksums of tensors of 1 to 3 dimensions where they lie, on a CPU or a GPU: int64 [tensors]."""
    if tensors and tensors[0].device.type != "cpu":
        return checksums_of(SliceTable.of_tensors(tensors))
    return torch.tensor([int(checksum(tensor)) for tensor in tensors], dtype=torch.int64)


def kernels() -> ModuleType:
    from megarl.weight_sync import triton_kernels

    return triton_kernels


def _launch_copies(
    table: SliceTable,
    slot: torch.Tensor,
    checksums: torch.Tensor,
    *,
    to_slot: bool = False,
    from_slot: bool = False,
) -> None:
    if len(table.copy_tiles):
        kernels().copy_slices[(len(table.copy_tiles),)](
            table.copies, table.copy_tiles, slot, checksums, TILE, to_slot, from_slot, num_warps=8
        )


def _check_slot(table: SliceTable, slot: torch.Tensor) -> None:
    assert slot.dtype == torch.uint8 and slot.is_contiguous() and slot.data_ptr() % ALIGNMENT == 0
    assert table.end <= len(slot), (table.end, len(slot))
