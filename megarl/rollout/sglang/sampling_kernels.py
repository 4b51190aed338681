"""The Triton kernels of `sampling`, which alone imports this file: without a GPU Triton is not installed.

`score_blocks` reads each logit once. A program has a block of columns of a row, so that few rows fill a GPU too; how a row is cut
depends on nothing but its length, so neither do its sums. `choose` then takes the best of a row's blocks.

A column's score is its logit plus Gumbel noise -log(-log(u)), u = hash / (2**32 - 1). The hash has 32 bits, and float32 holds 24:
rounded to float32, every u above 1 - 2**-25 would be 1, and drawn tokens come from there. So the float32 score is computed from 1 - u,
which float32 holds to 24 bits wherever it is small, and only nominates columns: it is wrong by less than SLACK / 2. float64 decides
among the nominated columns, as a rule one of a block, by SGLang's own formula. Float64 alone would take two logarithms of some
40 operations for each logit, on GPUs that do 1 of them in the time of 2 of float32 (H100) or of 64 (L40S).
"""

import triton
import triton.language as tl

# Constants that kernels read have to be constexpr.
SLACK = tl.constexpr(2.0**-11)  # of a score within 1,000 of 0, float32 has steps of 2**-14
LARGEST_HASH = tl.constexpr(0xFFFFFFFF)
LEAST_NOISE = tl.constexpr(-709.782712893384)  # of the hash 0: -log(the largest float64)
SMALLEST_LOG = tl.constexpr(2.0**-32)  # -log(u) of the largest hash, which would be 0: that of the one before
LARGEST_FLOAT64 = tl.constexpr(1.7976931348623157e308)
# Kernels are not compiled again for seeds and positions of another alignment: they are read a number at a time.
POINTERS = (
    "temperatures",
    "seeds",
    "positions",
    "maxima",
    "sums",
    "scores",
    "columns",
    "tokens",
    "log_probs",
)


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def score_blocks(
    logits: tl.tensor,
    row_stride: tl.tensor,
    temperatures: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    scores: tl.tensor,
    columns: tl.tensor,
    num_columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Store, for a block of a row, its largest logit over the temperature and, relative to that, the sum of exponentials, the
    best score and its column.

    A block without a finite logit has the score -inf and the column `num_columns`.

    Args:
        maxima, sums: float32 [rows, blocks]; scores: float64; columns: int32.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    place = row * tl.num_programs(0) + block
    values = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    prefix = hashed_prefix(tl.load(seeds + row), tl.load(positions + row))

    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    read = tl.load(values + column, mask=inside, other=-float("inf")).to(tl.float32)
    scaled = tl.div_rn(read, tl.zeros([BLOCK], tl.float32) + temperature)
    largest = tl.max(scaled, 0)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    # NaN and infinity make the sum NaN, whatever `tl.max` does with them.
    tl.store(maxima + place, largest)
    tl.store(sums + place, tl.sum(tl.exp(scaled - base), 0))

    rough = scaled - base + rough_noise(hashed(prefix, column.to(tl.uint32)))
    # Beside an infinite logit all others are -inf; not one of them is nominated.
    nominated = (rough > -float("inf")) & (rough >= tl.max(rough, 0) - SLACK)
    best = tl.full([], -float("inf"), tl.float64)
    chosen = tl.full([], 0, tl.int32) + num_columns
    candidate = tl.min(tl.where(nominated, column, num_columns), 0)
    while candidate < num_columns:
        scaled_one = tl.div_rn(tl.load(values + candidate).to(tl.float32), temperature)
        score = scaled_one.to(tl.float64) - base + exact_noise(hashed(prefix, candidate.to(tl.uint32)))
        chosen = tl.where(score > best, candidate, chosen)
        best = tl.maximum(score, best)
        candidate = tl.min(tl.where(nominated & (column > candidate), column, num_columns), 0)
    tl.store(scores + place, best)
    tl.store(columns + place, chosen)


@triton.jit(do_not_specialize_on_alignment=POINTERS)
def choose(
    logits: tl.tensor,
    row_stride: tl.tensor,
    temperatures: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    scores: tl.tensor,
    columns: tl.tensor,
    tokens: tl.tensor,
    log_probs: tl.tensor,
    num_blocks: tl.tensor,
    num_columns: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Store a row's token (of equal scores the first) and its log-prob; token 0 and NaN for a row that is no distribution.

    Args:
        WIDTH: the power of two that is no less than `num_blocks`.
    """
    row = tl.program_id(0)
    lane = tl.arange(0, WIDTH)
    inside = lane < num_blocks
    place = row * num_blocks + lane
    maximum = tl.load(maxima + place, mask=inside, other=-float("inf")).to(tl.float64)
    part = tl.load(sums + place, mask=inside, other=0.0).to(tl.float64)
    score = tl.load(scores + place, mask=inside, other=-float("inf")) + (maximum - tl.max(maximum, 0))
    column = tl.load(columns + place, mask=inside, other=num_columns)

    largest = tl.max(maximum, 0)
    total = tl.sum(part * tl.exp(maximum - largest), 0)
    token = tl.min(tl.where(score == tl.max(score, 0), column, num_columns), 0)
    is_distribution = (total > 0) & (token < num_columns)  # false of NaN
    token = tl.where(is_distribution, token, 0)
    scaled = tl.div_rn(
        tl.load(logits + row.to(tl.int64) * row_stride + token).to(tl.float32), tl.load(temperatures + row)
    )
    log_prob = scaled.to(tl.float64) - largest - tl.log(total)
    tl.store(tokens + row, token)
    tl.store(log_probs + row, tl.where(is_distribution, log_prob, float("nan")).to(tl.float32))


@triton.jit
def rough_noise(hash_: tl.tensor) -> tl.tensor:
    """Gumbel noise in float32, wrong by at most 1e-5 where it is above -4."""
    # Above 1/2 the number 1 - u: `rounded` is u, and `rest` the part that rounding took away (log(u) = log(rounded) + rest, as both are small).
    left = (hash_ ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32
    is_high = hash_ >= 0x80000000
    rounded = tl.where(is_high, 1.0 - left, hash_.to(tl.float32) * 2.0**-32)
    rest = tl.where(is_high, (1.0 - rounded) - left, 0.0)
    exponential = -(tl.log(rounded) + rest)
    exponential = tl.maximum(exponential, SMALLEST_LOG)
    return tl.where(hash_ == 0, LEAST_NOISE, -tl.log(exponential))


@triton.jit
def exact_noise(hash_: tl.tensor) -> tl.tensor:
    """Gumbel noise in float64, as SGLang has it (layers/sampler.py, `multinomial_with_seed`, 0.5.21)."""
    uniform = hash_.to(tl.float64) / LARGEST_HASH
    exponential = tl.minimum(tl.maximum(-tl.log(uniform), SMALLEST_LOG), LARGEST_FLOAT64)
    return -tl.log(exponential)


@triton.jit
def hashed_prefix(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The state of MurmurHash3_x86_32 after a seed of 64 bits, its lower half first, and a position."""
    state = mixed(tl.full([], 0, tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    state = mixed(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    return mixed(state, position.to(tl.uint32))


@triton.jit
def hashed(prefix: tl.tensor, column: tl.tensor) -> tl.tensor:
    """MurmurHash3_x86_32 of (seed, position, column), uint32 (sglang/kernels/ops/sampling/murmur_hash.py, 0.5.21)."""
    state = mixed(prefix, column) ^ 16  # bytes that were hashed
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def mixed(state: tl.tensor, word: tl.tensor) -> tl.tensor:
    word = word * 0xCC9E2D51
    word = ((word << 15) | (word >> 17)) * 0x1B873593
    state = state ^ word
    return ((state << 13) | (state >> 19)) * 5 + 0xE6546B64
