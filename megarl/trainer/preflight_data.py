"""The data of a run before any of its processes starts: whether files can be read and their first rows are as they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from megarl.config.check_data import file_problems
from megarl.data.files import iter_rows, lookup, num_rows
from megarl.data.preferences import read_ranking
from megarl.data.prompts import PromptReader
from megarl.data.sft import MESSAGES_KEY, read_chat, read_text
from megarl.data.sources import DataFile, resolve_files
from megarl.trainer.prompt_data import preference_keys, reading

ROWS = 16  # of each file that are looked at


class _Source(NamedTuple):
    """The files that a key names.

    Attributes:
        columns: that are read of a row.
        check: raises a ValueError for a row that cannot be used.
        batch: (key, rows) of the batches that they must fill at least one of; None: any number of rows is enough.
    """

    key: str
    files: str | tuple[str, ...] | None
    columns: Sequence[str]
    check: Callable[[dict[str, Any]], object]
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
    try:
        for number, row in islice(iter_rows(file, source.columns), ROWS):
            try:
                source.check(row)
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


def _prompts(data: DataConfig | EvalDataConfig) -> tuple[Sequence[str], Callable[[dict[str, Any]], object]]:
    reader = PromptReader(None, **reading(data))
    return reader.columns, reader.fields


def _of_training(config: TrainConfig) -> Iterator[_Source]:
    data = config.data
    columns, check = _prompts(data)
    if config.trainer.train_only is None:
        batch = ("data.train_batch_size", data.train_batch_size)
        yield _Source("data.train_files", data.train_files, columns, check, batch)
        for name, part in (data.mixture or {}).items():
            yield _Source(f"data.mixture.{name}.files", part.files, columns, check)
        yield from _held_out(data, columns, check)
    if data.ptx is not None:
        yield _Source("data.ptx.files", data.ptx.files, *_examples(data.ptx))


def _of_evaluation(config: EvalConfig) -> Iterator[_Source]:
    yield from _held_out(config.data, *_prompts(config.data))


def _held_out(data: DataConfig | EvalDataConfig, columns: Sequence[str], check: Any) -> Iterator[_Source]:
    yield _Source("data.val_files", data.val_files, columns, check)
    for name, val_set in (data.val_sets or {}).items():
        yield _Source(f"data.val_sets.{name}.files", val_set.files, columns, check)


def _examples(data: Any) -> tuple[Sequence[str], Callable[[dict[str, Any]], object]]:
    """`data`: a section with the keys of a text's or a chat's columns."""
    if data.text_key is not None:
        return _top([data.text_key]), partial(read_text, key=data.text_key)
    keys = [MESSAGES_KEY] if data.response_key is None else [data.prompt_key, data.response_key]
    return _top(keys), partial(read_chat, prompt_key=data.prompt_key, response_key=data.response_key)


def _of_sft(config: SFTConfig) -> Iterator[_Source]:
    data = config.data
    # A text may be split into several examples.
    batch = None if data.truncation == "split" else ("data.train_batch_size", data.train_batch_size)
    yield _Source("data.train_files", data.train_files, *_examples(data), batch)
    yield _Source("data.val_files", data.val_files, *_examples(data))


def _of_rankings(config: RMConfig | DPOConfig) -> Iterator[_Source]:
    data = config.data
    keys = preference_keys(data, data.margin_key if isinstance(config, RMConfig) else None)
    columns, check = _top(keys.columns()), partial(read_ranking, keys=keys)
    yield _Source(
        "data.train_files", data.train_files, columns, check, ("data.train_batch_size", data.train_batch_size)
    )
    yield _Source("data.val_files", data.val_files, columns, check)
    if isinstance(config, RMConfig) and data.normalize != "none":
        answer = data.normalize_response_key
        if answer is not None:
            columns, check = _top([answer]), partial(lookup, key=answer)
        yield _Source("data.normalize_files", data.normalize_files, columns, check)


def _top(keys: Sequence[str]) -> list[str]:
    """The columns that dotted keys may be in."""
    return list(dict.fromkeys(column for key in keys for column in (key, key.split(".")[0])))
