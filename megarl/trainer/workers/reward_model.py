"""The reward model's ranks: one number for each text."""

from __future__ import annotations

import pyarrow as pa

from megarl.megatron.heads import value_head
from megarl.trainer.workers.model import ModelWorker, RowColumns, Share


class RewardModelWorker(ModelWorker):
    """A rank of the reward model."""

    def score_texts(self, texts: pa.Table, shares: list[Share]) -> RowColumns | None:
        """The head's output at the last token of each text (column `input_ids`), as column `scores` of one value a row:
        what transformers' *ForSequenceClassification gives as the logit of its one label."""
        share = shares[self.coords.dp]
        batches = self.pack_texts(texts, share)
        return self.forward_columns(self.chunks, batches, share, value_head, ["scores"])
