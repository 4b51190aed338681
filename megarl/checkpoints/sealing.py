"""Files that are on the disk for certain, and what is known of them: their size and SHA-256."""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megarl.util.files import naming

CHUNK_BYTES = 8 << 20
NUM_THREADS = 8  # hashing and reading release the GIL
SHOW_AFTER_SECONDS = 2.0  # what takes longer has a progress bar


@dataclass(frozen=True)
class FileFacts:
    """What a file must be; `sha256` in hexadecimal digits."""

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
    """`seal_file` of many, some at a time: {name: facts}, names relative to `folder`.

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


def read_all_facts(
    folder: Path, sizes: Mapping[str, int], text: str, console: Console | None
) -> dict[str, FileFacts | OSError]:
    """The facts of many files, or why one cannot be read.

    Args:
        sizes: of the files, by name.
        console: shows a progress bar there if this takes a while.
    """
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    task = progress.add_task(text, total=sum(sizes.values()))

    def read(name: str) -> FileFacts | OSError:
        try:
            return read_facts(folder / name, lambda count: progress.advance(task, count))
        except OSError as error:
            return error

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        reading = {name: threads.submit(read, name) for name in sizes}
        if wait(reading.values(), timeout=SHOW_AFTER_SECONDS).not_done:
            with nullcontext() if console is None else progress:
                wait(reading.values())
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
