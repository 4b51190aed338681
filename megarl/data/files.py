"""Reading rows from Parquet and JSON lines, and writing Parquet; errors name the file and the row."""

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.files import whole_file

READ_BLOCK_ROWS = 1024
NUM_ERRORS_SHOWN = 5

_GLOB_CHARACTERS = "*?["


def resolve_files(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """Expand one path, one glob or a list of both into existing files, globs in sorted order.

    Raises:
        ValueError: a file is missing, a glob matches nothing, nothing is given, or a file is given twice.
    """
    patterns = [files] if isinstance(files, str | Path) else list(files)
    if not patterns:
        raise ValueError("no data files given: a path, a glob or a list of them is needed")
    resolved: list[Path] = []
    for pattern in map(str, patterns):
        path = Path(pattern).expanduser()
        if path.is_file():
            resolved.append(path)
        elif path.is_dir():
            raise ValueError(
                f"data file {pattern} is a folder; give the files in it, for example {pattern}/*.parquet"
            )
        elif any(character in pattern for character in _GLOB_CHARACTERS):
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
            matches = [match for match in matches if match.is_file()]
            if not matches:
                raise ValueError(f"no file matches the pattern {pattern} (working directory {Path.cwd()})")
            resolved.extend(matches)
        else:
            raise ValueError(f"data file {pattern} does not exist (working directory {Path.cwd()})")
    twice = [path for position, path in enumerate(resolved) if path in resolved[:position]]
    if twice:
        raise ValueError(f"data file {twice[0]} is given more than once")
    return resolved


def iter_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 0, row as a dict) of a Parquet or JSON lines (`.jsonl`, `.json`) file.

    Args:
        columns: top-level columns to read of a Parquet file, those that it has; null reads all.

    Raises:
        ValueError: unknown suffix, unreadable file, or a line that is no JSON object (named by its row
            number).
    """
    if path.suffix == ".parquet":
        yield from _iter_parquet(path, columns)
    elif path.suffix in (".jsonl", ".json"):
        yield from _iter_json_lines(path)
    else:
        raise ValueError(
            f"data file {path}: unknown suffix {path.suffix!r}; known are .parquet, .jsonl and .json"
        )


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file; ValueError if it is none."""
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"data file {path} is no valid Parquet file: {error}") from error


def _iter_parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_parquet(path) as file:
        present = file.schema_arrow.names
        chosen = present if columns is None else [name for name in columns if name in present]
        number = 0
        for block in file.iter_batches(batch_size=READ_BLOCK_ROWS, columns=chosen):
            for row in block.to_pylist():
                yield number, row
                number += 1


def _iter_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        number = 0
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} row {number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path} row {number}: expected a JSON object, found {type(row).__name__}")
            yield number, row
            number += 1


def num_rows(path: Path) -> int | None:
    """Rows of a Parquet file from its footer; None for other files (counting would read them)."""
    if path.suffix != ".parquet":
        return None
    with open_parquet(path) as file:
        return file.metadata.num_rows


def lookup(row: dict[str, Any], key: str) -> Any:
    """Value of a dotted key such as `extra_info.answer`; a column whose name holds the dots wins.

    Raises:
        ValueError: the key is not there; the message lists what is.
    """
    if key in row:
        return row[key]
    value: Any = row
    for depth, part in enumerate(key.split(".")):
        if not isinstance(value, dict) or part not in value:
            place = ".".join(key.split(".")[:depth]) or "the row"
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"no {key!r}: {place} holds {found}")
        value = value[part]
    return value


def check_messages(messages: Any, key: str) -> list[dict[str, str]]:
    """Check a chat: a non-empty list of {role, content} strings; returned with these two keys only.

    Raises:
        ValueError: naming the message that is wrong.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key!r} must be a non-empty list of {{role, content}}, found {_brief(messages)}")
    for position, message in enumerate(messages):
        for field in ("role", "content"):
            value = message.get(field) if isinstance(message, dict) else None
            if not isinstance(value, str) or (field == "role" and not value):
                raise ValueError(
                    f"{key!r} message {position} needs the string {field!r}, found {_brief(message)}"
                )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class RowErrors:
    """Collects what is wrong with the rows of a data set, so that one run reports the first few at once."""

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._count = 0

    def add(self, path: Path, row: int, problem: str) -> None:
        self._count += 1
        if len(self._messages) < NUM_ERRORS_SHOWN:
            self._messages.append(f"{path} row {row}: {problem}")

    def raise_if_any(self) -> None:
        """Raise a ValueError naming the first wrong rows and how many there are; rows count from 0."""
        if not self._count:
            return
        rest = self._count - len(self._messages)
        more = f"\n... and {rest} more wrong rows" if rest else ""
        raise ValueError("\n".join(self._messages) + more)


def write_parquet(table: pa.Table, path: str | Path) -> Path:
    """Write a table so that `path` holds, at any moment, either the whole of it or what it held before."""
    with whole_file(path) as temporary:
        pq.write_table(table, temporary)
    return Path(path)
