"""Examples for supervised fine-tuning from Parquet or JSON lines: token ids, and which of them are learnt.

Of chats, learnt are the tokens of the assistant's messages with the end token that closes each, that is what the model
itself would have to generate. Where an assistant's message begins and ends in the token ids is found by
rendering the chat up to there: the rendering of a beginning of a chat must be a beginning of the rendering of
the whole, which is checked for every row. Of plain text all tokens are learnt but the first, which nothing predicts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from megarl.data.examples import Rows, read_examples
from megarl.data.files import check_messages, lookup
from megarl.data.loader import TableLoader
from megarl.data.tokenizer import encode_texts, render_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        table: `SFT_SCHEMA`, in file order. Tokens after the last learnt one are left out: no loss reads them.
        num_truncated: rows that were cut to `max_length`.
        num_split: rows of text that became several examples.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        prompt_key: str = "prompt",
        response_key: str | None = None,
        text_key: str | None = None,
        append_eos: bool = True,
        truncation: Literal["error", "right", "split"] = "error",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            files: a path, a glob or a list of both (.parquet, .jsonl, .json).
            max_length: tokens of an example, chat template included.
            prompt_key: with a response_key, the column of the prompt: messages or one string (a user
                message).
            response_key: the column of the response, a string; keys may be dotted ("extra_info.answer").
                Null: the column `messages` holds whole chats, of which every assistant message is learnt.
            text_key: the column of plain text, a string, instead of chats.
            append_eos: whether the tokenizer's end token is put after each text.
            truncation: what is done with longer examples: "error" refuses, "right" cuts their end, "split" makes
                several of a text.
            chat_template_kwargs: what the chat template is given besides the messages.

        Raises:
            ValueError: a missing or unreadable file, wrong rows (named by file and row number), no rows.
        """
        if truncation not in ("error", "right", "split"):
            raise ValueError(f"truncation of SFT data must be error, right or split, found {truncation!r}")
        assert text_key is not None or truncation != "split", "only text is split"
        self._tokenizer = tokenizer
        self._prompt_key = prompt_key
        self._response_key = response_key
        self._text_key = text_key
        self._append_eos = append_eos
        self._max_length = max_length
        self._truncation = truncation
        self._template_kwargs = chat_template_kwargs
        self.num_truncated = self.num_split = 0
        if text_key is not None:
            keys, convert = [text_key], self._of_text
        else:
            keys = [MESSAGES_KEY] if response_key is None else [prompt_key, response_key]
            convert = self._of_chat
        self.table = read_examples(files, keys, convert, SFT_SCHEMA)

    def __len__(self) -> int:
        return self.table.num_rows

    def _of_chat(self, row: dict[str, Any]) -> Rows:
        messages = read_chat(row, self._prompt_key, self._response_key)
        ids, mask = tokenize_chat(self._tokenizer, messages, self._template_kwargs)
        if len(ids) > self._max_length:
            self._refuse_or_count(len(ids))
            ids, mask = ids[: self._max_length], mask[: self._max_length]
            if not any(mask):
                raise ValueError(f"cut to max_length {self._max_length}, no token of the response is left")
        return [{"input_ids": ids, "loss_mask": mask}]

    def _of_text(self, row: dict[str, Any]) -> Rows:
        ids = tokenize_text(self._tokenizer, read_text(row, self._text_key or ""), self._append_eos)
        if len(ids) < 2:
            raise ValueError(f"the text has {len(ids)} token, and nothing predicts the first one")
        pieces = [ids]
        if len(ids) > self._max_length and self._truncation == "split":
            self.num_split += 1
            pieces = split_tokens(ids, self._max_length)
        elif len(ids) > self._max_length:
            self._refuse_or_count(len(ids))
            pieces = [ids[: self._max_length]]
        return [{"input_ids": piece, "loss_mask": [True] * len(piece)} for piece in pieces]

    def _refuse_or_count(self, length: int) -> None:
        """An example of `length` tokens, too many, is cut."""
        if self._truncation == "error":
            other = "right or split" if self._text_key is not None else "right"
            raise ValueError(
                f"the example has {length} tokens, more than max_length {self._max_length}; "
                f"raise it or set truncation to {other}"
            )
        self.num_truncated += 1


def read_text(row: dict[str, Any], key: str) -> str:
    """The plain text of a row.

    Raises:
        ValueError: there is none.
    """
    text = lookup(row, key)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{key!r} must be a non-empty string, found {text!r}")
    return text


def read_chat(row: dict[str, Any], prompt_key: str, response_key: str | None) -> list[dict[str, str]]:
    """The chat of a row; `response_key` None: the column `messages`.

    Raises:
        ValueError: a column is missing or of another form.
    """
    if response_key is None:
        return check_messages(lookup(row, MESSAGES_KEY), MESSAGES_KEY)
    prompt = lookup(row, prompt_key)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    response = lookup(row, response_key)
    if not isinstance(response, str) or not response:
        raise ValueError(f"{response_key!r} must be a non-empty string, found {response!r}")
    return [*check_messages(prompt, prompt_key), {"role": "assistant", "content": response}]


class SftLoader(TableLoader):
    """Batches of examples: tables of `SFT_SCHEMA` (see TableLoader)."""


def tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str, append_eos: bool) -> list[int]:
    """Token ids of plain text with the special tokens that the tokenizer itself puts before a text (such as a start
    token), and the end token after it if `append_eos`."""
    ids = list(tokenizer(text)["input_ids"])
    if append_eos and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return ids


def split_tokens(ids: Sequence[int], max_length: int) -> list[list[int]]:
    """Pieces of at most `max_length` (2 or more) tokens; each but the first begins with the last token of the one before.

    The first token of a piece is predicted by none, so every token but the first of all is predicted exactly once.
    """
    if max_length < 2:
        raise ValueError(
            f"pieces of max_length {max_length} tokens would teach nothing; 2 or more are needed"
        )
    return [list(ids[start : start + max_length]) for start in range(0, len(ids) - 1, max_length - 1)]


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
