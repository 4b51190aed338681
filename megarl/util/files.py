"""Files that are written completely or not at all, checked JSON, and errors that name the file that is wrong."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary path next to `path`, to write to. It replaces `path` if the block ends without an error.

    Raises:
        OSError: as `naming`; `path` is then as it was before.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text in UTF-8, as `whole_file` does."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name `path` in errors of the file system: the error of a write to a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not from the file system, such as a TimeoutError of megarl's
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A new folder next to `path`, to fill. It replaces `path` if the block ends without an error.

    All files are on the disk by then. An older folder at `path` is moved aside first, then deleted.

    Raises:
        OSError: as `naming`; `path` is then as it was before.
    """
    path = Path(path)
    building, old = (path.with_name(f".{path.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    with naming(path):
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        try:
            yield building
            for file in building.rglob("*"):
                if file.is_file():
                    with file.open("rb") as written:
                        os.fsync(written.fileno())
            if path.exists():
                path.rename(old)
            try:
                building.rename(path)
            except OSError:
                if old.exists():
                    old.rename(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(building, ignore_errors=True)


def read_json_object(file: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: names the file; it is no JSON, or another value than an object.
        OSError: it cannot be read.
    """
    return json_object(file.read_bytes(), str(file))


def json_object(content: bytes, file: str) -> dict[str, Any]:
    """The object that `content`, read from `file`, holds; raises as `read_json_object`."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:  # also of bytes that are no text
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} should hold a JSON object, found {type(found).__name__}")
    return found


def is_url(path: str) -> bool:
    """Whether a path is a URL, such as `s3://bucket/train.parquet`."""
    return "://" in path


def check_url(url: str) -> None:
    """Check, without a network, that the files of a URL's protocol can be opened here.

    Raises:
        ValueError: the protocol is unknown, or needs a package that is not installed, which is named.
    """
    from fsspec import get_filesystem_class  # takes a moment; most runs have no URL

    protocol = url.partition("://")[0].rpartition("::")[2]
    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        raise ValueError(f"{url}: {protocol}:// needs a package that is not installed: {error}") from error
    except ValueError:
        raise ValueError(
            f"{url}: the protocol {protocol}:// is unknown; s3://, gs://, hf://, https:// and others are known"
        ) from None
