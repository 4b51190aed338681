"""The Triton kernels of `fused_head`, which alone imports this file: without a GPU Triton is not installed.

Logits are read in the model's type and computed with in float32. A token's statistics (maximum, sum, moment, the label's logit) lie side
by side, and so do its norms (maximum, logarithm of the sum, entropy): the numbers of a chunk of tokens are a slice of all tokens' numbers.
"""

import triton
import triton.language as tl

# Constants that kernels read have to be constexpr.
STATISTICS = tl.constexpr(4)
NORMS = tl.constexpr(3)
# Below all logits, and finite: its difference to a logit, times an empty sum of exponentials, is 0 and not NaN.
LOWEST = tl.constexpr(-3.0e38)
# Kernels are not compiled again for a chunk that begins elsewhere: of these arguments they read a few numbers a token.
BY_TOKEN = ("labels", "statistics", "norms", "gradients", "outputs")


@triton.jit(do_not_specialize_on_alignment=BY_TOKEN)
def reduce_logits(
    logits: tl.tensor,
    labels: tl.tensor,
    statistics: tl.tensor,
    stride: tl.tensor,
    start: tl.tensor,
    rows: tl.tensor,
    inverse_temperature: tl.tensor,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
) -> None:
    """Reduce a token's logits l over the temperature to m = max(l), sum(exp(l - m)), sum(exp(l - m) (l - m)) and the label's l; a program
    has one token, whose logits it reads once (and the label's once more).

    The sums are kept for the largest logit so far (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3). Where that grows by -e, a
    moment of exp(d) d becomes exp(e) (moment + e sum).

    Args:
        logits: [tokens, rows], `stride` elements from token to token.
        labels: int64 [tokens], of the whole vocabulary, of which this rank's rows begin at `start`; 0 for one that is another rank's.
        statistics: float32 [tokens, 4], written. Without entropy the moment is 0.
    """
    token = tl.program_id(0)
    row = logits + token.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    largest = tl.full([], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows, BLOCK):
        inside = first + lane < rows
        values = tl.load(row + first + lane, mask=inside, other=-float("inf")).to(tl.float32)
        values = values * inverse_temperature
        grown = tl.maximum(largest, tl.max(values, 0))
        distance = values - grown
        exponentials = tl.exp(distance)  # 0 outside, where the distance is infinite
        shift = largest - grown
        scale = tl.exp(shift)
        if WITH_ENTROPY:
            added = tl.where(exponentials == 0.0, 0.0, exponentials * distance)
            moment = scale * (moment + shift * total) + added
        total = scale * total + exponentials
        largest = grown

    label = tl.load(labels + token) - start
    owned = (label >= 0) & (label < rows)
    own = tl.load(row + label, mask=owned, other=0.0).to(tl.float32) * inverse_temperature
    found = statistics + token * STATISTICS
    tl.store(found, largest)
    tl.store(found + 1, tl.sum(total, 0))
    tl.store(found + 2, tl.sum(moment, 0))
    tl.store(found + 3, own)


@triton.jit(do_not_specialize=("tokens",))
def combine_ranks(
    statistics: tl.tensor,
    norms: tl.tensor,
    outputs: tl.tensor,
    tokens: tl.tensor,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
) -> None:
    """From the statistics of all ranks to log-probabilities and entropies, in the order of the ranks: every rank gets the same bits.

    Args:
        statistics: float32 [ranks, tokens, 4], as `reduce_logits` writes them.
        norms: float32 [tokens, 3], written. outputs: float32 [tokens, 1 or 2], written.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    largest = tl.full([BLOCK], LOWEST, tl.float32)
    for rank in range(RANKS):
        found = statistics + (rank * tokens + token) * STATISTICS
        largest = tl.maximum(largest, tl.load(found, mask=inside, other=0.0))
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    own = tl.zeros([BLOCK], tl.float32)
    for rank in range(RANKS):
        found = statistics + (rank * tokens + token) * STATISTICS
        shift = tl.load(found, mask=inside, other=0.0) - largest
        part = tl.load(found + 1, mask=inside, other=1.0)
        scale = tl.exp(shift)
        total += scale * part
        if WITH_ENTROPY:
            moment += scale * (tl.load(found + 2, mask=inside, other=0.0) + shift * part)
        own += tl.load(found + 3, mask=inside, other=0.0)
    log_total = tl.log(total)
    columns = 1 + WITH_ENTROPY
    tl.store(outputs + token * columns, own - largest - log_total, mask=inside)
    tl.store(norms + token * NORMS, largest, mask=inside)
    tl.store(norms + token * NORMS + 1, log_total, mask=inside)
    if WITH_ENTROPY:
        entropy = log_total - moment / total
        tl.store(outputs + token * columns + 1, entropy, mask=inside)
        tl.store(norms + token * NORMS + 2, entropy, mask=inside)


@triton.jit(do_not_specialize_on_alignment=BY_TOKEN)
def differentiate_logits(
    logits: tl.tensor,
    labels: tl.tensor,
    norms: tl.tensor,
    gradients: tl.tensor,
    stride: tl.tensor,
    start: tl.tensor,
    rows: tl.tensor,
    inverse_temperature: tl.tensor,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
) -> None:
    """Overwrite logits by their gradients, (g (onehot(y) - p) - g_H p (log p + H)) / temperature; a program has a block of one token's.

    Args:
        logits, labels, stride, start: as in `reduce_logits`.
        norms: float32 [tokens, 3], as `combine_ranks` writes them.
        gradients: float32 [tokens, 1 or 2], of the log-probability and of the entropy.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < rows
    place = logits + token.to(tl.int64) * stride + column
    values = tl.load(place, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
    log_p = values - tl.load(norms + token * NORMS) - tl.load(norms + token * NORMS + 1)
    gradient = tl.load(gradients + token * (1 + WITH_ENTROPY))
    factor = tl.zeros([BLOCK], tl.float32) + gradient
    if WITH_ENTROPY:
        of_entropy = tl.load(gradients + token * (1 + WITH_ENTROPY) + 1)
        factor += of_entropy * (log_p + tl.load(norms + token * NORMS + 2))
    label = tl.load(labels + token) - start
    p = tl.exp(log_p)
    # Not 0 times infinity for a logit that is -infinity; NaN stays NaN.
    found = tl.where(column == label, gradient, 0.0) - tl.where(p == 0.0, 0.0, p * factor)
    tl.store(place, (found * inverse_temperature).to(logits.dtype.element_ty), mask=inside)
