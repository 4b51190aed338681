"""Preferences as chats of which a policy may learn: rankings of texts with the tokens that it would generate itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from megarl.data.chats import TOOLS_KEY, ChatKeywords
from megarl.data.examples import Rows, read_examples
from megarl.data.preferences import PreferenceKeys, read_ranking
from megarl.data.sft import tokenize_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREFERENCE_CHAT_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),  # "<file stem>:<row in file>"
        ("input_ids", pa.list_(pa.list_(pa.int32()))),  # of each chat
        (
            "loss_mask",
            pa.list_(pa.list_(pa.bool_())),
        ),  # true on the tokens of its last message and the end token
        ("scores", pa.list_(pa.float64())),  # of each chat: greater is better, equal ones are not compared
    ]
)


class PreferenceChats:
    """All rankings of some files, tokenised when the dataset is made.

    Attributes:
        table: `PREFERENCE_CHAT_SCHEMA`, rows in file order.
        num_dropped: rows that were left out.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        max_tokens: int,
        keys: PreferenceKeys,
        truncation: Literal["error", "drop"] = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools_key: str | None = TOOLS_KEY,
    ) -> None:
        """
        Args:
            files: a path, a glob or a list of both (.parquet, .jsonl, .json).
            max_length: tokens of a chat.
            max_tokens: of all chats of a ranking together, which are in one micro-batch.
            truncation: what is done with longer chats: "error" refuses, "drop" leaves out the row.
            chat_template_kwargs: what the chat template is given besides the messages; a row's own win.
            tools_key: the column of a row's tools; None: no row has any.

        Raises:
            ValueError: a missing or unreadable file, wrong rows (named by file and row number), no rows.
        """
        self._tokenizer, self._keys = tokenizer, keys
        self._keywords = ChatKeywords(tools_key, chat_template_kwargs)
        self._max_length, self._max_tokens, self._truncation = max_length, max_tokens, truncation
        self.num_dropped = 0
        further = self._keywords.columns
        self.table = read_examples(
            files,
            [*keys.columns(), *further],
            self._of_row,
            PREFERENCE_CHAT_SCHEMA,
            lambda present: [*keys.needed(present), *self._keywords.needed],
            [*keys.chats(), *further],
        )

    def __len__(self) -> int:
        return self.table.num_rows

    def _of_row(self, row: dict[str, Any]) -> Rows:
        ranking = read_ranking(row, self._keys)
        keywords = self._keywords.of_row(row)
        chats = [tokenize_chat(self._tokenizer, chat, keywords, only_last=True) for chat in ranking.chats]
        lengths = [len(ids) for ids, _ in chats]
        if max(lengths) > self._max_length:
            if self._truncation == "drop":
                self.num_dropped += 1
                return []
            raise ValueError(
                f"a chat has {max(lengths)} tokens, more than max_length {self._max_length}; raise it or set truncation to "
                "drop"
            )
        if sum(lengths) > self._max_tokens:
            raise ValueError(
                f"the {len(chats)} chats have {sum(lengths)} tokens together, more than max_token_len_per_gpu "
                f"{self._max_tokens}: they are compared in one micro-batch; raise it to {sum(lengths)} at least"
            )
        masks = [mask for _, mask in chats]
        return [{"input_ids": [ids for ids, _ in chats], "loss_mask": masks, "scores": ranking.scores}]


def chats_of(table: pa.Table, rows: Sequence[int] | None = None) -> pa.Table:
    """The chats of the rankings `rows` (None: all), one ranking after the other: `input_ids` and `loss_mask`, one a row."""
    chosen = table if rows is None else table.take(pa.array(rows, pa.int64()))
    return pa.table({name: chosen[name].combine_chunks().flatten() for name in ("input_ids", "loss_mask")})
