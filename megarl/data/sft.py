"""Examples for supervised fine-tuning from Parquet or JSON lines: token ids, and which of them are learnt.

In chats the assistant's messages are learnt, with the end token of each: the tokens that the model itself would have to
generate, as the chat template shows them in the whole chat (`megarl.data.turns`). Where a template marks generated text
(`{% generation %}`), its marks decide. In plain text every token but the first is learnt, which nothing predicts.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from megarl.data.chats import TOOLS_KEY, ChatKeywords, Message, check_messages, prompt_messages
from megarl.data.files import Column, Rows, lookup, read_examples
from megarl.data.tokenizer import check_unicode, encode_texts, marked_generation
from megarl.data.turns import find_turns

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
        tools_key: str | None = TOOLS_KEY,
        section: str = "data",
    ) -> None:
        """
        Args:
            files: a path, a glob or a list of both (.parquet, .jsonl, .json).
            max_length: tokens of an example, chat template included.
            prompt_key: with a response_key, the column of the prompt: messages or one string (a user
                message).
            response_key: the column of the response, a string; keys may be dotted ("extra_info.answer").
                None: the column `messages` holds whole chats; every assistant message in them is learnt.
            text_key: the column of plain text, a string, instead of chats.
            append_eos: whether the tokenizer's end token is put after each text.
            truncation: for longer examples: "error" refuses, "right" cuts their end, "split" cuts a text into several.
            chat_template_kwargs: keywords for the chat template; a row's own win.
            tools_key: the column of a row's tools; None: no row has any.
            section: the configuration section that names the columns, for errors.

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
        self._keywords = ChatKeywords(tools_key, chat_template_kwargs)
        self.num_truncated = self.num_split = 0
        if text_key is not None:
            columns, convert = [Column(text_key, f"{section}.text_key")], self._of_text
        else:
            columns, convert = chat_columns(prompt_key, response_key, section), self._of_chat
        keys = [column.name for column in columns]
        chats = [*keys, *self._keywords.columns] if text_key is None else []
        needed = [*columns, *self._keywords.needed] if text_key is None else columns
        self.table = read_examples(files, chats or keys, convert, SFT_SCHEMA, lambda _: needed, chats)

    def __len__(self) -> int:
        return self.table.num_rows

    def _of_chat(self, row: dict[str, Any]) -> Rows:
        chat = chat_of_row(row, self._prompt_key, self._response_key)
        ids, mask = tokenize_chat(self._tokenizer, chat, self._keywords.of_row(row))
        if len(ids) > self._max_length:
            self._refuse_or_count(len(ids))
            ids, mask = ids[: self._max_length], mask[: self._max_length]
            if not any(mask):
                raise ValueError(f"cut to max_length {self._max_length}, no token of the response is left")
        return [{"input_ids": ids, "loss_mask": mask}]

    def _of_text(self, row: dict[str, Any]) -> Rows:
        ids = tokenize_text(self._tokenizer, text_of_row(row, self._text_key or ""), self._append_eos)
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
        """Count an example of `length` tokens as cut. ValueError: examples must not be cut."""
        if self._truncation == "error":
            other = "right or split" if self._text_key is not None else "right"
            raise ValueError(
                f"the example has {length} tokens, more than max_length {self._max_length}; "
                f"raise it or set truncation to {other}"
            )
        self.num_truncated += 1


def trained_tokens(table: pa.Table) -> int:
    """The number of trained tokens of `SFT_SCHEMA`; no token predicts the first one of an example."""
    return sum(sum(mask[1:]) for mask in table["loss_mask"].to_pylist())


def text_of_row(row: dict[str, Any], key: str) -> str:
    """The plain text of a row.

    Raises:
        ValueError: there is none.
    """
    text = lookup(row, key)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{key!r} must be a non-empty string, found {text!r}")
    return text


def chat_of_row(row: dict[str, Any], prompt_key: str, response_key: str | None) -> list[Message]:
    """The chat of a row; `response_key` None: the column `messages`.

    Raises:
        ValueError: a column is missing or of another form.
    """
    if response_key is None:
        return check_messages(lookup(row, MESSAGES_KEY), MESSAGES_KEY)
    prompt = prompt_messages(lookup(row, prompt_key), prompt_key)
    response = lookup(row, response_key)
    if not isinstance(response, str) or not response:
        raise ValueError(f"{response_key!r} must be a non-empty string, found {response!r}")
    return [*prompt, {"role": "assistant", "content": response}]


def chat_columns(prompt_key: str, response_key: str | None, section: str) -> list[Column]:
    """The columns that a file of chats must have; `section`: of the configuration that names them."""
    if response_key is None:
        other = f"{section}.response_key and {section}.prompt_key, or {section}.text_key"
        return [Column(MESSAGES_KEY, other)]
    return [Column(prompt_key, f"{section}.prompt_key"), Column(response_key, f"{section}.response_key")]


def tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str, append_eos: bool) -> list[int]:
    """Token ids of plain text with the special tokens that the tokenizer itself puts before a text (such as a start
    token), and the end token after it if `append_eos`.

    Raises:
        ValueError: the text is no Unicode, or the tokenizer has no end token.
    """
    check_unicode(text)
    ids = list(tokenizer(text)["input_ids"])
    if append_eos and tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end token to put behind texts: name one in its tokenizer_config.json (eos_token), or set "
            "data.append_eos=false"
        )
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
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
    only_last: bool = False,
) -> tuple[list[int], list[bool]]:
    """Token ids of a chat up to the last learnt token, and for each whether it is learnt.

    Args:
        messages: with all their fields (see `megarl.data.chats`).
        template_kwargs: further keywords for the chat template, such as `tools`.
        only_last: the assistant's last message alone is learnt.

    Raises:
        ValueError: no assistant message, or an assistant's turn that cannot be told apart (see `find_turns`).
    """
    chat = check_messages(list(messages), MESSAGES_KEY)
    turns = [position for position, message in enumerate(chat) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("there is no assistant message to learn from")
    if turns[0] == 0:
        raise ValueError("the first message is the assistant's: there is no prompt")
    marked = marked_generation(tokenizer, chat, template_kwargs)
    if marked is None:
        rendered = find_turns(tokenizer, chat, template_kwargs, only_last)
        ids, mask = _of_spans(tokenizer, rendered.text, rendered.spans)
    else:
        ids, mask = marked
        mask = _last_stretch(mask) if only_last else mask
    if not any(mask):
        raise ValueError("the chat template renders the assistant's messages to no tokens")
    length = len(mask) - mask[::-1].index(True)  # tokens behind the last assistant message teach nothing
    return ids[:length], mask[:length]


def _of_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """Token ids of a text, and which of them lie in its spans, wholly or in part."""
    borders = [border for span in spans for border in span]
    parts = [text[start:end] for start, end in itertools.pairwise([0, *borders, len(text)])]
    ids, *pieces = encode_texts(tokenizer, [text, *parts])
    places = list(itertools.accumulate(map(len, pieces[:-1])))
    if list(itertools.chain(*pieces)) != ids:  # tokens depend on the text before a border, or cross it
        beginnings = encode_texts(tokenizer, [text[:border] for border in borders])
        places = [_num_common(ids, beginning) for beginning in beginnings]
        cut = [place < len(beginning) for place, beginning in zip(places, beginnings, strict=True)]
        if any(cut):
            warnings.warn(
                "a turn of the assistant's begins or ends inside of a token: the chat template's text around it merges "
                "with the turn's, so that a rollout, which is given that text alone, begins or ends with other tokens "
                "than are learnt",
                stacklevel=2,
            )
            places[1::2] = [end + inside for end, inside in zip(places[1::2], cut[1::2], strict=True)]
    mask = [False] * len(ids)
    for start, end in zip(places[::2], places[1::2], strict=True):
        mask[start:end] = [True] * (end - start)
    return ids, mask


def _num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    for number, (one, other) in enumerate(zip(ids, others, strict=False)):
        if one != other:
            return number
    return min(len(ids), len(others))


def _last_stretch(mask: list[bool]) -> list[bool]:
    """The mask with its last run of learnt tokens alone."""
    end = len(mask) - mask[::-1].index(True) if any(mask) else 0
    start = max((place + 1 for place in range(end) if not mask[place]), default=0)
    return [start <= place < end for place in range(len(mask))]
