"""Tables of examples from the rows of Parquet and JSON lines files; wrong rows are reported together."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.progress import Progress

from megarl.data.files import (
    Column,
    RowErrors,
    iter_rows,
    missing_columns,
    num_rows,
    resolve_files,
    without_filled_nulls,
)
from megarl.data.prompts import PROGRESS_FROM_ROWS, unique_stems

Rows = list[dict[str, Any]]


def read_examples(
    files: str | Path | Sequence[str | Path],
    keys: Sequence[str],
    convert: Callable[[dict[str, Any]], Rows],
    schema: pa.Schema,
    needed: Callable[[Sequence[str]], Sequence[Column]] = lambda _: (),
    chats: Sequence[str] = (),
) -> pa.Table:
    """The examples of all rows, in file order.

    Args:
        files: a path, a glob or a list of both (.parquet, .jsonl, .json).
        keys: of the columns that `convert` reads; they may be dotted ("extra_info.answer").
        convert: from a row to its examples (none: it is left out), without their uid; its ValueErrors are of the row.
        needed: from the columns that a file has to those that it must have.
        chats: those of `keys` that hold chats, tools or keywords of the chat template (see `without_filled_nulls`).
        schema: of the examples, with `uid`: "<file stem>:<row in file>", and with "/<number>" of several of a row.

    Raises:
        ValueError: a missing or unreadable file, wrong rows (named by file and row number), no examples.
    """
    columns = list(dict.fromkeys(column for key in keys for column in (key, key.split(".")[0])))
    values: dict[str, list[Any]] = {name: [] for name in schema.names}
    errors, paths = RowErrors(), resolve_files(files)
    total = sum(num_rows(path) or 0 for path in paths)
    with Progress(transient=True, disable=total < PROGRESS_FROM_ROWS) as progress:
        task = progress.add_task("tokenising examples", total=total or None)
        for path, name in zip(paths, unique_stems(paths), strict=True):
            if (problem := missing_columns(path, needed)) is not None:
                errors.add_file(path, problem)
                continue
            for number, row in iter_rows(path, columns):
                try:
                    examples = convert(without_filled_nulls(row, chats, path))
                except ValueError as error:
                    errors.add(path, number, str(error))
                    examples = []
                for piece, example in enumerate(examples):
                    part = f"/{piece}" if len(examples) > 1 else ""
                    for column, value in {"uid": f"{name}:{number}{part}", **example}.items():
                        values[column].append(value)
                progress.advance(task)
    errors.raise_if_any()
    if not values["uid"]:
        raise ValueError(f"no rows in {', '.join(map(str, paths))}")
    return pa.table(values, schema=schema)
