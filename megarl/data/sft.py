"""Examples for supervised fine-tuning from Parquet or JSON lines: token ids, and which of them are learnt.

Learnt are the tokens of the assistant's messages with the end token that closes each, that is what the model
itself would have to generate. Where an assistant's message begins and ends in the token ids is found by
rendering the chat up to there: the rendering of a beginning of a chat must be a beginning of the rendering of
the whole, which is checked for every row.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from megarl.data.files import RowErrors, check_messages, iter_rows, lookup, num_rows
from megarl.data.loader import TableLoader
from megarl.data.prompts import PROGRESS_FROM_ROWS, unique_stems
from megarl.data.sources import DataFile, resolve_files
from megarl.data.tokenizer import encode_texts, render_text

SFT_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),  # "<file stem>:<row in file>"
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),  # true on tokens that are learnt
    ]
)
MESSAGES_KEY = "messages"


class SftDataset:
    """All examples of some files, tokenised when the dataset is made.

    Attributes:
        table: `SFT_SCHEMA`, rows in file order. Tokens after the last learnt one are left out: no loss reads
            them.
        num_truncated: rows that were cut to `max_length`.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        prompt_key: str = "prompt",
        response_key: str | None = None,
        truncation: Literal["error", "right"] = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            files: a path, a glob or a list of both (.parquet, .jsonl).
            max_length: tokens of an example, chat template included.
            prompt_key: with a response_key, the column of the prompt: messages or one string (a user
                message).
            response_key: the column of the response, a string; both keys may be dotted ("extra_info.answer").
                Null: the column `messages` holds whole chats, of which every assistant message is learnt.
            truncation: what is done with longer examples: "error" refuses, "right" cuts their end.
            chat_template_kwargs: what the chat template is given besides the messages.

        Raises:
            ValueError: a missing or unreadable file, wrong rows (named by file and row number), no rows.
        """
        if truncation not in ("error", "right"):
            raise ValueError(f"truncation of SFT data must be error or right, found {truncation!r}")
        self._tokenizer = tokenizer
        self._prompt_key = prompt_key
        self._response_key = response_key
        self._max_length = max_length
        self._truncation = truncation
        self._template_kwargs = chat_template_kwargs
        self._errors = RowErrors()
        self.num_truncated = 0
        paths = resolve_files(files)
        self.table = self._read(paths)
        self._errors.raise_if_any()
        if not self.table.num_rows:
            raise ValueError(f"no rows in {', '.join(map(str, paths))}")

    def __len__(self) -> int:
        return self.table.num_rows

    def _read(self, paths: list[DataFile]) -> pa.Table:
        keys = [MESSAGES_KEY] if self._response_key is None else [self._prompt_key, self._response_key]
        columns = list(dict.fromkeys(column for key in keys for column in (key, key.split(".")[0])))
        rows: dict[str, list[Any]] = {name: [] for name in SFT_SCHEMA.names}
        total = sum(num_rows(path) or 0 for path in paths)
        with Progress(transient=True, disable=total < PROGRESS_FROM_ROWS) as progress:
            task = progress.add_task("tokenising examples", total=total or None)
            for path, name in zip(paths, unique_stems(paths), strict=True):
                for number, row in iter_rows(path, columns):
                    try:
                        ids, mask = self._example(row)
                    except ValueError as error:
                        self._errors.add(path, number, str(error))
                    else:
                        rows["uid"].append(f"{name}:{number}")
                        rows["input_ids"].append(ids)
                        rows["loss_mask"].append(mask)
                    progress.advance(task)
        return pa.table(rows, schema=SFT_SCHEMA)

    def _example(self, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
        ids, mask = tokenize_chat(self._tokenizer, self._messages(row), self._template_kwargs)
        if len(ids) > self._max_length:
            if self._truncation == "error":
                raise ValueError(
                    f"the example has {len(ids)} tokens, more than max_length {self._max_length}; "
                    "raise it or set truncation to right"
                )
            ids, mask = ids[: self._max_length], mask[: self._max_length]
            self.num_truncated += 1
            if not any(mask):
                raise ValueError(f"cut to max_length {self._max_length}, no token of the response is left")
        return ids, mask

    def _messages(self, row: dict[str, Any]) -> list[dict[str, str]]:
        if self._response_key is None:
            return check_messages(lookup(row, MESSAGES_KEY), MESSAGES_KEY)
        prompt = lookup(row, self._prompt_key)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        response = lookup(row, self._response_key)
        if not isinstance(response, str) or not response:
            raise ValueError(f"{self._response_key!r} must be a non-empty string, found {response!r}")
        return [*check_messages(prompt, self._prompt_key), {"role": "assistant", "content": response}]


class SftLoader(TableLoader):
    """Batches of examples: tables of `SFT_SCHEMA` (see TableLoader)."""


def tokenize_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat up to the last learnt token, and for each whether it is learnt.

    Raises:
        ValueError: no assistant message; the chat template renders a beginning of the chat otherwise than it
            begins the whole (some templates drop earlier reasoning), or its tokens merge across the border.
    """
    turns = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("there is no assistant message to learn from")
    if turns[0] == 0:
        raise ValueError("the first message is the assistant's: there is no prompt")
    texts = []
    for turn in turns:
        texts.append(render_text(tokenizer, messages[:turn], True, template_kwargs))
        texts.append(render_text(tokenizer, messages[: turn + 1], False, template_kwargs))
    encoded = encode_texts(tokenizer, texts)
    ids = encoded[-1]  # what follows the last assistant message teaches nothing
    mask = [False] * len(ids)
    for index, turn in enumerate(turns):
        before, through = encoded[2 * index], encoded[2 * index + 1]
        if ids[: len(before)] != before or ids[: len(through)] != through:
            raise ValueError(
                "the chat template does not keep beginnings: the tokens before or through message "
                f"{turn} are not the beginning of the tokens of the whole chat, so what the assistant "
                "generates cannot be told apart"
            )
        end = _end_of_turn(tokenizer, through, len(before))
        mask[len(before) : end] = [True] * (end - len(before))
    return ids[:end], mask[:end]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int) -> int:
    """Where the part that the model generates ends: after the last end token of ids[start:], at which
    generation stops (templates go on with a newline)."""
    for position in range(len(ids) - 1, start - 1, -1):
        if ids[position] == tokenizer.eos_token_id:
            return position + 1
    warnings.warn(
        f"the chat template does not end the assistant's messages with the tokenizer's end token "
        f"{tokenizer.eos_token!r}: a model trained on them does not learn to stop there",
        stacklevel=2,
    )
    return len(ids)
