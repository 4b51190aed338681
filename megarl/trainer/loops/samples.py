"""Some trajectories as text, for people to read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase


def sample_rows(table: pa.Table, tokenizer: PreTrainedTokenizerBase, count: int) -> list[dict[str, Any]]:
    """`count` answers (or all), evenly spaced in the table: the same prompts in every validation.

    Args:
        table: scored trajectories.
    """
    rows = np.unique(np.linspace(0, table.num_rows - 1, min(count, table.num_rows)).astype(np.int64))
    return [
        {
            "prompt": tokenizer.decode(row["prompt_ids"]),
            "response": tokenizer.decode(row["response_ids"]),
            "ground_truth": row["ground_truth"],
            "score": row["score"],
        }
        for row in table.take(pa.array(rows)).to_pylist()
    ]
