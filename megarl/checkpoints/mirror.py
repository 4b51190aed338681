"""Copies of checkpoints at a URL, written in the background, and read back where the local ones are gone.

Guarantees:

- A checkpoint's manifest is copied last, and removed first: a step without one is no checkpoint there either.
- A failed copy is reported with the file's name, and tried again after the next commit and at the end.
- The newest checkpoint is copied first; the remote keeps the checkpoints that the rules keep (`Keep`).

It reads the local folder anew each time, so every checkpoint that should be at the remote gets there, also one that an
earlier process could not copy. One run may write to a URL at a time; unlike for local folders, nothing checks this.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.checkpoints.manifest import (
    MANIFEST_FILE,
    Manifest,
    difference,
    folder_name,
    parse_manifest,
    seal_file,
    step_of,
    steps_in,
)
from megarl.checkpoints.policy import STATE_FILE, Keep, kept_steps, parse_best, read_best
from megarl.util.files import check_url, is_url

NUM_THREADS = 4


class Mirror:
    """The checkpoints at `url`, and the thread that copies checkpoints of the folder `root` to it.

    Raises:
        ValueError: the URL cannot be used: a package is not installed, or lacks credentials.
    """

    def __init__(self, root: Path, url: str, keep: Keep, say: Callable[[str], None]) -> None:
        self._root = root
        self._url = url.rstrip("/")
        self._keep = keep
        self._say = say
        self._files, self._path = _open(url)
        self._damaged: set[int] = set()  # at the remote, found by `download`
        self._there: dict[int, bytes | None] | None = (
            None  # as `_remote_manifests` returns them; None: not read yet
        )
        self._state: bytes | None = None  # content of the state file at the remote, if this process wrote it
        self._sent: set[tuple[int, str, str]] = set()  # (step, file, SHA-256) of a copy that is not finished
        self._ignored: frozenset[int] = frozenset()  # of the local steps
        self._abandoned_after: int | None = None
        self._prunes = False  # nothing is removed at the remote before the first new checkpoint
        self._guard = threading.Lock()  # between choosing a checkpoint to copy and removing it here
        self._copied: int | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def name(self, step: int) -> str:
        """The URL of a checkpoint."""
        return f"{self._url}/{folder_name(step)}"

    def steps(self) -> list[int]:
        """The steps that have a manifest at the remote, in order, without abandoned ones.

        Raises:
            OSError: the remote cannot be read.
        """
        return sorted(self._counted_steps(self._remote_manifests()))

    def manifest(self, step: int) -> Manifest:
        """The manifest of a checkpoint at the remote.

        Raises:
            ValueError: it is gone or damaged.
            OSError: the remote cannot be read.
        """
        content = self._read(f"{folder_name(step)}/{MANIFEST_FILE}")
        manifest = parse_manifest(content or b"", f"{self.name(step)}/{MANIFEST_FILE}")
        if manifest.step != step:
            raise ValueError(f"{self.name(step)} has the manifest of step {manifest.step}")
        return manifest

    def best(self) -> int | None:
        """The step of the best checkpoint by the state file at the remote; None: not known.

        Raises:
            OSError: the remote cannot be read.
        """
        content = self._read(STATE_FILE)
        try:
            best = None if content is None else parse_best(content)
        except ValueError:
            self._say(
                f"Warning: {self._url}/{STATE_FILE} is damaged; which checkpoint was the best is not known"
            )
            return None
        after = self._abandoned_after
        return None if best is None or (after is not None and best > after) else best

    def download(self, manifest: Manifest, folder: Path) -> list[str]:
        """Copy the files of a checkpoint into `folder`, flushed to the disk.

        Returns:
            The changes of files since they were written, in words, one text for each changed file.

        Raises:
            OSError: the remote cannot be read, or this disk cannot be written to.
        """

        def get(name: str) -> str | None:
            remote, local = f"{folder_name(manifest.step)}/{name}", folder / name
            local.parent.mkdir(parents=True, exist_ok=True)
            with self._naming(remote):
                try:
                    self._files.get_file(f"{self._path}/{remote}", os.fspath(local))
                except FileNotFoundError:
                    return f"{name} is missing"
            problem = difference(seal_file(local), manifest.files[name])
            return None if problem is None else f"{name} {problem}"

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            damage = [problem for problem in threads.map(get, manifest.files) if problem is not None]
        if damage:
            self._damaged.add(manifest.step)
        return damage

    def abandon_later(self, step: int, ignored: frozenset[int]) -> None:
        """The remote's checkpoints after `step` no longer count, and are removed once there is something new to copy.

        Args:
            ignored: the local steps that no longer count either.
        """
        self._abandoned_after = step
        self._ignored = ignored

    def notify(self, ignored: frozenset[int], *, committed: bool) -> None:
        """Copy, in the background, checkpoints of the local folder that are not at the remote, except the steps `ignored`.

        Args:
            committed: whether this process has made a new one, so that others may be superfluous.
        """
        self._ignored = ignored
        self._prunes |= committed
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Wait until everything is copied; failed copies are tried once more."""
        if self._thread is not None:
            self._closing.set()
            self._wake.set()
            self._thread.join()
            self._thread = None

    @contextmanager
    def sparing(self) -> Iterator[int | None]:
        """The step that is being copied, whose folder must stay; no other copy begins within the block."""
        with self._guard:
            yield self._copied

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                self._copy_all()
            except (OSError, ValueError) as error:  # ValueError: a manifest that was damaged just now
                self._there = None  # to be read again
                again = "" if closing else "; it is tried again after the next checkpoint"
                self._say(f"Warning: checkpoints are not copied: {error}{again}")
            finally:
                self._copied = None
            if closing:
                return

    def _copy_all(self) -> None:
        abandoned_after, prunes = self._abandoned_after, self._prunes
        if self._there is None:
            self._there = self._remote_manifests()
        while (step := self._choose(self._there)) is not None:
            self._upload(step, self._there)
        if not prunes:
            return
        self._prune(self._there)
        if self._abandoned_after == abandoned_after:  # unless `abandon_later` was called in between
            self._abandoned_after = None
        state = self._root / STATE_FILE
        if state.exists() and (content := state.read_bytes()) != self._state:
            self._write(STATE_FILE, content)
            self._state = content

    def _choose(self, there: dict[int, bytes | None]) -> int | None:
        """The newest checkpoint that is here, should be at the remote, and is not."""
        with self._guard:
            here = self._here()
            kept = kept_steps({*here, *self._counted_steps(there)}, self._keep, self._best())
            self._copied = max(
                (step for step in kept & here.keys() if there.get(step) != here[step]), default=None
            )
            return self._copied

    def _here(self) -> dict[int, bytes]:
        """The content of the good manifests of the local folder, by step."""
        contents = {}
        for step in set(steps_in(self._root)) - self._ignored:
            path = self._root / folder_name(step) / MANIFEST_FILE
            if path.is_file():
                content = path.read_bytes()
                try:
                    parse_manifest(content, str(path))
                except ValueError:
                    continue
                contents[step] = content
        return contents

    def _best(self) -> int | None:
        return read_best(self._root, self._say)

    def _upload(self, step: int, there: dict[int, bytes | None]) -> None:
        folder = self._root / folder_name(step)
        content = (folder / MANIFEST_FILE).read_bytes()
        manifest = parse_manifest(content, str(folder / MANIFEST_FILE))
        if there.get(step) is not None:
            self._remove_manifest(step)
        there[step] = None

        def put(name: str) -> None:
            facts = manifest.files[name]
            if (step, name, facts.sha256) in self._sent:
                return
            remote = f"{folder_name(step)}/{name}"
            with self._naming(remote):
                self._files.put_file(os.fspath(folder / name), f"{self._path}/{remote}")
                size = self._files.size(f"{self._path}/{remote}")
            if size != facts.bytes:
                raise OSError(f"{self._url}/{remote} has {size} bytes instead of {facts.bytes}")
            self._sent.add((step, name, facts.sha256))

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            list(threads.map(put, manifest.files))
        if (folder / MANIFEST_FILE).read_bytes() != content:
            return  # replaced in the meantime: the remote may have files of both, and the step is chosen again
        self._write(f"{folder_name(step)}/{MANIFEST_FILE}", content)
        there[step] = content
        self._damaged.discard(step)
        self._sent = {sent for sent in self._sent if sent[0] != step}

    def _prune(self, there: dict[int, bytes | None]) -> None:
        kept = kept_steps(self._counted_steps(there), self._keep, self._best())
        unfinished = {step for step, content in there.items() if content is None}
        spared = kept | (unfinished & (self._damaged | set(steps_in(self._root))))
        for step in sorted(there.keys() - spared):
            if step not in unfinished:
                self._remove_manifest(step)
                there[step] = None
            with self._naming(folder_name(step)):
                self._files.rm(f"{self._path}/{folder_name(step)}", recursive=True)
            del there[step]

    def _counted_steps(self, there: dict[int, bytes | None]) -> set[int]:
        """The steps at the remote that count: with a manifest, of the history that the run continues."""
        after = self._abandoned_after
        abandoned = set() if after is None else {step for step in there if step > after} - self._here().keys()
        return {step for step, content in there.items() if content is not None} - abandoned

    def _remote_manifests(self) -> dict[int, bytes | None]:
        """For each step that has a folder at the remote the content of its manifest; None: it has no good one."""
        with self._naming(""):
            self._files.invalidate_cache()
            try:
                names = self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return {}
        steps = {step_of(name.rstrip("/").rpartition("/")[2]) for name in names} - {None}
        return {
            step: None if step in self._damaged else self._read(f"{folder_name(step)}/{MANIFEST_FILE}")
            for step in steps
        }

    def _read(self, name: str) -> bytes | None:
        with self._naming(name):
            try:
                return self._files.cat_file(f"{self._path}/{name}")
            except FileNotFoundError:
                return None

    def _write(self, name: str, content: bytes) -> None:
        with self._naming(name):
            self._files.pipe_file(f"{self._path}/{name}", content)

    def _remove_manifest(self, step: int) -> None:
        name = f"{folder_name(step)}/{MANIFEST_FILE}"
        with self._naming(name):
            self._files.rm_file(f"{self._path}/{name}")

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the protocol's own library
            url = f"{self._url}/{name}".rstrip("/")
            raise OSError(f"{url}: {type(error).__name__}: {error}") from error


def _open(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it."""
    if not is_url(url):
        raise ValueError(
            f"checkpoints are copied to a URL, such as s3://bucket/run or file:///mnt/run; found {url!r}"
        )
    check_url(url)
    from fsspec.core import url_to_fs  # takes a moment; most runs have no URL

    # Other file systems have no folders, or make them by themselves.
    options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
    try:
        files, path = url_to_fs(url, **options)
    except Exception as error:  # of the protocol's own library: credentials, say
        raise ValueError(f"{url} cannot be opened: {type(error).__name__}: {error}") from error
    return files, path.rstrip("/")
