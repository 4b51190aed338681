"""Data files: where they are (paths, globs, and URLs that fsspec can open), their rows, and tables of examples from rows.

Rows are read from Parquet and JSON lines, and written as Parquet; errors name the file and the row.
"""

import glob
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import Progress

from megarl.util.files import check_url, is_url, naming, whole_file

_GLOB_CHARACTERS = "*?["


@dataclass(frozen=True)
class DataFile:
    """A file that is there, by its local path or its URL; errors show `name`."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def is_remote(self) -> bool:
        return is_url(self.name)

    @property
    def suffix(self) -> str:
        return self._path.suffix

    @property
    def stem(self) -> str:
        return self._path.stem

    @property
    def _path(self) -> PurePosixPath:
        return PurePosixPath(self.name.split("?")[0] if _is_http(self.name) else self.name)

    def open(self) -> BinaryIO:
        """The file for reading bytes.

        Raises:
            ValueError: it cannot be opened, and why.
        """
        if not self.is_remote:
            return open(self.name, "rb")
        filesystem, path = _filesystem(self.name)
        try:
            return filesystem.open(path, "rb")
        except Exception as error:  # of the protocol's own library
            raise _unreadable(self.name, error) from error


def _is_http(url: str) -> bool:
    """Whether a URL is of http, also with a cache before it: `simplecache::https://...`."""
    return url.rpartition("::")[2].startswith(("http://", "https://"))


def resolve_files(files: str | Path | DataFile | Sequence[str | Path | DataFile]) -> list[DataFile]:
    """Expand one path, URL or glob, or a list of them, into files that are there, globs in sorted order.

    Raises:
        ValueError: a file is missing, a glob matches nothing, nothing is given, a file is given twice, or a URL
            cannot be read (with the missing package, or the server's answer).
    """
    patterns = [files] if isinstance(files, str | Path | DataFile) else list(files)
    if not patterns:
        raise ValueError("no data files given: a path, a glob, a URL or a list of them is needed")
    resolved: list[DataFile] = []
    for pattern in map(str, patterns):
        resolved.extend(_remote_files(pattern) if is_url(pattern) else _local_files(pattern))
    twice = [file for position, file in enumerate(resolved) if file in resolved[:position]]
    if twice:
        raise ValueError(f"data file {twice[0]} is given more than once")
    return resolved


def _local_files(pattern: str) -> list[DataFile]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [DataFile(str(path))]
    if path.is_dir():
        raise _folder(pattern)
    if not any(character in pattern for character in _GLOB_CHARACTERS):
        raise ValueError(f"data file {pattern} does not exist (working directory {Path.cwd()})")
    matches = sorted(match for match in glob.glob(str(path), recursive=True) if Path(match).is_file())
    if not matches:
        raise ValueError(f"no file matches the pattern {pattern} (working directory {Path.cwd()})")
    return [DataFile(match) for match in matches]


def _remote_files(pattern: str) -> list[DataFile]:
    filesystem, path = _filesystem(pattern)
    wild = "*[" if _is_http(pattern) else _GLOB_CHARACTERS  # in http a query begins with ?
    try:
        if any(character in pattern for character in wild):
            matches = sorted(match for match in filesystem.glob(path) if filesystem.isfile(match))
            if not matches:
                raise FileNotFoundError
            return [DataFile(filesystem.unstrip_protocol(match)) for match in matches]
        kind = filesystem.info(path)["type"]
    except FileNotFoundError as error:
        cause = error.__cause__  # of http, which has this error for a server that is not there, too
        why = "" if cause is None else f" ({type(cause).__name__}: {cause})"
        raise ValueError(f"no file matches {pattern}{why}") from None
    except Exception as error:  # of the protocol's own library
        raise _unreadable(pattern, error) from error
    if kind == "directory":
        raise _folder(pattern)
    return [DataFile(pattern)]


def _filesystem(url: str) -> tuple[Any, str]:
    """fsspec's filesystem of a URL, and the path of the file in it."""
    check_url(url)
    try:
        return fsspec.core.url_to_fs(url)
    except Exception as error:  # of the protocol's own library: credentials, say
        raise _unreadable(url, error) from error


def _unreadable(url: str, error: Exception) -> ValueError:
    return ValueError(f"data file {url} cannot be read: {type(error).__name__}: {error}")


def _folder(pattern: str) -> ValueError:
    name = pattern.rstrip("/")
    return ValueError(f"data file {pattern} is a folder; give the files in it, for example {name}/*.parquet")


READ_BLOCK_ROWS = 1024
NUM_ERRORS_SHOWN = 5
NUM_COLUMNS_SHOWN = 30
PROGRESS_FROM_ROWS = 20_000  # fewer are tokenised within a few seconds

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Column:
    """A column that rows are read from.

    Attributes:
        name: dotted for a field of a struct, such as "extra_info.answer".
        setting: the key to set where a file has no such column, such as "data.prompt_key".
        by_row: rows may lack it, so the first row of JSON lines, the only one that is read for its columns, does not tell.
    """

    name: str
    setting: str
    by_row: bool = False


def iter_rows(
    path: DataFile | Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 0, row as a dict) of a Parquet or JSON lines (`.jsonl`, `.json`) file.

    Args:
        columns: top-level columns to read of a Parquet file; missing ones are left out; None: all.

    Raises:
        ValueError: unknown suffix, unreadable file, columns that pyarrow cannot read, or a line that is no JSON object (named by its row
            number).
    """
    if is_parquet(path):
        yield from _iter_parquet(path, columns)
    else:
        yield from _iter_json_lines(path)


def is_parquet(path: DataFile | Path) -> bool:
    """Whether a file is Parquet, by its suffix; else it is JSON lines. ValueError: it is neither."""
    if path.suffix in (".parquet", ".jsonl", ".json"):
        return path.suffix == ".parquet"
    raise ValueError(
        f"data file {path}: unknown suffix {path.suffix!r}; known are .parquet, .jsonl and .json"
    )


def open_parquet(path: DataFile | Path) -> pq.ParquetFile:
    """Open a Parquet file; ValueError if it is none."""
    remote = isinstance(path, DataFile) and path.is_remote
    source = path.open() if remote else str(path)
    try:
        return pq.ParquetFile(source)
    except pa.ArrowInvalid as error:
        raise ValueError(f"data file {path} is not a valid Parquet file: {error}") from error
    except ValueError as error:  # fsspec's, of a server that does not serve parts of files
        raise ValueError(
            f"data file {path} cannot be read: {error} (simplecache::{path} reads a copy of the whole file)"
        ) from error


def column_names(path: DataFile | Path) -> list[str] | None:
    """The columns of a Parquet file, or of JSON lines the keys of the first row; None: there is no row to tell."""
    if is_parquet(path):
        with open_parquet(path) as file:
            return file.schema_arrow.names
    return next((list(row) for _, row in iter_rows(path)), None)


def missing_columns(path: DataFile | Path, needed: Callable[[Sequence[str]], Sequence[Column]]) -> str | None:
    """An error text for a file that lacks columns; None: it has them all.

    Fields of a struct are not checked: one row may have them and another not.

    Args:
        needed: (columns of a file) -> columns that it must have.
    """
    present = column_names(path)
    if present is None:
        return None
    missing = [
        column
        for column in needed(present)
        if not {column.name, column.name.split(".")[0]} & set(present)
        and (is_parquet(path) or not column.by_row)
    ]
    if not missing:
        return None
    names = ", ".join(f"{column.name!r}" for column in missing)
    settings = "; ".join(dict.fromkeys(column.setting for column in missing))
    shown = ", ".join(present[:NUM_COLUMNS_SHOWN]) + (", ..." if len(present) > NUM_COLUMNS_SHOWN else "")
    return f"no column {names} (columns: {shown or 'none'}); set {settings}"


def open_lines(path: DataFile | Path) -> BinaryIO:
    """Open a file of lines as bytes."""
    return path.open() if isinstance(path, DataFile) else path.open("rb")


def _iter_parquet(
    path: DataFile | Path, columns: Sequence[str] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_parquet(path) as file:
        number = 0
        for group in range(file.num_row_groups):
            for block in read_group(file, path, group, columns):
                for row in parquet_rows(block):
                    yield number, row
                    number += 1


def read_group(
    file: pq.ParquetFile, path: DataFile | Path, group: int, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    """Blocks of a row group. One at a time: pyarrow cannot put nested columns of two together where their texts come in
    several chunks (dictionaries; string views, by version).

    Raises:
        ValueError: a damaged file, or a type that pyarrow cannot read.
    """
    present = file.schema_arrow.names
    chosen = present if columns is None else [name for name in columns if name in present]
    blocks = file.iter_batches(batch_size=READ_BLOCK_ROWS, row_groups=[group], columns=chosen)
    while True:
        try:
            block = next(blocks, None)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            types = ", ".join(f"{name} {file.schema_arrow.field(name).type}" for name in chosen)
            raise ValueError(
                f"data file {path} cannot be read: {error} (columns: {types}); write it anew with plain string and "
                "list types"
            ) from error
        if block is None:
            return
        yield block


def parquet_rows(block: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a block as Python values, maps as dicts. ValueError: a map has a key twice."""
    try:
        return block.to_pylist(maps_as_pydicts="strict")
    except KeyError as error:
        raise ValueError(f"a map has a key twice: {error}") from error


def without_filled_nulls(row: dict[str, Any], keys: Sequence[str], path: DataFile | Path) -> dict[str, Any]:
    """A row of the file `path`; if that is Parquet, without the nulls that its columns `keys` (dotted or not) have for
    absent fields.

    The structs of an Arrow column all have the same fields: a message, an argument or a property of a JSON
    schema that one row has is null in all others, at any depth. A template would show them as if they had been
    said. Null and absent cannot be told apart there, so every null of a struct is dropped but a message's `content`.
    """
    if path.suffix != ".parquet":
        return row
    row = dict(row)
    for key in keys:
        holder, *rest = [key] if key in row else key.split(".")
        if not rest and holder in row:
            row[holder] = _dense(row[holder])
        elif isinstance(row.get(holder), dict):
            row[holder] = without_filled_nulls(row[holder], [".".join(rest)], path)
    return row


def _dense(value: Any, may_be_message: bool = True) -> Any:
    if isinstance(value, list):
        return [_dense(item, may_be_message) for item in value]
    if not isinstance(value, dict):
        return value
    is_message = may_be_message and "role" in value
    return {
        name: _dense(item, False)
        for name, item in value.items()
        if item is not None or (is_message and name == "content")
    }


def _iter_json_lines(path: DataFile | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_lines(path) as file:
        lines = (line for line in file if line.strip())
        for number, line in enumerate(lines):
            yield number, parse_line(line, path, number)


def parse_line(line: bytes, path: DataFile | Path, number: int) -> dict[str, Any]:
    """The row of a line. ValueError: it is no JSON object; names file and row."""
    try:
        row = json.loads(line)
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} row {number}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path} row {number}: expected a JSON object, found {type(row).__name__}")
    return row


def num_rows(path: DataFile | Path) -> int | None:
    """Rows of a Parquet file from its footer; None for other files (counting would read them)."""
    if not is_parquet(path):
        return None
    with open_parquet(path) as file:
        return file.metadata.num_rows


def find(row: dict[str, Any], key: str) -> Any:
    """Value of a dotted key as `lookup` finds it; None where there is none."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def lookup(row: dict[str, Any], key: str, setting: str | None = None) -> Any:
    """Value of a dotted key such as `extra_info.answer`; a column whose name holds the dots wins.

    Args:
        setting: the configuration key that names it, such as "data.prompt_key"; part of the error.

    Raises:
        ValueError: there is no such key; the message lists the keys that there are.
    """
    if key in row:
        return row[key]
    value: Any = row
    for depth, part in enumerate(key.split(".")):
        if not isinstance(value, dict) or part not in value:
            place = ".".join(key.split(".")[:depth]) or "the row"
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            advice = "" if setting is None else f"; set {setting}"
            raise ValueError(f"no {key!r}: {place} holds {found}{advice}")
        value = value[part]
    return value


class RowErrors:
    """Collects the problems of the rows of a data set, so that one run reports the first few at once.

    Rows of a file that have the same problem are one line.
    """

    def __init__(self) -> None:
        self._files: list[str] = []
        self._rows: dict[tuple[str, str], list[int]] = {}  # (file, problem): the first row, how many
        self._num_others = 0

    def add(self, path: DataFile | Path, row: int, problem: str) -> None:
        key = (str(path), problem)
        if key in self._rows:
            self._rows[key][1] += 1
        elif len(self._rows) < NUM_ERRORS_SHOWN:
            self._rows[key] = [row, 1]
        else:
            self._num_others += 1

    def add_file(self, path: DataFile | Path, problem: str) -> None:
        """Add a problem of a whole file, whose rows are not read."""
        self._files.append(f"{path}: {problem}")

    def raise_if_any(self) -> None:
        """Raise a ValueError naming the first wrong rows and how many there are; rows count from 0."""
        lines = list(self._files)
        for (path, problem), (row, count) in self._rows.items():
            same = f" (so in {count - 1:,} more rows of this file)" if count > 1 else ""
            lines.append(f"{path} row {row}: {problem}{same}")
        if self._num_others:
            lines.append(f"... and {self._num_others:,} more wrong rows")
        if lines:
            raise ValueError("\n".join(lines))


def unique_stems(paths: Sequence[Path | DataFile]) -> list[str]:
    """File names without suffix, with "#2", "#3", ... after the second, third, ... of the same name."""
    seen: dict[str, int] = {}
    names = []
    for path in paths:
        seen[path.stem] = seen.get(path.stem, 0) + 1
        names.append(path.stem if seen[path.stem] == 1 else f"{path.stem}#{seen[path.stem]}")
    return names


def with_holders(keys: Iterable[str]) -> list[str]:
    """The columns that dotted keys may stand for: each key, and the column that it is a field of."""
    return list(dict.fromkeys(column for key in keys for column in (key, key.split(".")[0])))


def iter_files(
    files: Sequence[DataFile],
    columns: Sequence[str],
    needed: Callable[[Sequence[str]], Sequence[Column]],
    errors: RowErrors,
    title: str,
    max_rows: int | None = None,
) -> Iterator[tuple[DataFile, int, str, dict[str, Any]]]:
    """Yield (file, row number in it, uid, row) of all rows of some files, with a progress bar `title` where they are many.

    A file that lacks columns (`needed`: see `missing_columns`) is skipped and becomes an error. `uid` is "<file stem>:<row in file>".
    """
    total = sum(num_rows(file) or 0 for file in files)
    total = total if max_rows is None else min(total, max_rows)
    left = max_rows
    with Progress(transient=True, disable=total < PROGRESS_FROM_ROWS) as progress:
        task = progress.add_task(title, total=total or None)
        for file, name in zip(files, unique_stems(files), strict=True):
            if left == 0:
                return
            if (problem := missing_columns(file, needed)) is not None:
                errors.add_file(file, problem)
                continue
            for number, row in itertools.islice(iter_rows(file, columns), left):
                yield file, number, f"{name}:{number}", row
                left = None if left is None else left - 1
                progress.advance(task)


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
        keys: the columns that `convert` reads, dotted or not ("extra_info.answer").
        convert: (row) -> its examples without their uid, none to leave the row out; a ValueError is an error of the row.
        needed: (columns of a file) -> columns that it must have.
        chats: the `keys` that hold chats, tools or keywords for the chat template (see `without_filled_nulls`).
        schema: of the examples; `uid` is "<file stem>:<row in file>", with "/<number>" where a row has several examples.

    Raises:
        ValueError: a missing or unreadable file, wrong rows (named by file and row number), no examples.
    """
    values: dict[str, list[Any]] = {name: [] for name in schema.names}
    errors, paths = RowErrors(), resolve_files(files)
    for path, number, uid, row in iter_files(
        paths, with_holders(keys), needed, errors, "tokenising examples"
    ):
        try:
            examples = convert(without_filled_nulls(row, chats, path))
        except ValueError as error:
            errors.add(path, number, str(error))
            continue
        for piece, example in enumerate(examples):
            part = f"/{piece}" if len(examples) > 1 else ""
            for column, value in {"uid": uid + part, **example}.items():
                values[column].append(value)
    errors.raise_if_any()
    if not values["uid"]:
        raise ValueError(f"no rows in {', '.join(map(str, paths))}")
    return pa.table(values, schema=schema)


def write_parquet(table: pa.Table, path: str | Path) -> Path:
    """Write a table as Parquet; at any moment `path` is either complete or as it was before."""
    # Numbers differ from token to token: dictionaries of numbers take as long as everything else, and save nothing.
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    with whole_file(path) as temporary:
        pq.write_table(table, temporary, use_dictionary=texts, compression="zstd", compression_level=1)
    return Path(path)


def write_arrow(table: pa.Table, path: Path) -> None:
    """Write a table in Arrow's own format, which gives back the same bits."""
    with naming(path), pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def read_arrow(path: Path) -> pa.Table:
    """Read a file of `write_arrow`; each column is one chunk."""
    with pa.OSFile(str(path), "rb") as file:
        return pa.ipc.open_file(file).read_all().combine_chunks()
