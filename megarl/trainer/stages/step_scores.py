"""Scores of a response's steps: from the characters that a reward function names to tokens, as a column of trajectories.

The column has a JSON text for each row: [[number of a token of the response, score], ...]; "[]" without steps, as with most rewards.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from megarl.rewards.sample import Score

STEP_SCORES = "step_scores"


def with_step_scores(
    table: pa.Table, scores: Mapping[str, Score], tokenizer: PreTrainedTokenizerBase, weight: float
) -> pa.Table:
    """Append STEP_SCORES: the steps' scores from `scores` (by uid), each times `weight`."""
    found = []
    for row, uid in enumerate(table["uid"].to_pylist()):
        steps = scores[uid].steps if uid in scores else ()
        if not steps:
            found.append("[]")
            continue
        places = last_tokens(tokenizer, table["response_ids"][row].as_py(), [end for end, _ in steps])
        found.append(
            json.dumps([[place, weight * score] for place, (_, score) in zip(places, steps, strict=True)])
        )
    return table.append_column(STEP_SCORES, pa.array(found, pa.string()))


def add_step_scores(
    table: pa.Table, steps: Sequence[Sequence[tuple[int, float]]], weight: float, failed: np.ndarray
) -> pa.Table:
    """Add further scores of steps, by token, to STEP_SCORES, each times `weight`; none to rows that `failed` [rows]."""
    found = [
        own if lost else sorted([*own, *((place, weight * score) for place, score in more)])
        for own, more, lost in zip(read_step_scores(table), steps, failed, strict=True)
    ]
    column = pa.array([json.dumps(own) for own in found], pa.string())
    return table.set_column(table.column_names.index(STEP_SCORES), STEP_SCORES, column)


def last_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each of `ends`, the number of the token with which the text of `ids`, without special tokens, reaches that many characters."""

    def text(count: int) -> str:
        return tokenizer.decode(ids[:count], skip_special_tokens=True)

    whole = text(len(ids))
    lengths = _lengths(tokenizer, ids, whole)
    if lengths is not None:
        return [bisect.bisect_left(lengths, end) for end in ends]
    return [
        bisect.bisect_left(range(len(ids)), True, key=lambda place: text(place + 1)[:end] == whole[:end])
        for end in ends
    ]


def _lengths(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], whole: str) -> list[int] | None:
    """By token, the number of complete characters in the text up to and with it, in one pass; None: the tokens do not tell.

    A stream holds back bytes that are no character yet. At a text's end they are a replacement character, so `whole` must not have one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer) or "\ufffd" in whole:
        return None
    stream = DecodeStream(skip_special_tokens=True)
    texts = [stream.step(backend, token) or "" for token in ids]
    return list(itertools.accumulate(map(len, texts))) if "".join(texts) == whole else None


def read_step_scores(table: pa.Table) -> list[list[tuple[int, float]]]:
    """The steps of each row: number of a token of the response, and score; none where the table has no such column."""
    if STEP_SCORES not in table.column_names:
        return [[]] * table.num_rows
    return [
        [(int(place), float(score)) for place, score in json.loads(text)]
        for text in table[STEP_SCORES].to_pylist()
    ]


def step_sums(table: pa.Table) -> np.ndarray:
    """The sum of the scores of each row's steps [rows]."""
    return np.array([sum(score for _, score in steps) for steps in read_step_scores(table)], dtype=np.float64)


def flat_steps(
    table: pa.Table, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """All steps: rows (int64), tokens in flat tensors (int64), scores (float32), [steps] each; None: there are none."""
    flat = [
        (row, start + place, score)
        for row, (start, steps) in enumerate(zip(offsets.tolist(), read_step_scores(table), strict=False))
        for place, score in steps
    ]
    if not flat:
        return None
    rows, places, scores = zip(*flat, strict=True)
    return torch.tensor(rows), torch.tensor(places), torch.tensor(scores, dtype=torch.float32)
