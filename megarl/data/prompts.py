"""Prompts from Parquet or JSON lines files: in verl's schema, or with columns that settings name.

Columns: `data_source` string; `prompt` list of {role, content}, or a user's text; `reward_model` struct {style,
ground_truth}; `extra_info` struct (optional, whatever it holds; kept as JSON); `tools` and `chat_template_kwargs` (optional,
for the chat template).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from megarl.data.chats import TOOLS_KEY, ChatKeywords, Message, prompt_messages, read_chat
from megarl.data.files import (
    Column,
    DataFile,
    RowErrors,
    find,
    iter_files,
    lookup,
    missing_columns,
    resolve_files,
    with_holders,
    without_filled_nulls,
)
from megarl.data.preferences import response_chat
from megarl.data.sft import tokenize_chat
from megarl.data.tokenizer import check_unicode, encode_texts, render_text
from megarl.data.trajectories import (
    GIVEN_RESPONSES,
    MESSAGES,
    PROMPT_SCHEMA,
    REF_PROMPT_IDS,
    TEACHER,
    TEMPLATE_KWARGS,
    combined,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Truncation = Literal["error", "left", "right", "middle"]
TRUNCATIONS: tuple[str, ...] = ("error", "left", "right", "middle")

# The default columns of a data source and of a ground truth.
SOURCE_KEY, ANSWER_KEY = "data_source", "reward_model.ground_truth"
UNKNOWN_SOURCE = "unknown"  # the data source of rows that may lack one, and do

TOKENIZE_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class Row:
    """A row of a file, unchanged, and its place."""

    file: DataFile
    number: int  # in the file, from 0
    uid: str
    values: dict[str, Any]


@dataclass(frozen=True)
class RowFields:
    """The contents of a row of a file.

    Attributes:
        prompts: the messages of its prompts by the columns of their tokens.
        given: chats of the prompt with each response that is given.
        keywords: for the chat template.
        others: the other columns of the table.
    """

    prompts: dict[str, list[Message]]
    given: list[list[Message]]
    keywords: dict[str, Any]
    others: dict[str, str]


class PromptReader:
    """Makes prompt tables of rows, and collects the errors of rows.

    Attributes:
        schema: of the tables: `PROMPT_SCHEMA`, MESSAGES with keep_messages, TEMPLATE_KWARGS with that or
            keep_template_kwargs, REF_PROMPT_IDS with ref_prompt_key, GIVEN_RESPONSES with given_response_key, and TEACHER with teachers.
        errors: the wrong rows so far.
        num_filtered: rows left out so far as longer than `max_prompt_length`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_prompt_length: int,
        prompt_key: str = "prompt",
        ref_prompt_key: str | None = None,
        given_response_key: str | None = None,
        max_response_length: int | None = None,
        teachers: Mapping[str, str] | None = None,
        teacher_key: str | None = None,
        data_source_key: str = SOURCE_KEY,
        answer_key: str | None = ANSWER_KEY,
        may_lack: Collection[str] = (),
        truncation: Truncation = "error",
        filter_overlong_prompts: bool = False,
        keep_messages: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools_key: str | None = TOOLS_KEY,
        keep_template_kwargs: bool = False,
    ) -> None:
        """
        Args:
            tokenizer: None: no tables are made, `fields` alone are read.
            max_prompt_length: tokens, chat template included.
            prompt_key: the column of the messages, or of a text, which is the user's message; may be dotted.
            ref_prompt_key: the column of the prompt that the reference reads instead, of the same form and with the same
                limit of tokens. None: there is none.
            given_response_key: the column of responses that are given: a text, the assistant's message, or several texts. None: there
                are none.
            max_response_length: tokens of such a response; a longer one is treated as a longer prompt is, but cut on the right
                alone.
            teachers: the name of the teacher for each value of the column `teacher_key` (None: of the data source); None: there are
                not several teachers.
            data_source_key: the column that becomes `data_source`; may be dotted.
            answer_key: the column that becomes `ground_truth`; may be dotted. None: it is empty.
            may_lack: which of the last two columns rows may lack, or have null in; `data_source` is then UNKNOWN_SOURCE,
                `ground_truth` empty.
            truncation: for longer prompts: "error" refuses, "left", "right" or "middle" cuts there.
            filter_overlong_prompts: leave longer prompts out instead.
            keep_messages: give the table a further column, MESSAGES: the chat messages as JSON.
            chat_template_kwargs: keywords for the chat template; a row's own win.
            tools_key: the column of a row's tools, dotted or not; None: no row has any.
            keep_template_kwargs: give the table a further column, TEMPLATE_KWARGS: the row's keywords for the chat template as
                JSON, with which a chat is continued. keep_messages implies it.

        Raises:
            ValueError: an unknown truncation, or a length below 1.
        """
        if truncation not in TRUNCATIONS:
            raise ValueError(f"truncation must be one of {', '.join(TRUNCATIONS)}, found {truncation!r}")
        if max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be at least 1, found {max_prompt_length}")
        self._tokenizer = tokenizer
        # Each column with the key to set where a file lacks it, for errors.
        self._prompts = {"prompt_ids": Column(prompt_key, "data.prompt_key")}
        if ref_prompt_key is not None:
            self._prompts[REF_PROMPT_IDS] = Column(ref_prompt_key, "data.ref_prompt_key")
        self._given = (
            None if given_response_key is None else Column(given_response_key, "data.given_response_key")
        )
        assert given_response_key is None or max_response_length is not None, "responses have a limit"
        self._max_response = max_response_length
        self._teachers = teachers or {}
        self._teacher = (
            Column(teacher_key, "data.teacher_key") if self._teachers and teacher_key is not None else None
        )
        self._source = Column(
            data_source_key,
            "data.reward_fn_key (no row needs it with reward.rule or custom_reward_function.path)",
        )
        self._answer = (
            None if answer_key is None else Column(answer_key, "data.answer_key (null: there is none)")
        )
        self._may_lack = frozenset(may_lack)
        self.max_length = max_prompt_length
        self._truncation = truncation
        self._filter = filter_overlong_prompts
        self._keywords = ChatKeywords(tools_key, chat_template_kwargs)
        kept = {MESSAGES: keep_messages, TEMPLATE_KWARGS: keep_messages or keep_template_kwargs}
        further = [pa.field(name, pa.string()) for name, keep in kept.items() if keep]
        further += [pa.field(name, pa.list_(pa.int32())) for name in self._prompts if name == REF_PROMPT_IDS]
        if self._teachers:
            further.append(pa.field(TEACHER, pa.string()))
        if self._given is not None:
            further.append(pa.field(GIVEN_RESPONSES, pa.list_(pa.list_(pa.int32()))))
        self.schema = pa.schema([*PROMPT_SCHEMA, *further])
        self.errors = RowErrors()
        self.num_filtered = 0

    @property
    def columns(self) -> list[str]:
        """The columns to read, if a file has them."""
        answer = [] if self._answer is None else [self._answer.name]
        teacher = [] if self._teacher is None else [self._teacher.name]
        return with_holders(
            [*self.chat_columns, self._source.name, *answer, *teacher, "reward_model", "extra_info"]
        )

    @property
    def chat_columns(self) -> list[str]:
        """The columns of chats, tools and keywords (see `without_filled_nulls`)."""
        given = [] if self._given is None else [self._given.name]
        return [*(column.name for column in self._prompts.values()), *given, *self._keywords.columns]

    def needed(self, present: Sequence[str]) -> list[Column]:
        """The columns that a file must have, whatever others are present in it."""
        named = (
            *self._prompts.values(),
            self._given,
            self._teacher,
            self._source,
            self._answer,
            *self._keywords.needed,
        )
        return [column for column in named if column is not None and column.name not in self._may_lack]

    def has_columns(self, file: DataFile) -> bool:
        """Whether a file has the columns that its rows must have; missing ones become an error."""
        problem = missing_columns(file, self.needed)
        if problem is not None:
            self.errors.add_file(file, problem)
        return problem is None

    def table(self, rows: Sequence[Row]) -> pa.Table:
        """The prompt table of the rows that are neither wrong nor left out, in their order."""
        parsed = [(row, fields) for row in rows if (fields := self._parse(row)) is not None]
        encoded = [
            encode_texts(self._tokenizer, [fields[name] for _, fields in parsed]) for name in self._prompts
        ]
        kept = []
        for (row, fields), *prompts in zip(parsed, *encoded, strict=True):
            fitted = self._fit(row, dict(zip(self._prompts, prompts, strict=True)))
            given = self._fit_responses(row, fields[GIVEN_RESPONSES]) if fitted is not None else None
            if fitted is not None and given is not None:
                kept.append({"uid": row.uid, **fields, **fitted, GIVEN_RESPONSES: given})
        return pa.table({name: [row[name] for row in kept] for name in self.schema.names}, schema=self.schema)

    def fields(self, row: Row) -> RowFields:
        """The contents of a row.

        Raises:
            ValueError: a column is missing or of another form.
        """
        values = without_filled_nulls(row.values, self.chat_columns, row.file)
        prompts = {
            name: prompt_messages(lookup(values, column.name, column.setting), column.name)
            for name, column in self._prompts.items()
        }
        keywords = self._keywords.of_row(values)
        return RowFields(
            prompts,
            []
            if self._given is None
            else given_chats(
                lookup(values, self._given.name, self._given.setting), prompts["prompt_ids"], self._given.name
            ),
            keywords,
            {
                "data_source": self._data_source(row.values),
                TEACHER: self._teacher_of(row.values),
                "ground_truth": self._ground_truth(row.values),
                "extra_info": _to_json(row.values.get("extra_info") or {}, "extra_info"),
                MESSAGES: _to_json(prompts["prompt_ids"], self._prompts["prompt_ids"].name),
                TEMPLATE_KWARGS: _to_json(keywords, "chat_template_kwargs"),
            },
        )

    def _parse(self, row: Row) -> dict[str, Any] | None:
        """One row with its prompts as texts, `prompt_ids` and REF_PROMPT_IDS, and with GIVEN_RESPONSES; None: it is wrong, and its error is
        noted."""
        try:
            found = self.fields(row)
            texts = {
                name: render_text(
                    self._tokenizer, messages, add_generation_prompt=True, template_kwargs=found.keywords
                )
                for name, messages in found.prompts.items()
            }
            given = [self._tokens_of_response(chat, found.keywords) for chat in found.given]
            # Rows are tokenised and put into a table many at once, where an error would not tell which of them it is.
            for text in (*texts.values(), *found.others.values()):
                check_unicode(text)
            return {**found.others, **texts, GIVEN_RESPONSES: given}
        except ValueError as error:
            self.errors.add(row.file, row.number, str(error))
            return None

    def _tokens_of_response(self, chat: list[Message], keywords: Mapping[str, Any]) -> list[int]:
        """The tokens of a chat's last message, with its end token."""
        assert self._tokenizer is not None
        ids, mask = tokenize_chat(self._tokenizer, chat, keywords, only_last=True)
        return [token for token, learnt in zip(ids, mask, strict=True) if learnt]

    def _data_source(self, row: dict[str, Any]) -> str:
        key = self._source.name
        if key in self._may_lack and find(row, key) is None:
            return UNKNOWN_SOURCE
        value = lookup(row, key, self._source.setting)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{key!r} must be a string, found {value!r}")
        return value

    def _teacher_of(self, row: dict[str, Any]) -> str:
        """The name of the row's teacher; "": there are not several."""
        if not self._teachers:
            return ""
        value = self._data_source(row)
        if self._teacher is not None:
            value = lookup(row, self._teacher.name, self._teacher.setting)
        if value not in self._teachers:
            name = self._source.name if self._teacher is None else self._teacher.name
            known = ", ".join(f"{source!r} ({teacher})" for source, teacher in self._teachers.items())
            raise ValueError(
                f"{name!r} is {value!r}, and no teacher judges such rows; actor_rollout_ref.teachers has {known}: add it to the sources of one"
            )
        return self._teachers[value]

    def _ground_truth(self, row: dict[str, Any]) -> str:
        """A row's ground truth: strings as they are, other values (numbers, lists of accepted answers) as JSON. A row that a
        reward model scores (`reward_model.style` is "model") may have none: empty text."""
        if self._answer is None:
            return ""
        key = self._answer.name
        optional = key in self._may_lack or (key == ANSWER_KEY and find(row, "reward_model.style") == "model")
        if optional and find(row, key) is None:
            return ""
        value = lookup(row, key, self._answer.setting)
        if value is None:
            raise ValueError(f"{key!r} is null")
        return value if isinstance(value, str) else _to_json(value, key)

    def _fit(self, row: Row, prompts: dict[str, list[int]]) -> dict[str, list[int]] | None:
        """The tokens of a row's prompts, cut if they are too many; None: the row is left out, or wrong."""
        if not all(prompts.values()):
            # an engine given an empty prompt does not answer with an error, it dies
            self.errors.add(row.file, row.number, "the chat template renders the prompt to no tokens")
            return None
        long = {name: len(ids) for name, ids in prompts.items() if len(ids) > self.max_length}
        if long and self._filter:
            self.num_filtered += 1
            return None
        if long and self._truncation == "error":
            (name, length), *_ = long.items()
            prompt = "the prompt" if name == "prompt_ids" else f"the prompt {self._prompts[name].name!r}"
            self.errors.add(
                row.file,
                row.number,
                f"{prompt} has {length} tokens, more than max_prompt_length {self.max_length}; "
                "raise it, set filter_overlong_prompts, or choose a truncation",
            )
            return None
        return {name: truncate(ids, self.max_length, self._truncation) for name, ids in prompts.items()}

    def _fit_responses(self, row: Row, responses: list[list[int]]) -> list[list[int]] | None:
        """Given responses, cut if they have too many tokens; None: the row is left out, or wrong."""
        longest = max(map(len, responses), default=0)
        if self._max_response is None or longest <= self._max_response:
            return responses
        if self._filter:
            self.num_filtered += 1
            return None
        if self._truncation == "error":
            assert self._given is not None
            self.errors.add(
                row.file,
                row.number,
                f"the response {self._given.name!r} has {longest} tokens, more than max_response_length {self._max_response}; "
                "raise it, set filter_overlong_prompts, or choose a truncation",
            )
            return None
        return [ids[: self._max_response] for ids in responses]


class PromptDataset:
    """All prompts of some files, tokenised when the dataset is made: a wrong row ends a run before it starts.

    Attributes:
        table: the prompt table (the reader's `schema`), rows in file order. `uid` is
            "<prefix><file stem>:<row in file>"; a second file of the same stem gets "<stem>#2".
        num_filtered: rows left out as longer than `max_prompt_length`.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_samples: int | None = None,
        uid_prefix: str = "",
        **reading: Any,
    ) -> None:
        """
        Args:
            files: a path, a glob, a URL or a list of them.
            max_samples: read this many rows at most; None: all.
            reading: the keywords of `PromptReader`.

        Raises:
            ValueError: a missing or unreadable file, wrong rows (named by file and row number), no rows left.
        """
        reader = PromptReader(tokenizer, **reading)
        found = resolve_files(files)
        self.table = _read_all(found, reader, max_samples, uid_prefix)
        self.num_filtered = reader.num_filtered
        reader.errors.raise_if_any()
        if not self.table.num_rows:
            raise ValueError(
                f"no prompts in {', '.join(map(str, found))}"
                + (
                    f": all {self.num_filtered} rows are longer than max_prompt_length {reader.max_length}"
                    if self.num_filtered
                    else ": the files have no rows"
                )
            )

    def __len__(self) -> int:
        return self.table.num_rows


def _read_all(
    files: Sequence[DataFile], reader: PromptReader, max_samples: int | None, uid_prefix: str
) -> pa.Table:
    tables = [reader.schema.empty_table()]
    rows = iter_files(files, reader.columns, reader.needed, reader.errors, "tokenising prompts", max_samples)
    while block := list(itertools.islice(rows, TOKENIZE_BLOCK_ROWS)):
        tables.append(
            reader.table([Row(file, number, uid_prefix + uid, row) for file, number, uid, row in block])
        )
    return combined(pa.concat_tables(tables))


def given_chats(value: Any, prompt: list[Message], key: str) -> list[list[Message]]:
    """A prompt with each response in a column: a text, the assistant's message (with the prompt's messages or without), or several texts.

    Raises:
        ValueError: there is none, or one is empty or has several messages.
    """
    value = read_chat(value)
    if value == [] or value is None:
        raise ValueError(f"{key!r} is {value!r}; it must have a response at least")
    several = isinstance(value, list) and all(isinstance(text, str) for text in value)
    chats = [response_chat(prompt, response, key) for response in (value if several else [value])]
    if any(len(chat) != len(prompt) + 1 for chat in chats):
        raise ValueError(f"{key!r} must be one message of the assistant's, found {value!r}")
    return chats


def truncate(ids: list[int], max_length: int, truncation: Truncation) -> list[int]:
    """Cut token ids to max_length: on the left, on the right, or in the middle (both ends stay)."""
    if len(ids) <= max_length:
        return ids
    if truncation == "left":
        return ids[-max_length:]
    if truncation == "right":
        return ids[:max_length]
    assert truncation == "middle", truncation
    head = max_length // 2
    return ids[:head] + ids[len(ids) - (max_length - head) :]


def _to_json(value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"{name!r} cannot be kept as JSON: {error}") from error
