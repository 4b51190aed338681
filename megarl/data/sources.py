"""Where data files are: paths, globs, and URLs of whatever fsspec can open."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec

from megarl.util.files import check_url, is_url

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
    """Also with a cache before it: `simplecache::https://...`."""
    return url.rpartition("::")[2].startswith(("http://", "https://"))


def resolve_files(files: str | Path | DataFile | Sequence[str | Path | DataFile]) -> list[DataFile]:
    """Expand one path, URL or glob, or a list of them, into files that are there, globs in sorted order.

    Raises:
        ValueError: a file is missing, a glob matches nothing, nothing is given, a file is given twice, or a URL
            cannot be read (which package is missing, or what its server says).
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
    wild = "*[" if _is_http(pattern) else _GLOB_CHARACTERS  # what follows ? in http is a query
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
