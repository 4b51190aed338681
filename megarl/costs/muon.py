"""What Muon adds to the costs of a step: its buffers, where full matrices lie, its products, and their memory.

Megatron-core 0.19.2 (layer_wise_optimizer.py) gives each data parallel rank full matrices: a bucket's matrices go, the largest first, to the
rank that has the fewest elements so far; every rank's part of the bucket is as long as the longest.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import lcm

from megarl.config.schema.models import MuonConfig

MOMENTUM = 4  # bytes of an element
FILLED = 0.9  # the part of a bucket, with room for its largest matrix on each rank, that matrices fill before it ends
ALIGNMENT, PADDING = 64, 128  # elements: of a matrix's start, of a bucket's end
# Matrices that AdamW updates.
_OTHERS = ("embedding.word_embeddings.weight", "output_layer.weight", "value_head.weight")
_BY_ROWS = (
    "linear_qkv",
    "linear_fc1",
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "in_proj",
    "eh_proj",
)
_BY_COLUMNS = ("linear_proj", "linear_fc2", "out_proj")

Matrix = tuple[str, tuple[int, ...], bool]
"""Name, local shape, whether it is an expert's."""


def is_muons(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates a weight, rather than AdamW. `name`: "<chunk>:<parameter>"."""
    return len(shape) == 2 and not name.endswith(_OTHERS)


def packed(
    sizes: Sequence[int], ranks: int, limit: int | None
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where matrices of so many elements lie, given in the model's order.

    Args:
        limit: elements at which a bucket ends; None: there is one bucket.

    Returns: the buckets, and the matrices' places: (first element, end).
    """
    buckets: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    for sizes_of_bucket in _cut(sizes, ranks, limit):
        ends = [0] * ranks
        first = buckets[-1][1] if buckets else 0
        own: list[tuple[int, int, int]] = []  # rank, place in its part, elements
        for size in sorted(sizes_of_bucket, reverse=True):
            rank = ends.index(min(ends))
            start = -(-ends[rank] // ALIGNMENT) * ALIGNMENT
            own.append((rank, start, size))
            ends[rank] = start + size
        unit = lcm(ALIGNMENT, lcm(ranks, PADDING) // ranks)
        part = -(-max(ends) // unit) * unit
        spans += [
            (first + rank * part + start, first + rank * part + start + size) for rank, start, size in own
        ]
        buckets.append((first, first + ranks * part))
    return buckets, spans


def _cut(sizes: Sequence[int], ranks: int, limit: int | None) -> Iterator[list[int]]:
    """The sizes of each bucket, from the last matrix to the first."""
    found: list[int] = []
    for size in reversed(sizes):
        found.append(size)
        if limit is not None and sum(found) >= max(limit, int(ranks * max(found) * FILLED)):
            yield found
            found = []
    if found:
        yield found


def _full(matrix: Matrix, tp: int, etp: int) -> tuple[tuple[int, int], int | None, int]:
    """The shape of a matrix over its tensor parallel ranks, the dimension that these share, and how many they are."""
    name, (rows, columns), expert = matrix
    module, ranks = name.rpartition(".")[0].rpartition(".")[2], etp if expert else tp
    if module in _BY_ROWS:
        return (rows * ranks, columns), 0, ranks
    if module in _BY_COLUMNS:
        return (rows, columns * ranks), 1, ranks
    return (rows, columns), None, 1


def operations(matrix: Matrix, muon: MuonConfig, tp: int, etp: int) -> float:
    """Floating point operations of a rank for a step of a matrix: the iteration's three products.

    Queries, keys and values are counted as one matrix, which takes no less.
    """
    (rows, columns), cut, ranks = _full(matrix, tp, etp)
    if cut is not None and muon.tp_mode == "blockwise":
        rows, columns = matrix[1]
    if cut is not None and muon.tp_mode == "distributed":
        # The products over the shared dimension are summed: squares of the other one.
        small, large = (columns, rows) if cut == 0 else (rows, columns)
        large = large // ranks
    else:
        small, large = sorted((rows, columns))
    return muon.num_ns_steps * (4.0 * small * small * large + 2.0 * small**3)


def gathered(matrix: Matrix, muon: MuonConfig, tp: int, etp: int) -> float:
    """Bytes that a rank receives from its tensor parallel peers for a step of a matrix.

    In mode "distributed": the squares' sums, each of which goes around twice."""
    (rows, columns), cut, ranks = _full(matrix, tp, etp)
    if cut is None or ranks == 1 or muon.tp_mode == "blockwise":
        return 0.0
    if muon.tp_mode == "duplicated":
        return 4.0 * rows * columns * (ranks - 1) / ranks
    small = columns if cut == 0 else rows
    item = 2 if muon.ns_dtype == "bfloat16" else 4
    return muon.num_ns_steps * 2.0 * item * small * small * (ranks - 1) / ranks


def working(matrices: Iterable[Matrix], muon: MuonConfig, tp: int, etp: int) -> int:
    """The most bytes of a rank while the largest matrix is updated: the mean with the gradient, and the gathered parts, the normalised
    matrix and its products, or the result and its two multiples, in float32 but within the iteration."""
    most = 0
    for matrix in matrices:
        (rows, columns), cut, _ = _full(matrix, tp, etp)
        local = matrix[1][0] * matrix[1][1]
        whole = rows * columns if cut is not None and muon.tp_mode == "duplicated" else local
        small = min(rows, columns)
        inner = 2 if muon.ns_dtype == "bfloat16" else 4
        parts = 8 * whole if whole != local else 0  # one by one, and together
        iterating = 4 * local + parts + 2 * inner * (whole + small * small) + 4 * whole * (inner == 2)
        scaling = 4 * local + 4 * whole + 8 * local
        most = max(most, iterating, scaling)
    return most


def busiest(
    matrices: Sequence[Matrix], muon: MuonConfig, tp: int, etp: int, replicas: tuple[int, int]
) -> tuple[float, float]:
    """Operations and gathered bytes of the rank that has most to do in a step of a stage's matrices.

    replicas: ranks that share dense matrices, and experts' ones; 1: each has all.
    """
    totals = (0.0, 0.0)
    for expert in (False, True):
        own = [matrix for matrix in matrices if matrix[2] == expert]
        ranks = replicas[int(expert)]
        sizes = [matrix[1][0] * matrix[1][1] for matrix in own]
        buckets, spans = packed(sizes, ranks, None)
        part = buckets[0][1] // ranks if buckets else 1
        parts = [(0.0, 0.0)] * ranks
        # Places are in the order of sizes, and of equal ones the last matrix is first.
        order = sorted(range(len(own)), key=lambda at: (-sizes[at], -at))
        for at, (start, _) in zip(order, spans, strict=True):
            done, received = parts[start // part]
            more = operations(own[at], muon, tp, etp), gathered(own[at], muon, tp, etp)
            parts[start // part] = (done + more[0], received + more[1])
        most = max(parts)
        totals = (totals[0] + most[0], totals[1] + most[1])
    return totals
