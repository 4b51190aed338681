"""A checkpoint's manifest: a folder `step-<n>` is a checkpoint if its `manifest.json`, written last, is good.

The manifest has the size and SHA-256 of every other file, and a checksum of itself. Files are sealed, that is flushed to the disk
and hashed, before the manifest is written.
"""

import hashlib
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megarl.util.files import naming

CHUNK_BYTES = 8 << 20
NUM_THREADS = 8  # hashing and reading release the GIL
SHOW_AFTER_SECONDS = 2.0  # longer work has a progress bar


@dataclass(frozen=True)
class FileFacts:
    """A file's size and checksum; `sha256` in hexadecimal digits."""

    bytes: int
    sha256: str


def seal_file(path: str | Path) -> FileFacts:
    """Flush a file to the disk (fsync), and read it once for its facts.

    To be called on the machine that wrote the file: another one's fsync does not flush this one's page cache.

    Raises:
        OSError: it cannot be read or flushed; the error names it.
    """
    with naming(path), open(path, "rb") as file:
        os.fsync(file.fileno())
    return read_facts(path)


def seal_files(folder: str | Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Seal several files, some at a time; returns {name: facts}. Names are relative to `folder`.

    Raises:
        OSError: as `seal_file`.
    """
    folder, names = Path(folder), list(names)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: seal_file(folder / name), names), strict=True))


def read_facts(path: str | Path, advance: Callable[[int], object] = lambda num_bytes: None) -> FileFacts:
    """The facts of a file as it is; `advance` is told how many bytes more were read.

    Raises:
        OSError: it cannot be read.
    """
    digest, size, chunk = hashlib.sha256(), 0, memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            size += count
            advance(count)
    return FileFacts(size, digest.hexdigest())


def reading_progress(console: Console | None) -> Progress:
    """A progress bar for bytes that are read."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def read_all_facts(
    folder: Path, sizes: Mapping[str, int], console: Console | None = None
) -> dict[str, FileFacts | OSError]:
    """The facts of many files, or why one cannot be read. A signal's exception ends it at once, however much is left to read.

    Args:
        sizes: of the files, by name.
        console: shows a progress bar there if this takes a while.
    """
    progress, over = reading_progress(console), threading.Event()
    task = progress.add_task(f"verifying {folder.name}", total=sum(sizes.values()))

    def advance(count: int) -> None:
        if over.is_set():
            raise InterruptedError
        progress.advance(task, count)

    def read(name: str) -> FileFacts | OSError:
        try:
            return read_facts(folder / name, advance)
        except OSError as error:
            return error

    with ThreadPoolExecutor(NUM_THREADS) as readers:
        reading = {name: readers.submit(read, name) for name in sizes}
        try:
            if wait(reading.values(), timeout=SHOW_AFTER_SECONDS).not_done:
                with nullcontext() if console is None else progress:
                    wait(reading.values())
        except BaseException:  # otherwise the block ends with the last file
            over.set()
            readers.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: future.result() for name, future in reading.items()}


def flush_folder(folder: str | Path) -> None:
    """Flush the entries of a folder to the disk: a file that was created, renamed or removed in it stays so.

    Raises:
        OSError: it cannot be opened or flushed.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_flushed(path: str | Path, data: bytes) -> None:
    """Write a file and flush it to the disk.

    Raises:
        OSError: it cannot be written.
    """
    with naming(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


MANIFEST_FILE = "manifest.json"
FORMAT = 1

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NUM_NAMED = 5  # damaged files that a message names


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        step: the step after which it was saved.
        megarl: the version that wrote it.
        files: the facts of each file, by its path in the folder, with slashes.
        facts: further facts of the run, as JSON has them.
    """

    step: int
    megarl: str
    files: Mapping[str, FileFacts]
    facts: Mapping[str, Any]

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`; the same for equal manifests."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "megarl": self.megarl,
            "files": {name: asdict(facts) for name, facts in self.files.items()},
            "facts": dict(self.facts),
        }
        return json.dumps({**content, "sha256": _digest(content)}, indent=1, sort_keys=True).encode()

    @property
    def num_bytes(self) -> int:
        """The size of all its files."""
        return sum(facts.bytes for facts in self.files.values())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is there, with a good manifest."""

    step: int
    folder: Path
    manifest: Manifest

    @property
    def facts(self) -> Mapping[str, Any]:
        """The run's facts at the time of the save."""
        return self.manifest.facts


def folder_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    assert step >= 0, step
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step of a folder of that name; None: it is no checkpoint's."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def steps_in(root: str | Path) -> list[int]:
    """The steps that have a folder in `root`, in order; whether they are good is not checked."""
    root = Path(root)
    if not root.is_dir():
        return []
    steps = (step_of(path.name) for path in root.iterdir() if path.is_dir())
    return sorted(step for step in steps if step is not None)


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """The checkpoint in a folder, whose files are not checked (see `find_damage`).

    Raises:
        ValueError: the folder has no manifest, or one that is not as it was written.
    """
    path = Path(folder) / MANIFEST_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{folder} is no complete checkpoint: {MANIFEST_FILE}: {error.strerror}") from None
    manifest = parse_manifest(content, str(path))
    named = step_of(Path(folder).resolve().name)
    if named is not None and named != manifest.step:
        raise ValueError(f"{path} is of step {manifest.step}, not of the step that its folder is named after")
    return Checkpoint(manifest.step, Path(folder), manifest)


def parse_manifest(content: bytes, name: str) -> Manifest:
    """The manifest in the content of the file `name`.

    Raises:
        ValueError: it is not as it was written, of a later version, or names files outside of its folder.
    """
    try:
        document = json.loads(content)
    except ValueError:  # JSON, or UTF-8
        raise ValueError(f"{name} is damaged: it is not JSON") from None
    if not isinstance(document, dict) or "format" not in document:
        raise ValueError(f"{name} is no manifest of megarl's")
    if document["format"] != FORMAT:
        raise ValueError(f"{name} has format {document['format']!r}; this version of megarl reads {FORMAT}")
    digest = document.pop("sha256", None)
    if digest != _digest(document):
        raise ValueError(f"{name} is damaged: its checksum is not that of its content")
    # Content with the right checksum was written by `to_bytes`, or by somebody who means harm.
    outside = [file for file in document["files"] if not _is_inside(file)]
    if outside:
        raise ValueError(f"{name} names {outside[0]!r}, which is no file of its folder")
    files = {file: FileFacts(**facts) for file, facts in document["files"].items()}
    wrong = [file for file, facts in files.items() if not _SHA256.fullmatch(facts.sha256)]
    if wrong:
        raise ValueError(f"{name} has no SHA-256 of {wrong[0]}")
    return Manifest(document["step"], document["megarl"], files, document["facts"])


# What has changed in which of a folder's files since they were written, by their names: a function of the folder, the files and a console
# for its progress.
Verify = Callable[[Path, Mapping[str, FileFacts], Console | None], dict[str, str]]


def changed_files(
    folder: Path, files: Mapping[str, FileFacts], console: Console | None = None
) -> dict[str, str]:
    """`Verify` by this process."""
    read = read_all_facts(folder, {name: facts.bytes for name, facts in files.items()}, console)
    changes = {name: difference(read[name], facts) for name, facts in files.items()}
    return {name: change for name, change in changes.items() if change is not None}


def find_damage(
    checkpoint: Checkpoint, *, console: Console | None = None, verify: Verify = changed_files
) -> list[str]:
    """Changes of a checkpoint's files since they were written, file by file in words; empty: none.

    Args:
        console: shows a progress bar there if it takes a while.
        verify: reads the files that are there with their sizes.
    """
    files, folder = checkpoint.manifest.files, checkpoint.folder
    damage, whole = {}, {}
    for name, facts in files.items():
        try:
            found = (folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            damage[name] = "is missing"
            continue
        except OSError as error:
            damage[name] = _unreadable(error)
            continue
        if not stat.S_ISREG(found.st_mode):
            damage[name] = "is no file but something else"
        elif found.st_size != facts.bytes:
            damage[name] = f"has {found.st_size} bytes instead of {facts.bytes}"
        else:
            whole[name] = facts
    damage |= verify(folder, whole, console)
    return [f"{name} {what}" for name, what in sorted(damage.items())]


def difference(found: FileFacts | OSError, written: FileFacts) -> str | None:
    """How a file `found` differs from the file that was `written`, in words; None: not at all."""
    if isinstance(found, OSError):
        return _unreadable(found)
    if found.bytes != written.bytes:
        return f"has {found.bytes} bytes instead of {written.bytes}"
    return None if found == written else "has another SHA-256 than when it was written"


def _unreadable(error: OSError) -> str:
    return f"cannot be read ({error.strerror})"


def shortened(damage: list[str]) -> str:
    """For a message: the first few, and how many more there are."""
    more = len(damage) - _NUM_NAMED
    return "; ".join(damage[:_NUM_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _is_inside(name: str) -> bool:
    """Whether a file's name in a manifest is a path in the folder, in its one spelling, and not the manifest's own."""
    path = PurePosixPath(name)
    return (
        name == str(path)
        and not path.is_absolute()
        and ".." not in path.parts
        and name not in (".", "", MANIFEST_FILE)
        and "\0" not in name
    )
