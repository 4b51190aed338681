"""Tables that fill the micro-batches of shadow ranks: as many of the longest rows as go into one, all of one length.

All data parallel ranks are given the same rows, but for uneven trajectories: these are each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from megarl.algorithms.aggregate import LossCounts
from megarl.config import TrainConfig, is_single_update
from megarl.trainer.model_worker import Share

VOCABULARY = 1000  # token ids are below


@dataclass(frozen=True)
class Batch:
    """A table, and the rows of each data parallel rank by micro-batch."""

    table: pa.Table
    shares: list[Share]


@dataclass(frozen=True)
class Fill:
    """How micro-batches are filled.

    Attributes:
        tokens: of a micro-batch. longest: of a row. of: rows that must be in one micro-batch together.
        dp: data parallel ranks.
        uneven: whether each of them has trajectories of its own, whose responses have an eighth of the tokens and more.
    """

    tokens: int
    longest: int
    dp: int
    of: int = 1
    uneven: bool = False

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
        return self.of * max(1, self.tokens // (self.of * self.longest))

    @property
    def length(self) -> int:
        return self.tokens // self.rows

    def shares(self, micro_batches: int, rows: int | None = None) -> list[Share]:
        """`rows`: of a table with several texts a row, of a micro-batch; None: a text a row."""
        each, parts = rows or self.rows, self.dp if self.uneven else 1
        shares = [
            [
                list(range(number * each, (number + 1) * each))
                for number in range(start, start + micro_batches)
            ]
            for start in range(0, parts * micro_batches, micro_batches)
        ]
        return shares if self.uneven else shares * self.dp

    def responses(self, prompt: int, rows: int) -> list[int]:
        """The lengths of responses to prompts of a length."""
        longest = self.length - prompt
        if not self.uneven:
            return [longest] * rows
        return np.random.default_rng(1).integers(max(1, longest // 8), longest + 1, rows).tolist()


def trajectories(config: TrainConfig, fill: Fill, micro_batches: int) -> tuple[Batch, LossCounts]:
    """What the updates of actor and critic read, and evaluations before them; and what a mini-batch of it holds."""
    prompt = min(config.data.max_prompt_length, fill.length // 2)
    parts = fill.dp if fill.uneven else 1
    responses = fill.responses(prompt, parts * micro_batches * fill.rows)
    random = np.random.default_rng(0)
    names = ["ref_log_probs", "advantages", "values", "returns", "rollout_log_probs"]
    if not is_single_update(config):
        names.append("old_log_probs")
    if config.algorithm.rollout_correction.rollout_is is not None:
        names.append("rollout_is_weights")

    def floats() -> pa.Array:
        return pa.array([random.normal(size=length).astype(np.float32) for length in responses])

    table = pa.table(
        {
            "prompt_ids": _column(len(responses), lambda: random.integers(0, VOCABULARY, prompt)),
            "response_ids": pa.array([random.integers(0, VOCABULARY, length) for length in responses]),
            "response_mask": pa.array([np.ones(length, bool) for length in responses]),
            **{name: floats() for name in names},
        }
    )
    alike = fill.dp // parts
    counts = LossCounts(sum(responses) * alike, len(responses) * alike)
    return Batch(table, fill.shares(micro_batches)), counts


def examples(fill: Fill, micro_batches: int) -> Batch:
    """Of supervised fine-tuning; as texts, what a reward model scores."""
    table = pa.table(_texts(fill, micro_batches * fill.rows))
    return Batch(table, fill.shares(micro_batches))


def rankings(fill: Fill, micro_batches: int) -> Batch:
    """Pairs of texts, also as chats that a policy learns of."""
    rows = fill.rows // fill.of
    count = micro_batches * rows
    texts = {name: _lists(column, fill.of) for name, column in _texts(fill, count * fill.of).items()}
    table = pa.table(
        {
            **texts,
            "scores": _column(count, lambda: np.arange(fill.of, dtype=np.float64)),
            "margin": pa.array([0.0] * count, pa.float32()),
            "ref_log_probs": _column(count, lambda: np.zeros(fill.of, np.float32)),
        }
    )
    return Batch(table, fill.shares(micro_batches, rows))


def _texts(fill: Fill, rows: int) -> dict[str, pa.Array]:
    random = np.random.default_rng(0)
    return {
        "input_ids": _column(rows, lambda: random.integers(0, VOCABULARY, fill.length).astype(np.int32)),
        "loss_mask": _column(rows, lambda: np.ones(fill.length, bool)),
    }


def _column(rows: int, make: Callable[[], np.ndarray]) -> pa.Array:
    return pa.array([make() for _ in range(rows)])


def _lists(column: pa.Array, each: int) -> pa.Array:
    """Rows of `each` rows of a column."""
    return pa.ListArray.from_arrays(pa.array(range(0, len(column) + 1, each), pa.int32()), column)
