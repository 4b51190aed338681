"""Examples that are each desirable or not, from Parquet or JSON lines: a response with a label, or a pair, which is two examples.

A policy learns from them by KTO, which also reads each prompt with the response to another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from megarl.data.chats import TOOLS_KEY, ChatKeywords
from megarl.data.files import Column, Rows, find, lookup, read_examples
from megarl.data.preferences import Chat, response_chat
from megarl.data.sft import tokenize_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LABELLED_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),  # "<file stem>:<row in file>", of a pair with "/0" (chosen) and "/1" (rejected)
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),  # true on the chat's last message and its end token
        ("desirable", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class LabelledKeys:
    """The columns of a row, dotted or not; see `read_labelled`."""

    prompt: str = "prompt"
    response: str = "completion"
    label: str = "label"
    chosen: str = "chosen"
    rejected: str = "rejected"

    def chats(self) -> list[str]:
        return [self.prompt, self.response, self.chosen, self.rejected]

    def columns(self) -> list[str]:
        return [*self.chats(), self.label]

    def needed(self, present: Sequence[str]) -> list[Column]:
        """The columns that a file with the columns `present` must have. As for rankings `prompt` under its usual name is not needed."""
        columns = [] if self.prompt == LabelledKeys.prompt else [Column(self.prompt, "data.prompt_key")]
        if self.chosen.split(".")[0] in present:
            return [*columns, Column(self.rejected, "data.rejected_key")]
        response = Column(
            self.response, "data.response_key (or data.chosen_key and data.rejected_key, for pairs)"
        )
        return [*columns, response, Column(self.label, "data.label_key")]


def read_labelled(row: Mapping[str, Any], keys: LabelledKeys) -> list[tuple[Chat, bool]]:
    """The chats of a row and whether each is desirable: from its response and label or, without a response, from `chosen` and `rejected`.

    Raises:
        ValueError: a column is missing or of another form.
    """
    row = dict(row)
    prompt, response = find(row, keys.prompt), find(row, keys.response)
    if response is None:
        names = ((keys.chosen, True), (keys.rejected, False))
        return [(response_chat(prompt, lookup(row, key), key), label) for key, label in names]
    label = lookup(row, keys.label)
    if not isinstance(label, bool):
        raise ValueError(f"{keys.label!r} must be true (desirable) or false, found {label!r}")
    return [(response_chat(prompt, response, keys.response), label)]


class LabelledChats:
    """All examples of some files, tokenised when the dataset is made.

    Attributes:
        table: `LABELLED_SCHEMA`, rows in file order, with the columns that `mismatched` adds.
        num_dropped: rows that were left out.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        keys: LabelledKeys | None = None,
        truncation: Literal["error", "drop"] = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools_key: str | None = TOOLS_KEY,
    ) -> None:
        """
        Args:
            files: a path, a glob or a list of both (.parquet, .jsonl, .json).
            max_length: tokens of a chat, chat template included.
            truncation: for longer chats: "error" refuses, "drop" leaves out the row.
            chat_template_kwargs: keywords for the chat template; a row's own win.
            tools_key: the column of a row's tools; None: no row has any.

        Raises:
            ValueError: a missing or unreadable file, wrong rows (named by file and row number), no rows, or more than half of the
                examples with one prompt.
        """
        keys = keys or LabelledKeys()
        keywords = ChatKeywords(tools_key, chat_template_kwargs)
        self.num_dropped = 0

        def examples(row: dict[str, Any]) -> Rows:
            found = []
            for chat, desirable in read_labelled(row, keys):
                ids, mask = tokenize_chat(tokenizer, chat, keywords.of_row(row), only_last=True)
                found.append({"input_ids": ids, "loss_mask": mask, "desirable": desirable})
            longest = max(len(example["input_ids"]) for example in found)
            if longest > max_length and truncation == "drop":
                self.num_dropped += 1
                return []
            if longest > max_length:
                raise ValueError(
                    f"a chat has {longest} tokens, more than max_length {max_length}; raise it or set truncation to drop"
                )
            return found

        further = keywords.columns
        table = read_examples(
            files,
            [*keys.columns(), *further],
            examples,
            LABELLED_SCHEMA,
            lambda present: [*keys.needed(present), *keywords.needed],
            [*keys.chats(), *further],
        )
        self.table = mismatched(table, max_length)

    def __len__(self) -> int:
        return self.table.num_rows


def mismatched(table: pa.Table, max_length: int) -> pa.Table:
    """Examples, each with its prompt and the response to another prompt as `kl_input_ids` and `kl_loss_mask`.

    Every response is used once. With the examples in the order of their prompts, each takes the response of the example n places before it,
    where n is the number of examples of the most frequent prompt.

    Args:
        table: `LABELLED_SCHEMA`.
        max_length: tokens to which these chats are cut.

    Raises:
        ValueError: a prompt has more than half of the examples.
    """
    chats = list(zip(table["input_ids"].to_pylist(), table["loss_mask"].to_pylist(), strict=True))
    starts = [mask.index(True) for _, mask in chats]
    number: dict[tuple[int, ...], int] = {}
    prompts = np.array(
        [
            number.setdefault(tuple(ids[:start]), len(number))
            for (ids, _), start in zip(chats, starts, strict=True)
        ]
    )
    most = int(np.bincount(prompts).max())
    if 2 * most > len(chats):
        raise ValueError(
            f"{most} of {len(chats)} examples have the same prompt: KTO compares with responses to other prompts, so that a prompt may have "
            "half of all examples at most"
        )
    order = np.argsort(prompts, kind="stable")
    kl_ids, kl_masks = [[0]] * len(chats), [[False]] * len(chats)
    for row, other in zip(order.tolist(), np.roll(order, most).tolist(), strict=True):
        (ids, mask), start, (others, other_mask), begin = chats[row], starts[row], chats[other], starts[other]
        kl_ids[row] = (ids[:start] + others[begin:])[:max_length]
        kl_masks[row] = (mask[:start] + other_mask[begin:])[:max_length]
    columns = {"kl_input_ids": (kl_ids, pa.int32()), "kl_loss_mask": (kl_masks, pa.bool_())}
    for name, (values, kind) in columns.items():
        table = table.append_column(name, pa.array(values, pa.list_(kind)))
    return table


def mismatched_chats(table: pa.Table) -> pa.Table:
    """The prompt of each example with the response to another one: `input_ids`, `loss_mask`."""
    return pa.table({"input_ids": table["kl_input_ids"], "loss_mask": table["kl_loss_mask"]})
