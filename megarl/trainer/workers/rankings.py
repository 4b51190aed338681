"""Rankings as a batch of texts that are compared with each other: the same on the controller and on the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import torch

from megarl.algorithms.preference import Pairs, ranking_pairs


def compared_texts(table: pa.Table, rows: Sequence[int] | None = None) -> tuple[Pairs, torch.Tensor]:
    """The pairs of these rankings' texts, numbered as `texts_of` has them, and each text's margin [texts] (float32)."""
    chosen = table if rows is None else table.take(pa.array(rows, pa.int64()))
    scores, margins = chosen["scores"].to_pylist(), chosen["margin"].to_pylist()
    counts = torch.tensor([len(own) for own in scores])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    flat = torch.tensor([score for own in scores for score in own], dtype=torch.float64)
    return ranking_pairs(flat, offsets), torch.tensor(margins).repeat_interleave(counts)


def compared_chats(table: pa.Table, rows: Sequence[int] | None = None) -> tuple[Pairs, torch.Tensor]:
    """The pairs of these rankings' chats, numbered as `chats_of` has them, and each one's `ref_log_probs` [chats] (float32)."""
    chosen = table if rows is None else table.take(pa.array(rows, pa.int64()))
    scores = chosen["scores"].to_pylist()
    offsets = torch.nn.functional.pad(torch.tensor([len(own) for own in scores]).cumsum(0), (1, 0))
    flat = torch.tensor([score for own in scores for score in own], dtype=torch.float64)
    reference = [value for own in chosen["ref_log_probs"].to_pylist() for value in own]
    return ranking_pairs(flat, offsets), torch.tensor(reference, dtype=torch.float32)
