"""Which keys a query attends to: an indexer's scores, the choice of the highest ones, and choices as bits.

Equation 1 of DeepSeek-V3.2's report (arXiv:2512.02556): the score of key s for query t is the sum over heads j of w_tj ReLU(q_tj k_s).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.models.config import SCORE_BYTES

LIMIT = SCORE_BYTES


@dataclass(frozen=True)
class Run:
    """Queries of one sequence that follow each other.

    Attributes:
        row: of the first of them, among a rank's tokens.
        position: of the first of them, in its sequence.
        count: how many there are.
        start: of the sequence, among the tokens of all sequences.
    """

    row: int
    position: int
    count: int
    start: int

    @property
    def rows(self) -> slice:
        """Where the queries are among a rank's tokens."""
        return slice(self.row, self.row + self.count)

    @property
    def end(self) -> int:
        """How many keys of the sequence the last query may attend to."""
        return self.position + self.count

    @property
    def keys(self) -> slice:
        """Where the keys that any of the queries may attend to are among the tokens of all sequences."""
        return slice(self.start, self.start + self.end)

    def cut(self, width: int) -> Iterator["Run"]:
        """Parts whose scores, `width` of them for each pair of a query and a key, take at most `LIMIT` bytes, or that have one query."""
        done = 0
        while done < self.count:
            # A part's keys end with its last query: the longest part solves count * (before + count) * bytes = LIMIT.
            before, most = self.position + done, LIMIT / (4 * width)
            count = max(1, int((before**2 / 4 + most) ** 0.5 - before / 2))
            count = min(count, self.count - done)
            yield Run(self.row + done, before, count, self.start)
            done += count

    def after(self, position: int) -> "Run | None":
        """The queries from a position on; None: there are none."""
        skipped = max(0, position - self.position)
        if skipped >= self.count:
            return None
        return Run(self.row + skipped, self.position + skipped, self.count - skipped, self.start)

    def within(self, rows: range) -> "Run | None":
        """The queries that are among these of the rank's tokens; None: none is."""
        first, stop = max(self.row, rows.start), min(self.row + self.count, rows.stop)
        if first >= stop:
            return None
        return Run(first, self.position + first - self.row, stop - first, self.start)


def runs_of(lengths: Sequence[int], cp: int, rank: int, rows: range | None = None) -> list[Run]:
    """The runs of context parallel rank `rank` of `cp`, which holds parts `rank` and 2 cp - 1 - rank of 2 cp equal parts of each sequence.

    Args:
        lengths: of the aligned sequences.
        rows: the rank's tokens that are meant; rows of runs then count from the first of these. None: all.
    """
    found, row, start = [], 0, 0
    for length in lengths:
        part = length // (2 * cp)
        pieces = [(0, length)] if cp == 1 else [(rank * part, part), ((2 * cp - 1 - rank) * part, part)]
        for position, count in pieces:
            first, stop = (
                (row, row + count) if rows is None else (max(row, rows.start), min(row + count, rows.stop))
            )
            if first < stop:
                at = first if rows is None else first - rows.start
                found.append(Run(at, position + first - row, stop - first, start))
            row += count
        start += length
    return found


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The scores, in float32, of keys [keys, dim] for queries [rows, heads, dim] with weights [rows, heads]: [rows, keys]."""
    return torch.einsum("rhk,rh->rk", head_scores(queries, keys), weights.float())


def head_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """The scores of each head, without its weight: float32 [rows, heads, keys]."""
    of_heads = _product(queries.flatten(0, 1), keys).unflatten(0, queries.shape[:2])
    return of_heads.relu() if torch.is_grad_enabled() else of_heads.relu_()


def _product(queries: Tensor, keys: Tensor) -> Tensor:
    """[n, dim] x [keys, dim] -> [n, keys], in float32."""
    if queries.is_cuda and queries.dtype != torch.float32 and not torch.is_grad_enabled():
        return torch.mm(queries, keys.T, out_dtype=torch.float32)
    return queries.float() @ keys.float().T


def choose(scores: Tensor, position: int, topk: int) -> Tensor:
    """Which of the keys before each query, its own among them, have the `topk` highest scores; of equal ones the earlier are chosen.

    Args:
        scores: [rows, keys], of queries that follow each other and of the keys up to the last one's.
        position: of the first query, `topk` at least.

    Returns: bool [rows, keys].
    """
    rows, keys = scores.shape
    scores = scores.masked_fill(later_keys(position, rows, keys, scores.device), -torch.inf)
    # torch leaves open which of equal scores are among the highest, not how many of them.
    least = scores.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    missing = topk - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= missing))


def later_keys(position: int, rows: int, keys: int, device: torch.device) -> Tensor:
    """bool [rows, keys]: which keys come after queries that follow each other, the first of them at `position`."""
    positions = torch.arange(position, position + rows, device=device)
    return torch.arange(keys, device=device) > positions[:, None]


def choose_keys(
    queries: Tensor, weights: Tensor, keys: Tensor, runs: Sequence[Run], topk: int, longest: int
) -> Tensor:
    """The choices of queries [tokens, heads, dim] among the keys [all tokens, dim] of their own sequences.

    Args:
        runs: of the queries.
        longest: tokens of the longest sequence.

    Returns: uint8 [tokens, longest / 8], as `pack_bits`; 0 for the queries that have no choice.
    """
    chosen = queries.new_zeros((len(queries), -(-longest // 8)), dtype=torch.uint8)
    for run in runs:
        if (late := run.after(topk)) is not None:
            for part in late.cut(queries.shape[1]):
                scores = index_scores(queries[part.rows], weights[part.rows], keys[part.keys])
                bits = pack_bits(choose(scores, part.position, topk))
                chosen[part.rows, : bits.shape[1]] = bits
    return chosen


def hidden_keys(chosen: Tensor, part: Run, topk: int) -> Tensor:
    """bool [queries of the part, keys]: which keys are not attended to."""
    hidden = later_keys(part.position, part.count, part.end, chosen.device)
    if (late := part.after(topk)) is not None:
        hidden[late.row - part.row :] |= ~unpack_bits(chosen[late.rows], part.end)
    return hidden


def pack_bits(flags: Tensor) -> Tensor:
    """bool [rows, n] -> uint8 [rows, n / 8, rounded up], the first of eight in the lowest bit."""
    padded = torch.nn.functional.pad(flags, (0, -flags.shape[1] % 8)).unflatten(1, (-1, 8))
    return (padded.byte() << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(
        -1, dtype=torch.uint8
    )


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """The inverse of `pack_bits`: bool [rows, count]."""
    flags = bits[:, : -(-count // 8), None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1
    return flags.flatten(1)[:, :count].bool()
