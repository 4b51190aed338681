"""Tables that fill the micro-batches of shadow ranks: as few rows as fill one, all of one length.

All data parallel ranks are given the same rows, but for uneven trajectories: these are each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from megarl.algorithms.aggregate import LossCounts
from megarl.config import TrainConfig, is_single_update, leaves_tokens_out, top_k_in_loss
from megarl.data.kept import KEPT_COUNTS, KEPT_IDS
from megarl.data.routing import (
    ROUTED_EXPERTS,
    RoutingShape,
    binary_lists,
    list_of_binary,
    routing_column,
)
from megarl.data.trajectories import REF_TOP_TOKENS, from_ragged
from megarl.megatron.router_replay import routing_shape
from megarl.models import read_model_config
from megarl.trainer.workers.model import Share

VOCABULARY = 1000  # token ids are below
KEPT = 32  # tokens that each token of a response was drawn from, where tokens are left out


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
        uneven: whether each of them has rows of its own.
    """

    tokens: int
    longest: int
    dp: int
    uneven: bool = False
    of: int = 1

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.of * -(-self.tokens // (self.of * self.longest))

    @property
    def length(self) -> int:
        return self.tokens // self.rows

    def lengths(self, longest: int, micro_batches: int) -> list[int]:
        """Lengths of the rows of a table whose longest one has `longest` tokens."""
        if not self.uneven:
            return [longest] * (micro_batches * self.rows)
        random = np.random.default_rng(1)
        count = self.dp * micro_batches * self.rows
        return random.integers(max(2, longest // 8), longest + 1, count).tolist()

    def shares(self, micro_batches: int) -> list[Share]:
        """The rows of each data parallel rank; rows of `of` texts count once."""
        each, parts = self.rows // self.of, self.dp if self.uneven else 1
        micro = [list(range(number * each, (number + 1) * each)) for number in range(parts * micro_batches)]
        shares = [micro[part * micro_batches : (part + 1) * micro_batches] for part in range(parts)]
        return shares if self.uneven else shares * self.dp


def trajectories(config: TrainConfig, fill: Fill, micro_batches: int) -> tuple[Batch, LossCounts]:
    """The table that evaluations and updates of actor and critic read, and the counts of a mini-batch of it."""
    prompt = 1  # nearly all tokens are then live, which is the most that a head can have to do
    responses = fill.lengths(fill.length - prompt, micro_batches)
    random = np.random.default_rng(0)
    names = ["ref_log_probs", "advantages", "values", "returns", "rollout_log_probs"]
    if not is_single_update(config):
        names.append("old_log_probs")
    if config.algorithm.rollout_correction.rollout_is is not None:
        names.append("rollout_is_weights")
    table = pa.table(
        {
            "prompt_ids": _column(responses, lambda length: random.integers(0, VOCABULARY, prompt)),
            "response_ids": _column(responses, lambda length: random.integers(0, VOCABULARY, length)),
            "response_mask": _column(responses, lambda length: np.ones(length, bool)),
            **{
                name: _column(responses, lambda length: random.normal(size=length).astype(np.float32))
                for name in names
            },
        }
    )
    if top_k_in_loss(config):
        k = config.actor_rollout_ref.actor.kl_loss_top_k
        one = np.concatenate([np.full(k, -np.log(2.0 * k)), np.arange(k)])
        flat, offsets = binary_lists([np.tile(one, (length, 1)) for length in responses])
        table = table.append_column(REF_TOP_TOKENS, list_of_binary(flat, offsets))
    if config.actor_rollout_ref.actor.router_replay is not None:
        shape = routing_shape(read_model_config(config.actor_rollout_ref.model.path))
        experts = [draw_experts(shape, prompt + length - 1) for length in responses]
        table = table.append_column(ROUTED_EXPERTS, routing_column(experts, shape))
    if leaves_tokens_out(config.actor_rollout_ref.rollout):
        drawn = table["response_ids"].combine_chunks().flatten().to_numpy()
        ids = ((drawn[:, None] + np.arange(KEPT)) % VOCABULARY).astype(np.int32)
        bounds = np.cumsum([0, *responses])
        kept = {
            KEPT_IDS: from_ragged(ids.reshape(-1), KEPT * bounds),
            KEPT_COUNTS: from_ragged(np.full(len(drawn), KEPT, np.int32), bounds),
        }
        for name, values in kept.items():
            table = table.append_column(name, values)
    copies = 1 if fill.uneven else fill.dp
    counts = LossCounts(copies * sum(responses), copies * len(responses))
    return Batch(table, fill.shares(micro_batches)), counts


def draw_experts(shape: RoutingShape, num_tokens: int) -> np.ndarray:
    """Different experts for each token of a layer: neighbours in number, which begin at multiples of the golden section.

    So consecutive tokens, such as a rank's part, are shared nearly equally among a layer's experts, as in the plan. Drawn one by
    one, a rank's share of 2,000 tokens differs by a sixth.
    """
    section = (np.arange(num_tokens) * (5**0.5 - 1) / 2 % 1 * shape.num_experts).astype(np.int64)
    first = section[:, None, None] + np.arange(shape.layers)[:, None]
    return ((first + np.arange(shape.top_k)) % shape.num_experts).astype(shape.dtype)


def examples(fill: Fill, micro_batches: int) -> Batch:
    """Examples of supervised fine-tuning and of KTO; also the texts that a reward model scores."""
    texts = _texts(fill, micro_batches)
    count = len(texts["input_ids"])
    labels = {"desirable": pa.array([True] * count), "ref_log_prob": pa.array([0.0] * count, pa.float32())}
    return Batch(pa.table(texts | labels), fill.shares(micro_batches))


def rankings(fill: Fill, micro_batches: int) -> Batch:
    """Groups of `fill.of` texts, also as chats that a policy learns from."""
    texts = {name: _lists(column, fill.of) for name, column in _texts(fill, micro_batches).items()}
    count = range(len(texts["input_ids"]))
    table = pa.table(
        {
            **texts,
            "scores": _column(count, lambda number: np.arange(fill.of, dtype=np.float64)),
            "margin": pa.array([0.0 for _ in count], pa.float32()),
            "ref_log_probs": _column(count, lambda number: np.zeros(fill.of, np.float32)),
        }
    )
    return Batch(table, fill.shares(micro_batches))


def _texts(fill: Fill, micro_batches: int) -> dict[str, pa.Array]:
    lengths, random = fill.lengths(fill.length, micro_batches), np.random.default_rng(0)
    return {
        "input_ids": _column(lengths, lambda length: random.integers(0, VOCABULARY, length).astype(np.int32)),
        "loss_mask": _column(lengths, lambda length: np.ones(length, bool)),
    }


def _column(sizes: Iterable[int], make: Callable[[int], np.ndarray]) -> pa.Array:
    return pa.array([make(size) for size in sizes])


def _lists(column: pa.Array, each: int) -> pa.Array:
    """Rows of `each` rows of a column."""
    return pa.ListArray.from_arrays(pa.array(range(0, len(column) + 1, each), pa.int32()), column)
