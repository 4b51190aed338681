"""Slices on a GPU: the Triton kernels, interpreted on a CPU (`interpreted_slices`), do what torch does, and are compiled for an H100."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.gpu_test import slices
from megarl.shadow import device
from megarl.weight_sync import slice_kernels
from megarl.weight_sync.slice_table import TILE, CopyRow, SliceTable

needs_triton = pytest.mark.skipif(
    not (device.PACKAGES / "triton").is_dir(), reason="Triton is not installed for shadow runs"
)


def cases(how: str, folder: Path, *names: str, module: str = "interpreted_slices") -> dict[str, Any]:
    """The results of a module's cases, or of the cases `names`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder)}
    environment["TRITON_INTERPRET"] = "1" if how == "interpret" else "0"
    command = [sys.executable, "-m", f"tests.weight_sync.{module}", how, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return cases("interpret", tmp_path_factory.mktemp("triton"))


CASES = (
    "random_lists",
    "computed_weights",
    "all_sizes_of_bytes",
    "conversions",
    "float8",
    "blocks_that_are_cut",
    "not_a_number",
)


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_slices_and_checksums_are_those_of_torch(found: dict[str, Any], case: str) -> None:
    assert found[case] == []


@pytest.mark.slow
@needs_triton
def test_more_lists_and_weights_that_are_computed(tmp_path: Path) -> None:
    assert cases("interpret", tmp_path, "more_of_both") == {"more_of_both": []}


@needs_triton
def test_a_list_of_any_length_takes_one_launch_of_each_kernel(found: dict[str, Any]) -> None:
    both = {"copy_slices": 1, "read_blocks": 1}
    of_one = {"read": both, "write": {"copy_slices": 1}, "checksums": {"copy_slices": 1}}
    assert found["launches_of_lists"] == [of_one, of_one]
    assert found["empty_lists"] == [0, 0]


@needs_triton
def test_a_table_is_used_again_until_an_address_changes(found: dict[str, Any]) -> None:
    assert found["a_table_used_again"] == []


@needs_triton
def test_no_launch_leaves_its_parameters_or_its_slot(found: dict[str, Any]) -> None:
    assert found["refused"] == []


FAULTS = {
    "none": [],
    "offset": ["slot"],
    "stride": ["slot", "checksums"],
    "last byte": ["slot", "checksums"],
    "last tile": ["slot", "checksums"],
    "block": ["slot", "checksums"],
    "key": ["checksums"],
    "not cleared": ["checksums"],
    "place in the parameter": ["parameter"],
}


@needs_triton
def test_faults_of_tables_and_kernels_are_seen(found: dict[str, Any]) -> None:
    assert found["faults"] == FAULTS


@needs_triton
def test_the_compiler_takes_the_kernels_and_divides_as_torch_does(tmp_path: Path) -> None:
    """The compiler may refuse code that the interpreter accepts; and its default division does not round as IEEE 754 requires."""
    found = cases("compile", tmp_path)
    of_blocks = {"blocks", "adapters", "float32 adapters"}
    assert set(found) == {"read", "write", "checksums", *of_blocks}
    assert all(kernel.pop("bytes") > 0 for kernel in found.values())
    assert all(set(found.pop(name)) == {"div.rn.f32"} for name in of_blocks)
    assert not any(found.values())


def test_without_a_gpu_triton_is_not_imported() -> None:
    assert slice_kernels.read_slices
    assert "megarl.weight_sync.triton_kernels" not in sys.modules or importlib.util.find_spec("triton")


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5000,), (1,)),
        ((3, 1536), (4096, 1)),
        ((4096, 7168), (1 << 20, 1)),
        ((100, 4), (1, 1 << 22)),
        ((4096, 64), (1 << 25, 1)),
        ((60, 3000), (1, 1 << 25)),
        ((8, 30, 50), (1 << 40, 1 << 21, 3)),
    ],
)
def test_tiles_fill_a_slice_and_offsets_within_them_are_32_bits(shape, strides) -> None:
    """Float32 tensors without memory: a tile has 2,048 elements, 2**width_bits of them in a row."""
    tensor = torch.empty_strided(shape, strides, device="meta")
    table = SliceTable.of_tensors([tensor])
    (row,) = (CopyRow(*values) for values in table.copies.tolist())
    width, height = 1 << row.width_bits, TILE >> row.width_bits
    tiles = -(-row.size_1 // height) * -(-row.size_2 // width)
    assert len(table.copy_tiles) * row.size_1 * row.size_2 == tiles * tensor.numel()
    largest = (height - 1) * max(row.stride_1, row.size_2) + (width - 1) * row.stride_2
    assert largest < 2**31
    # The tiles of a slice with at least a tile's elements have at most twice the slice's elements.
    assert tensor.numel() < TILE or len(table.copy_tiles) * TILE <= 2 * tensor.numel()


def test_rows_that_are_all_of_the_memory_are_one_row_of_words() -> None:
    whole = torch.empty(64, 96, dtype=torch.bfloat16)
    parts = [
        whole,
        whole[8:20],
        whole[:, :32],
        whole[:, 1:33],
        whole[:, ::2],
        whole.view(torch.uint8)[:, 2:6],
    ]
    rows = [CopyRow(*values) for values in SliceTable.of_tensors(parts).copies.tolist()]
    shapes = [(row.size_1, row.size_2, row.stride_1, 1 << row.size_bits) for row in rows]
    assert shapes == [
        (1, 3072, 0, 4),
        (1, 576, 0, 4),
        (64, 16, 48, 4),
        (64, 32, 96, 2),
        (1, 3072, 0, 2),
        (64, 2, 96, 2),
    ]


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"
)


@pytest.mark.gpu
@needs_gpu
def test_the_host_does_not_wait() -> None:
    one = slices.drawn(0, "cuda", 8)
    slot = torch.empty(one.end, dtype=torch.uint8, device="cuda")
    checksums = torch.empty(len(one.reads), dtype=torch.int64, device="cuda")
    views = [torch.empty_like(part, device="cuda") for part in one.expected]
    torch.cuda.set_sync_debug_mode("error")
    try:
        slice_kernels.read_slices(SliceTable.of_reads(one.reads, slices.BLOCK), slot, checksums)
        table = SliceTable.of_tensors(views, [read.offset for read in one.reads])
        slice_kernels.write_slices(table, slot)
        slice_kernels.checksums_of(table)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("seed", range(20))
def test_on_a_gpu(seed: int) -> None:
    for listed in (slices.drawn(seed, "cuda", 8), slices.drawn_computed(seed, "cuda")):
        for name, found, expected in slices.compared(listed, "cuda"):
            assert torch.equal(found.cpu(), expected), name
