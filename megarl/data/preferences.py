"""Preferences from Parquet or JSON lines: several texts for one prompt, and which of them is better.

A row is a ranking of K texts: a pair (`chosen`, `rejected`), or `responses` with `ranks` or `scores`. Each text is the prompt
with one response, as the chat template renders it. A reward model reads the texts of `PreferenceDataset`; a policy learns
from `PreferenceChats`, which mark the tokens that it would generate itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from megarl.data.chats import (
    TOOLS_KEY,
    ChatKeywords,
    Message,
    check_calls_shown,
    check_messages,
    prompt_messages,
    read_chat,
)
from megarl.data.files import Column, Rows, find, lookup, read_examples
from megarl.data.sft import tokenize_chat
from megarl.data.tokenizer import encode_texts, render_text
from megarl.data.turns import as_a_policy_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PREFERENCE_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),  # "<file stem>:<row in file>"
        ("input_ids", pa.list_(pa.list_(pa.int32()))),  # of each text
        ("scores", pa.list_(pa.float64())),  # of each text: greater is better, equal ones are not compared
        ("margin", pa.float32()),
    ]
)
PREFERENCE_CHAT_SCHEMA = pa.schema(
    [
        *(PREFERENCE_SCHEMA.field(name) for name in ("uid", "input_ids")),
        ("loss_mask", pa.list_(pa.list_(pa.bool_()))),  # true on a chat's last message and its end token
        PREFERENCE_SCHEMA.field("scores"),
    ]
)
ANSWER_SCHEMA = pa.schema([("uid", pa.string()), ("input_ids", pa.list_(pa.int32()))])

Chat = list[Message]


@dataclass(frozen=True)
class PreferenceKeys:
    """The columns of a row, dotted or not; see `read_ranking`."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str | None = None
    responses: str = "responses"
    ranks: str = "ranks"
    scores: str = "scores"

    def chats(self) -> list[str]:
        return [self.prompt, self.chosen, self.rejected, self.responses]

    def columns(self) -> list[str]:
        keys = (*self.chats(), self.margin, self.ranks, self.scores)
        return [key for key in keys if key is not None]

    def needed(self, present: Sequence[str]) -> list[Column]:
        """The columns that a file with the columns `present` must have. `prompt` under its usual name is not needed, because
        responses may be whole chats."""
        columns = [] if self.prompt == PreferenceKeys.prompt else [Column(self.prompt, "data.prompt_key")]
        if self.margin is not None:
            columns.append(Column(self.margin, "data.margin_key"))
        if self.responses.split(".")[0] not in present:
            return [
                *columns,
                Column(self.chosen, "data.chosen_key"),
                Column(
                    self.rejected, "data.rejected_key (or data.responses_key, for several that are ranked)"
                ),
            ]
        if self.ranks.split(".")[0] in present:
            return columns
        return [*columns, Column(self.scores, "data.scores_key or data.ranks_key")]


@dataclass(frozen=True)
class Ranking:
    """Chats with the same prompt and different responses, and how good each is.

    Attributes:
        chats: each ends with a message of the assistant's.
        scores: of each chat, greater is better.
        margin: by how much the reward of the better of two texts should be greater, at least.
    """

    chats: list[Chat]
    scores: list[float]
    margin: float


def read_ranking(row: Mapping[str, Any], keys: PreferenceKeys) -> Ranking:
    """The ranking of a row: of `responses` where it has them, else of `chosen` and `rejected`.

    Raises:
        ValueError: a column is missing or of another form; no two responses differ in rank.
    """
    row = dict(row)
    prompt, responses = find(row, keys.prompt), find(row, keys.responses)
    if responses is None:
        chats = [response_chat(prompt, lookup(row, key), key) for key in (keys.chosen, keys.rejected)]
        scores = [1.0, 0.0]
    else:
        if not isinstance(responses, list) or len(responses) < 2:
            raise ValueError(f"{keys.responses!r} must be a list of two or more, found {responses!r}")
        chats = [response_chat(prompt, response, keys.responses) for response in responses]
        scores = _scores(row, keys, len(responses))
    margin = 0.0 if keys.margin is None else lookup(row, keys.margin)
    if not _is_number(margin):
        raise ValueError(f"{keys.margin!r} must be a number, found {margin!r}")
    return Ranking(chats, scores, float(margin))


def tokenize_whole_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    end_at_eos: bool,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a chat as the template renders it.

    Args:
        end_at_eos: end the text as a policy does, which stops at the end token (see `as_a_policy_ends`); a template
            without one is kept whole.

    Raises:
        ValueError: the template refuses the messages, or does not show the last one's calls.
    """
    text = render_text(tokenizer, messages, False, template_kwargs)
    check_calls_shown(messages[-1], text, "the last message")
    if end_at_eos:
        text = as_a_policy_ends(tokenizer, text, messages[-1], template_kwargs)
    return encode_texts(tokenizer, [text])[0]


class PreferenceDataset:
    """All rankings of some files, tokenised when the dataset is made.

    Attributes:
        table: `PREFERENCE_SCHEMA`, rows in file order.
        num_truncated: texts that were cut to `max_length`.
        num_dropped: rows that were left out.
    """

    _schema = PREFERENCE_SCHEMA
    _text = "text"  # the word for one in errors
    _truncations = ("right", "drop")

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        max_tokens: int | None = None,
        keys: PreferenceKeys | None = None,
        truncation: Literal["error", "right", "drop"] = "error",
        end_at_eos: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools_key: str | None = TOOLS_KEY,
    ) -> None:
        """
        Args:
            files: a path, a glob or a list of both (.parquet, .jsonl, .json).
            max_length: tokens of a text, chat template included.
            max_tokens: of all texts of a ranking together, which are in one micro-batch; None: any number.
            truncation: for longer texts: "error" refuses, "right" cuts their end, "drop" leaves out the row.
            end_at_eos: see `tokenize_whole_chat`.
            chat_template_kwargs: keywords for the chat template; a row's own win.
            tools_key: the column of a row's tools; None: no row has any.

        Raises:
            ValueError: a missing or unreadable file, wrong rows (named by file and row number), no rows.
        """
        self._tokenizer, self._keys = tokenizer, keys or PreferenceKeys()
        self._max_length, self._max_tokens, self._truncation = max_length, max_tokens, truncation
        self._end_at_eos, self._keywords = end_at_eos, ChatKeywords(tools_key, chat_template_kwargs)
        self.num_truncated = self.num_dropped = 0
        further = self._keywords.columns
        self.table = read_examples(
            files,
            [*self._keys.columns(), *further],
            self._of_row,
            self._schema,
            lambda present: [*self._keys.needed(present), *self._keywords.needed],
            [*self._keys.chats(), *further],
        )

    def __len__(self) -> int:
        return self.table.num_rows

    def _of_row(self, row: dict[str, Any]) -> Rows:
        ranking = read_ranking(row, self._keys)
        keywords = self._keywords.of_row(row)
        found = [self._tokenised(chat, keywords) for chat in ranking.chats]
        texts = [ids for ids, _ in found]
        longest = max(map(len, texts))
        if longest > self._max_length:
            if self._truncation not in self._truncations:
                raise ValueError(
                    f"a {self._text} has {longest} tokens, more than max_length {self._max_length}; raise it or set "
                    f"truncation to {' or '.join(self._truncations)}"
                )
            if self._truncation == "drop":
                self.num_dropped += 1
                return []
            self.num_truncated += sum(len(text) > self._max_length for text in texts)
            texts = [text[: self._max_length] for text in texts]
        total = sum(map(len, texts))
        if self._max_tokens is not None and total > self._max_tokens:
            raise ValueError(
                f"the {len(texts)} {self._text}s have {total} tokens together, more than max_token_len_per_gpu "
                f"{self._max_tokens}: they are compared in one micro-batch; raise it to {total} at least"
            )
        columns = {
            "input_ids": texts,
            "loss_mask": [mask for _, mask in found],
            "scores": ranking.scores,
            "margin": ranking.margin,
        }
        return [{name: column for name, column in columns.items() if name in self._schema.names}]

    def _tokenised(self, chat: Chat, keywords: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        """Token ids of a chat, and which of them are learnt; empty where the table does not say."""
        return tokenize_whole_chat(self._tokenizer, chat, self._end_at_eos, keywords), []


class PreferenceChats(PreferenceDataset):
    """Rankings from which a policy learns: the tokens of each chat's last message are marked. `table` has
    `PREFERENCE_CHAT_SCHEMA`; chats are never cut."""

    _schema = PREFERENCE_CHAT_SCHEMA
    _text = "chat"
    _truncations = ("drop",)

    def _tokenised(self, chat: Chat, keywords: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        return tokenize_chat(self._tokenizer, chat, keywords, only_last=True)


def texts_of(rankings: pa.Table) -> pa.Table:
    """The texts of the rankings, one ranking after the other, one text a row: `input_ids`, and `loss_mask` where the table has it."""
    names = [name for name in ("input_ids", "loss_mask") if name in rankings.column_names]
    return pa.table({name: rankings[name].combine_chunks().flatten() for name in names})


def ranking_lengths(table: pa.Table) -> npt.NDArray[np.int64]:
    """Tokens of all texts of each ranking together [rows]."""
    lists = table["input_ids"].combine_chunks()
    tokens = pc.list_value_length(lists.flatten()).to_numpy(zero_copy_only=False).astype(np.int64)
    counts = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.add.reduceat(tokens, np.cumsum(counts) - counts)


def best_answers(table: pa.Table, num: int | None) -> pa.Table:
    """The best text of each of the first `num` (None: all) rankings (of equal ones the first): `ANSWER_SCHEMA`."""
    rows = (table if num is None else table.slice(0, num)).to_pylist()
    best = [row["input_ids"][max(range(len(row["scores"])), key=row["scores"].__getitem__)] for row in rows]
    return pa.table({"uid": [row["uid"] for row in rows], "input_ids": best}, schema=ANSWER_SCHEMA)


def read_answers(
    files: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str,
    response_key: str,
    max_length: int,
    end_at_eos: bool,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools_key: str | None = TOOLS_KEY,
) -> pa.Table:
    """Prompts with one response each as texts: `ANSWER_SCHEMA`; longer ones are cut to `max_length` tokens.

    Raises:
        ValueError: a missing or unreadable file, wrong rows (named by file and row number), no rows.
    """

    keywords = ChatKeywords(tools_key, chat_template_kwargs)
    keys = [prompt_key, response_key, *keywords.columns]

    def text(row: dict[str, Any]) -> Rows:
        chat = response_chat(find(row, prompt_key), lookup(row, response_key), response_key)
        ids = tokenize_whole_chat(tokenizer, chat, end_at_eos, keywords.of_row(row))
        return [{"input_ids": ids[:max_length]}]

    needed = [Column(prompt_key, "data.prompt_key")] if prompt_key != PreferenceKeys.prompt else []
    needed += [Column(response_key, "data.normalize_response_key"), *keywords.needed]
    return read_examples(files, keys, text, ANSWER_SCHEMA, lambda _: needed, keys)


def response_chat(prompt: Any, response: Any, key: str) -> Chat:
    """The chat of a prompt (messages, a user's text, or None) and a response (a text, the messages after the prompt, or all messages).

    Args:
        key: the response's, for errors.

    Raises:
        ValueError: there is no prompt, or the response is empty or not the assistant's.
    """
    response = read_chat(response)
    before = [] if prompt is None else prompt_messages(prompt, "prompt")
    if isinstance(response, str):
        if not response:
            raise ValueError(f"{key!r} is an empty text")
        if not before:
            raise ValueError(f"{key!r} is a text, but the row has no prompt before it")
        return [*before, {"role": "assistant", "content": response}]
    after = check_messages(response, key)
    if after[-1]["role"] != "assistant":
        raise ValueError(f"the last message of {key!r} is of {after[-1]['role']!r}, not of the assistant")
    if not before and after[0]["role"] == "assistant":
        raise ValueError(f"{key!r} begins with the assistant's message, but the row has no prompt before it")
    if _is_whole_chat(before, after):
        return after
    if before[-1]["role"] == "user" and after[0]["role"] in ("system", "user"):
        raise ValueError(
            f"{key!r} begins with a message of {after[0]['role']!r} and does not have the prompt in it; give the messages after the "
            "prompt, or the whole chat with the same prompt"
        )
    return [*before, *after]


def _is_whole_chat(prompt: Chat, messages: Chat) -> bool:
    """Whether messages have the prompt in them, but for white space around texts: at their beginning, or behind a system message or
    earlier turns."""
    places = 1 if messages[0]["role"] == "assistant" else max(1, len(messages) - len(prompt))
    wanted, found = ([_stripped(message) for message in chat] for chat in (prompt, messages))
    return any(found[at : at + len(wanted)] == wanted for at in range(places))


def _stripped(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": content.strip()} if isinstance(content, str) else message


def _scores(row: dict[str, Any], keys: PreferenceKeys, count: int) -> list[float]:
    ranks, scores = find(row, keys.ranks), find(row, keys.scores)
    if (ranks is None) == (scores is None):
        there = "neither" if ranks is None else "both"
        raise ValueError(f"one of {keys.ranks!r} and {keys.scores!r} must be given, found {there}")
    key, values = (keys.scores, scores) if ranks is None else (keys.ranks, ranks)
    if not isinstance(values, list) or len(values) != count or not all(map(_is_number, values)):
        raise ValueError(
            f"{key!r} must have a number for each of the {count} {keys.responses!r}, found {values!r}"
        )
    if len(set(values)) == 1:
        raise ValueError(f"all {key!r} are equal: there is nothing to compare")
    return [float(value) if ranks is None else -float(value) for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
