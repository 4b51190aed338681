"""The data of a run before any of its processes starts: whether files can be read and their first rows are as they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from megarl.config import (
    DataConfig,
    DPOConfig,
    EvalConfig,
    EvalDataConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
    TuningConfig,
)
from megarl.config.checks.data import file_problems
from megarl.data.chats import ChatKeywords
from megarl.data.files import (
    Column,
    DataFile,
    iter_rows,
    lookup,
    missing_columns,
    num_rows,
    resolve_files,
    without_filled_nulls,
)
from megarl.data.preferences import read_ranking
from megarl.data.prompts import PromptReader, Row
from megarl.data.sft import chat_columns, chat_of_row, text_of_row
from megarl.trainer.stages.prompt_data import may_lack, preference_keys, reading

ROWS = 16  # of each file that are looked at


class _Rows(NamedTuple):
    """What rows must be.

    Attributes:
        columns: that are read of a row.
        needed: from the columns that a file has to those that it must have.
        check: raises a ValueError for a row that cannot be used.
    """

    columns: Sequence[str]
    needed: Callable[[Sequence[str]], Sequence[Column]]
    check: Callable[[Row], object]


class _Source(NamedTuple):
    """The files that a key names.

    Attributes:
        batch: (key, rows) of the batches that they must fill at least one of; None: any number of rows is enough.
    """

    key: str
    files: str | tuple[str, ...] | None
    rows: _Rows
    batch: tuple[str, int] | None = None


def data_problems(config: TrainConfig | TuningConfig | EvalConfig) -> Iterator[str]:
    """What is wrong with the data of a resolved configuration, a line for each file: its first wrong row of the first `ROWS`.

    Remote files are not looked at, nor what `check_config` tells of: files that are not there.
    """
    sources = {
        TrainConfig: _of_training,
        EvalConfig: _of_evaluation,
        SFTConfig: _of_sft,
        RMConfig: _of_rankings,
        DPOConfig: _of_rankings,
    }[type(config)]
    for source in sources(config):
        if source.files is None or list(file_problems(source.key, source.files)):
            continue
        names = [source.files] if isinstance(source.files, str) else list(source.files)
        try:
            files = [file for file in resolve_files(names) if not file.is_remote]
        except ValueError as error:  # of a server, or a file that is given twice
            yield f"{source.key}: {error}"
            continue
        wrong = [f"{source.key}: {text}" for file in files for text in _file_problems(file, source)]
        yield from wrong or _few_rows(files, source)


def _file_problems(file: DataFile, source: _Source) -> Iterator[str]:
    rows = source.rows
    try:
        problem = missing_columns(file, rows.needed)
        if problem is not None:
            yield f"{file}: {problem}"
            return
        for number, values in islice(iter_rows(file, rows.columns), ROWS):
            try:
                rows.check(Row(file, number, "", values))
            except ValueError as error:
                yield f"{file} row {number}: {error}"
                return
    except (ValueError, OSError) as error:  # they name the file
        yield str(error)


def _few_rows(files: Sequence[DataFile], source: _Source) -> Iterator[str]:
    counts = [num_rows(file) for file in files]
    if source.batch is None or not counts or None in counts:
        return
    key, size = source.batch
    if sum(counts) < size:
        yield f"{source.key}: {sum(counts)} rows, too few for one batch of {key}={size}: lower it or give more data"


def _prompts(config: TrainConfig | EvalConfig) -> _Rows:
    reader = PromptReader(None, may_lack=may_lack(config), **reading(config.data))
    return _Rows(reader.columns, reader.needed, reader.fields)


def _of_training(config: TrainConfig) -> Iterator[_Source]:
    data, rows = config.data, _prompts(config)
    if config.trainer.train_only is None:
        batch = ("data.train_batch_size", data.train_batch_size)
        yield _Source("data.train_files", data.train_files, rows, batch)
        for name, part in (data.mixture or {}).items():
            yield _Source(f"data.mixture.{name}.files", part.files, rows)
        yield from _held_out(data, rows)
    if data.ptx is not None:
        yield _Source("data.ptx.files", data.ptx.files, _examples(data.ptx, "data.ptx"))


def _of_evaluation(config: EvalConfig) -> Iterator[_Source]:
    yield from _held_out(config.data, _prompts(config))


def _held_out(data: DataConfig | EvalDataConfig, rows: _Rows) -> Iterator[_Source]:
    yield _Source("data.val_files", data.val_files, rows)
    for name, val_set in (data.val_sets or {}).items():
        yield _Source(f"data.val_sets.{name}.files", val_set.files, rows)


def _examples(data: Any, section: str) -> _Rows:
    """`data`: a section with the keys of a text's or a chat's columns."""
    if data.text_key is not None:
        text = Column(data.text_key, f"{section}.text_key")
        return _Rows(_top([text.name]), lambda _: [text], lambda row: text_of_row(row.values, data.text_key))
    keywords = ChatKeywords(data.tools_key, data.apply_chat_template_kwargs)
    columns = chat_columns(data.prompt_key, data.response_key, section)
    keys = [*(column.name for column in columns), *keywords.columns]

    def check(row: Row) -> None:
        values = without_filled_nulls(row.values, keys, row.file)
        chat_of_row(values, data.prompt_key, data.response_key)
        keywords.of_row(values)

    return _Rows(_top(keys), lambda _: [*columns, *keywords.needed], check)


def _of_sft(config: SFTConfig) -> Iterator[_Source]:
    data = config.data
    # A text may be split into several examples.
    batch = None if data.truncation == "split" else ("data.train_batch_size", data.train_batch_size)
    yield _Source("data.train_files", data.train_files, _examples(data, "data"), batch)
    yield _Source("data.val_files", data.val_files, _examples(data, "data"))


def _of_rankings(config: RMConfig | DPOConfig) -> Iterator[_Source]:
    data = config.data
    keys = preference_keys(data, data.margin_key if isinstance(config, RMConfig) else None)
    keywords = ChatKeywords(data.tools_key, data.apply_chat_template_kwargs)
    chats = [*keys.chats(), *keywords.columns]

    def check(row: Row) -> None:
        values = without_filled_nulls(row.values, chats, row.file)
        read_ranking(values, keys)
        keywords.of_row(values)

    rows = _Rows(
        _top([*keys.columns(), *keywords.columns]),
        lambda present: [*keys.needed(present), *keywords.needed],
        check,
    )
    batch = ("data.train_batch_size", data.train_batch_size)
    yield _Source("data.train_files", data.train_files, rows, batch)
    yield _Source("data.val_files", data.val_files, rows)
    if isinstance(config, RMConfig) and data.normalize != "none":
        answer = data.normalize_response_key
        if answer is not None:
            column = Column(answer, "data.normalize_response_key")
            rows = _Rows(_top([answer]), lambda _: [column], lambda row: lookup(row.values, answer))
        yield _Source("data.normalize_files", data.normalize_files, rows)


def _top(keys: Sequence[str]) -> list[str]:
    """The columns that dotted keys may be in."""
    return list(dict.fromkeys(column for key in keys for column in (key, key.split(".")[0])))
