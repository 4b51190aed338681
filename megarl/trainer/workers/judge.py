"""The process that owns an engine of a reference: it judges the responses of trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from megarl.data.routing import binary_lists
from megarl.data.trajectories import REF_TOP_TOKENS, from_lists
from megarl.rollout.sglang.judging import SGLangJudge, Text
from megarl.trainer.workers.dispatch import RowColumns
from megarl.trainer.workers.engine import EngineWorker


class JudgeWorker(EngineWorker):
    """One engine, or a further node's part of one."""

    engine_class = SGLangJudge

    def judge(self, table: pa.Table, rows: Sequence[int], top: int) -> RowColumns:
        """The columns that `ActorWorker.compute_ref_log_probs` returns for these rows, or `compute_ref_top_tokens` with `top`: 0 for tokens that
        the policy did not choose. No request is made for a row without a token of the policy."""
        assert isinstance(self.engine, SGLangJudge), "the other parts of an engine are not called"
        names = ["uid", "prompt_ids", "response_ids", "response_mask"]
        own = table.select(names).take(pa.array(rows, pa.int64())).to_pylist()
        masks = [np.array(row["response_mask"], bool) for row in own]
        asked = [number for number, mask in enumerate(masks) if mask.any()]
        texts = [Text(own[at]["uid"], own[at]["prompt_ids"], own[at]["response_ids"]) for at in asked]
        found = dict(zip(asked, self.engine.judge(texts, top), strict=True))
        log_probs = [
            np.where(mask, found[at].log_probs, np.float32(0)) if at in found else np.zeros(len(mask))
            for at, mask in enumerate(masks)
        ]
        columns = {"ref_log_probs": from_lists(log_probs, np.float32)}
        if top:
            empty = [np.zeros((len(mask), 2 * top), np.float32) for mask in masks]
            columns[REF_TOP_TOKENS] = binary_lists(
                [found[at].top if at in found else none for at, none in enumerate(empty)]
            )
        return list(rows), columns
