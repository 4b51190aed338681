"""Cases of the weight sync's Triton kernels, interpreted on a CPU or compiled: `python -m tests.weight_sync.interpreted_slices interpret`
(with TRITON_INTERPRET=1) or `... compile` prints {case: result} as JSON.

They have a process of their own: Triton reads the variable when it is imported, and other packages would notice that it can be imported.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch

from megarl.gpu_test import slices
from megarl.gpu_test.slices import BLOCK, Listed, Pair
from megarl.layout.boxes import Box
from megarl.models.float8 import FP8, in_blocks
from megarl.weight_sync import slice_kernels
from megarl.weight_sync.packets import CONVERT, QUANTISE, SCALE, aligned
from megarl.weight_sync.slice_kernels import checksums_of, read_slices, write_slices
from megarl.weight_sync.slice_table import TILE, BlockRow, CopyRow, SliceRead, SliceTable
from tests.kernel_cases import print_cases

DRAWN = 24  # of each kind; all except the next numbers run with --slow, since each takes up to a second
OFTEN, OFTEN_COMPUTED = 8, 3
OFFSET, SIZE, STRIDE = (CopyRow._fields.index(name) for name in ("offset", "size_2", "stride_1"))
ADDRESS, EXTENT = CopyRow._fields.index("address"), BlockRow._fields.index("extent_1")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def listed(
    slices_: list[tuple[torch.Tensor, Box | None, torch.dtype, str]], block: tuple[int, int]
) -> Listed:
    """A list of (source, box (None: all of it), type that is sent, reading), packed end to end."""
    found, at = Listed([], []), 0
    for source, box, dtype, reading in slices_:
        if box is None:
            box = Box.whole(in_blocks(source.shape, block) if reading == SCALE else tuple(source.shape))
        read = SliceRead(source, box, name_of(dtype), reading, at)
        found.reads.append(read)
        found.expected.append(slices.by_torch(read, block))
        at = aligned(at + found.expected[-1].nbytes)
    return found


def differing(pairs: Iterator[Pair]) -> list[str]:
    return [name for name, found, expected in pairs if not torch.equal(found, expected)]


def read(one: Listed, block: tuple[int, int] = BLOCK) -> list[str]:
    """Differences from torch when the kernels read a list with these blocks."""
    return read_with(SliceTable.of_reads(one.reads, block), one)


def read_with(table: SliceTable, one: Listed) -> list[str]:
    slot = torch.full((aligned(one.end) + 16,), slices.GUARD, dtype=torch.uint8)
    checksums = torch.full((len(one.reads),), 5)
    read_slices(table, slot, checksums)
    return differing(slices.compared_reads(one, slot, checksums))


def random_lists(seeds: range = range(1000, 1000 + OFTEN)) -> list[str]:
    found = []
    for seed in seeds:
        found += [f"{seed} {name}" for name in differing(slices.compared(slices.drawn(seed, "cpu"), "cpu"))]
    return found


def computed_weights(seeds: range = range(2000, 2000 + OFTEN_COMPUTED)) -> list[str]:
    found = []
    for seed in seeds:
        listed_ = slices.drawn_computed(seed, "cpu")
        found += [f"{seed} {name}" for name in differing(slices.compared(listed_, "cpu"))]
    return found


def more_of_both() -> list[str]:
    lists, weights = range(1000 + OFTEN, 1000 + DRAWN), range(2000 + OFTEN_COMPUTED, 2000 + DRAWN)
    return random_lists(lists) + computed_weights(weights)


def all_sizes_of_bytes() -> list[str]:
    """Last words of every size, starts at every byte of a word, and tiles that are just full."""
    raw = torch.randint(0, 256, (3 * TILE,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    parts = [raw[first : first + size] for first in range(4) for size in range(1, 10)]
    parts += [raw[first : first + TILE + more] for first in (0, 1) for more in (-1, 0, 1)]
    parts += [raw[: 4 * size].view(4, size)[:, : size - 1] for size in (2, 6, 8, 9)]
    return differing(
        slices.compared(listed([(part, None, torch.uint8, CONVERT) for part in parts], BLOCK), "cpu")
    )


def conversions() -> list[str]:
    """All numbers of 16 bits, and float32 numbers of all magnitudes, to each other type, without NaN."""
    bits = torch.randint(-(2**31), 2**31, (3 * TILE,), generator=torch.Generator().manual_seed(2)).to(
        torch.int32
    )
    halves = torch.arange(-(2**15), 2**15).to(torch.int16)
    # Halfway between two bfloat16 numbers, or between two subnormal float16 numbers; and the numbers next to these.
    ties = torch.arange(0x3F008000, 0x3F808000, 0x10000).to(torch.int32)
    small_ties = ((torch.arange(1024) + 0.5) * 2.0**-24).view(torch.int32)
    near = torch.cat([part + step for part in (ties, small_ties) for step in (-1, 0, 1)])
    numbers = {
        torch.float32: torch.cat([bits, near, near | -(2**31)]),
        torch.bfloat16: halves,
        torch.float16: halves,
    }
    one = []
    for dtype, raw in numbers.items():
        values = raw.view(dtype)
        values = values[~values.isnan()]
        one += [(values, None, out, CONVERT) for out in numbers]
    return read(listed(one, BLOCK))


def float8() -> list[str]:
    """Every number of e4m3, every tie between two, and the numbers next to a tie, at the scale 1; scales that vanish or nearly do."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    up, down = (torch.nextafter(ties, torch.tensor(end)) for end in (torch.inf, 0.0))
    exact = torch.cat([numbers, ties, up, down])
    exact = torch.cat([numbers[-1:], exact, -exact])[None]
    # A scale of 1.4 times the smallest number is rounded to the smallest number, so that the quotient is 627.
    tiny = torch.tensor([[0, 1], [1, 300], [627, -627], [0, 0], [3000, -7]]) * 2.0**-149
    one = listed([(exact, None, FP8, QUANTISE), (exact, None, torch.float32, SCALE)], exact.shape)
    assert float(one.expected[1]) == 1.0
    two = listed([(tiny, None, FP8, QUANTISE), (tiny, None, torch.float32, SCALE)], (1, 2))
    assert slices._bytes(two.expected[0])[4:6].tolist() == [0x7E, 0xFE]
    return read(one, exact.shape) + read(two, (1, 2))


def blocks_that_are_cut() -> list[str]:
    """Experts [4, 20, 30] with blocks of 8 x 12 that are read two rows at a time; boxes begin and end at various rows of a block."""
    values = torch.randn(4, 20, 30, generator=torch.Generator().manual_seed(3)).bfloat16()
    boxes = [
        Box((1, first, 5), (2, count, 22))
        for first, count in ((0, 20), (1, 1), (3, 9), (7, 2), (8, 8), (15, 5))
    ]
    scales = [Box((1, 1, 0), (3, 2, 3)), Box((0, 0, 1), (1, 3, 1))]
    one = [(values, box, FP8, QUANTISE) for box in boxes]
    two = [(values, box, torch.float32, SCALE) for box in scales]
    with mock.patch.object(slice_kernels, "STRIP", 32):
        return read(listed([*one, *two], (8, 12)), (8, 12))


def not_a_number() -> list[str]:
    """NaN stays NaN in any type; blocks with NaN or infinity have torch's scales, and NaN where torch has NaN."""
    weight = torch.ones(2, 24)
    weight[0, 3], weight[1, 14] = torch.nan, torch.inf
    one = [(weight, None, FP8, QUANTISE), (weight, None, torch.float32, SCALE)]
    # The NaNs with the fewest and the most bits set, with both signs.
    bits = (
        torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF, 0x3F800000]).to(torch.int32).view(torch.float32)
    )
    halves = torch.tensor([0x7F81, 0x7FFF, -1, -0x7F]).to(torch.int16)
    for values in (bits, halves.view(torch.bfloat16), (halves & ~0x380).view(torch.float16)):
        one += [(values, None, dtype, CONVERT) for dtype in slices.FLOATS]
    several = listed(one, (2, 12))
    slot, checksums = (
        torch.zeros(aligned(several.end), dtype=torch.uint8),
        torch.zeros(len(one), dtype=torch.int64),
    )
    read_slices(SliceTable.of_reads(several.reads, (2, 12)), slot, checksums)
    wrong = []
    for each, expected in zip(*several, strict=True):
        part = slot[each.offset : each.offset + expected.nbytes].view(expected.dtype).float()
        right = expected.view(-1).float()
        if not torch.equal(part.nan_to_num(-9.0), right.nan_to_num(-9.0)):
            wrong.append(f"{each.dtype} {each.reading}: {part.tolist()}, {right.tolist()}")
    return wrong


def empty_lists() -> list[int]:
    """The numbers of launches and of checksums for empty lists."""
    nothing = torch.empty(0, dtype=torch.int64)
    with counted() as launches:
        read_slices(SliceTable.of_reads([]), torch.empty(0, dtype=torch.uint8), nothing)
        write_slices(SliceTable.of_tensors([], []), torch.empty(0, dtype=torch.uint8))
        found = checksums_of(SliceTable.of_tensors([]))
    return [launches.total(), len(found)]


class counted:
    """Counts the launches of each kernel."""

    def __enter__(self) -> Counter:
        from triton.runtime.interpreter import InterpretedFunction

        launches, run = Counter(), InterpretedFunction.run

        def counting(kernel: InterpretedFunction, *args, **kwargs) -> None:
            launches[kernel.__name__] += 1
            run(kernel, *args, **kwargs)

        self._patch = mock.patch.object(InterpretedFunction, "run", counting)
        self._patch.start()
        return launches

    def __exit__(self, *_) -> None:
        self._patch.stop()


def launches_of_lists() -> list[dict[str, dict[str, int]]]:
    """Launches for lists with one slice of each reading, and with 6."""
    found = []
    for number in (1, 6):
        weight = torch.randn(9, 13)
        readings = ((FP8, QUANTISE), (torch.float32, SCALE), (torch.bfloat16, CONVERT))
        one = listed([(weight, None, *kind) for _ in range(number) for kind in readings], BLOCK)
        slot, sums = (
            torch.empty(aligned(one.end), dtype=torch.uint8),
            torch.empty(3 * number, dtype=torch.int64),
        )
        views = [torch.empty_like(part) for part in one.expected]
        table = SliceTable.of_tensors(views, [each.offset for each in one.reads])
        parts = {
            "read": lambda one=one, slot=slot, sums=sums: read_slices(
                SliceTable.of_reads(one.reads, BLOCK), slot, sums
            ),
            "write": lambda table=table, slot=slot: write_slices(table, slot),
            "checksums": lambda table=table: checksums_of(table),
        }
        counts = {}
        for name, part in parts.items():
            with counted() as launches:
                part()
            counts[name] = dict(launches)
        found.append(counts)
    return found


def a_table_used_again() -> list[str]:
    """Faults of a table that is used again for other values in the same parameters, and then for parameters that have moved."""
    rng, found = random.Random(5), []
    weights = [torch.randn(rng.randint(1, 9), 14) for _ in range(3)]

    def current() -> Listed:
        kinds = ((torch.bfloat16, CONVERT), (FP8, QUANTISE), (torch.float32, CONVERT))
        return listed([(weight, None, *kind) for weight, kind in zip(weights, kinds, strict=True)], BLOCK)

    table = SliceTable.of_reads(current().reads, BLOCK)
    for _ in range(2):
        for weight in weights:
            weight.mul_(-1.3)
        again = SliceTable.of_reads(current().reads, BLOCK, table)
        found += [*([] if again is table else ["made again"]), *read_with(again, current())]
    weights[1] = weights[1].clone()
    moved = SliceTable.of_reads(current().reads, BLOCK, table)
    found += [*(["not made again"] if moved is table else []), *read_with(moved, current())]
    return found


def refused() -> list[str]:
    """Mistakes that the host does not find."""
    weight = torch.randn(9, 13)
    whole = Box.whole((9, 13))
    slot, sums = torch.empty(64, dtype=torch.uint8), torch.empty(1, dtype=torch.int64)
    table = SliceTable.of_reads([SliceRead(weight, whole, "float32", CONVERT, 0)])
    mistakes: dict[str, Callable[[], object]] = {
        "beyond the slot": lambda: read_slices(table, slot, sums),
        "beyond the parameter": lambda: SliceTable.of_reads(
            [SliceRead(weight, Box((1, 0), (9, 13)), "float32", CONVERT, 0)]
        ),
        "beyond the weight": lambda: SliceTable.of_reads(
            [SliceRead(weight, Box((1, 0), (9, 13)), "float8_e4m3fn", QUANTISE, 0)], BLOCK
        ),
        "beyond the blocks": lambda: SliceTable.of_reads(
            [SliceRead(weight, Box((1, 0), (2, 2)), "float32", SCALE, 0)], BLOCK
        ),
        "no block": lambda: SliceTable.of_reads([SliceRead(weight, whole, "float8_e4m3fn", QUANTISE, 0)]),
        "not converted": lambda: SliceTable.of_reads([SliceRead(weight, whole, "float8_e4m3fn", CONVERT, 0)]),
        "between two words": lambda: SliceTable.of_reads([SliceRead(weight, whole, "float32", CONVERT, 8)]),
    }
    taken = []
    for name, mistake in mistakes.items():
        try:
            mistake()
            taken.append(name)
        except AssertionError:
            pass
    return taken


def faults() -> dict[str, list[str]]:
    """Differences that a fault in a table or a kernel causes."""
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(20, 30, generator=generator)
    weight[19] *= 100  # the block's largest number is in no box
    raw = torch.randint(0, 256, (7,), generator=generator, dtype=torch.uint8)
    kinds = [
        (weight, Box((3, 2), (9, 11)), torch.bfloat16, CONVERT),
        (raw, None, torch.uint8, CONVERT),
        (weight, Box((13, 2), (5, 11)), FP8, QUANTISE),
        (weight, None, torch.float32, SCALE),
    ]
    one = listed(kinds, BLOCK)

    def in_table(change: Callable[[SliceTable], object]) -> list[str]:
        table = SliceTable.of_reads(one.reads, BLOCK)
        change(table)
        return read_with(table, one)

    found = {
        "none": in_table(lambda table: None),
        "offset": in_table(lambda table: table.copies[0, OFFSET].add_(16)),
        "stride": in_table(lambda table: table.copies[0, STRIDE].add_(1)),
        "last byte": in_table(lambda table: table.copies[1, SIZE].sub_(1)),
        "block": in_table(lambda table: table.blocks[0, EXTENT].fill_(18)),
    }
    table = SliceTable.of_reads(one.reads, BLOCK)
    found["last tile"] = read_with(replace(table, copy_tiles=table.copy_tiles[:-1]), one)
    kernels = slice_kernels.kernels()
    with mock.patch.object(kernels, "KEY", type(kernels.KEY)(kernels.KEY.value + 2)):
        found["key"] = read(one)
    with mock.patch.object(torch.Tensor, "zero_", lambda tensor: tensor):
        found["not cleared"] = read(one)
    slot, target = torch.arange(64, dtype=torch.uint8), torch.zeros(10, 9, dtype=torch.uint8)
    table = SliceTable.of_tensors([target[1:3, 2:8]], [16])
    table.copies[0, ADDRESS] += 1
    write_slices(table, slot)
    right = torch.zeros(10, 9, dtype=torch.uint8)
    right[1:3, 2:8] = slot[16:28].view(2, 6)
    found["place in the parameter"] = [] if torch.equal(target, right) else ["parameter"]
    return found


INTERPRETED: tuple[Callable[[], object], ...] = (
    random_lists, computed_weights, all_sizes_of_bytes, conversions, float8, blocks_that_are_cut, not_a_number, empty_lists,
    launches_of_lists, a_table_used_again, refused, faults,
)  # fmt: skip


def compiled() -> dict[str, dict[str, int]]:
    """For each kernel, compiled for an H100: the numbers of divisions and of instructions that flush subnormal numbers to 0, and its bytes
    of machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = slice_kernels.kernels()
    ways = {"read": (True, False), "write": (False, True), "checksums": (False, False)}
    cases = {
        name: (kernels.copy_slices, {"TILE": TILE, "TO_SLOT": to_slot, "FROM_SLOT": from_slot})
        for name, (to_slot, from_slot) in ways.items()
    }
    blocks = {"ROWS": 128, "COLUMNS": 128, "STRIP": 16, "WIDTH": 128}
    for name, rank, precision in (
        ("blocks", None, "tf32"),
        ("adapters", 32, "tf32"),
        ("float32 adapters", 16, "ieee"),
    ):
        computing = {"COMPUTED": rank is not None, "RANK": rank or 0, "PRECISION": precision}
        cases[name] = kernels.read_blocks, blocks | computing
    found = {}
    for name, (kernel, constants) in cases.items():
        types = {
            parameter: "constexpr" if parameter in constants else "*i64" for parameter in kernel.arg_names
        }
        source = ASTSource(kernel, types | {"slot": "*u8"}, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        instructions = Counter(re.findall(r"\b(div\.\S*f32|\S+\.ftz\S*)", made.asm["ptx"]))
        found[name] = {**instructions, "bytes": len(made.asm["cubin"])}
    return found


def main() -> None:
    print_cases(INTERPRETED, compiled, seldom=(more_of_both,))


if __name__ == "__main__":
    main()
