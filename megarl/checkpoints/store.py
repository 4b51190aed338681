"""The checkpoints of a run in a folder: committed in one step, found again, pruned.

Guarantees, also when the process is killed at any moment:

- A checkpoint appears under its name with all its files on the disk, or not at all.
- Once there was a good checkpoint there always is one: the newest good one is never removed, whatever else is going on.
- Unfinished files of a killed process are removed by the next writer, and by no other process: one process writes at
  a time (`WriterLock`), and a process taken for dead notices before it would change anything that others see.

A checkpoint is built in `.step-<n>.<token>-<k>.partial` and renamed. A checkpoint is renamed to `....pruned` before it is removed. A step
that is there already is replaced by two renames, of the old folder to `....replaced` and of the new one to its place: Linux could exchange
the two in one call (renameat2), but network file systems do not have it. A process that is killed between them leaves no `step-<n>`; the next
writer renames the old one back.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

import megarl
from megarl.checkpoints.manifest import (
    MANIFEST_FILE,
    Checkpoint,
    FileFacts,
    Manifest,
    Verify,
    changed_files,
    find_damage,
    flush_folder,
    folder_name,
    read_checkpoint,
    seal_files,
    shortened,
    steps_in,
    write_flushed,
)
from megarl.checkpoints.mirror import Mirror
from megarl.checkpoints.policy import STATE_FILE, Keep, kept_steps, read_best, write_best
from megarl.checkpoints.writer_lock import WriterLock
from megarl.util.files import naming

_PARTIAL, _PRUNED, _REPLACED = "partial", "pruned", "replaced"
_HIDDEN = re.compile(rf"\.(step-[0-9]+)\.[0-9a-f]+-[0-9]+\.({_PARTIAL}|{_PRUNED}|{_REPLACED})")


class CheckpointStore:
    """The checkpoints `step-<n>` in the folder `root`; this process is its only writer until `close`.

    To read a checkpoint, `read_checkpoint` and `find_damage` are enough.

    Args:
        keep: which checkpoints stay when there are newer ones.
        remote: a URL (`s3://bucket/run`) to which checkpoints are copied in the background; None: nowhere.
        say: called with messages for people, one line each; also from another thread.
        console: shows the progress of work that takes a while; None: it is not shown.

    Raises:
        ValueError: another process writes there; the URL cannot be used.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self,
        root: str | Path,
        keep: Keep,
        remote: str | None = None,
        say: Callable[[str], None] = print,
        *,
        console: Console | None = None,
    ) -> None:
        self.root = Path(root)
        self._keep = keep
        self._say = say
        self._console = console
        self._num_hidden = 0
        self._damaged: set[int] = set()  # found by `newest_good` of this process
        self._abandoned: set[int] = set()  # of a history that the run does not continue
        self._remote_is_known = True  # False: it could not be read, and may have newer checkpoints
        self._mirror = None if remote is None else Mirror(self.root, remote, keep, say)
        with naming(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(self.root, say)
        try:
            self._recover()
            self._best = read_best(self.root, say)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the copies to the remote, and let others write here."""
        try:
            if self._mirror is not None:
                self._mirror.close()
        finally:
            self._lock.release()

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint so far, as `mark_best` was told."""
        return self._best

    @contextmanager
    def building(self, step: int) -> Iterator[Path]:
        """A new folder for a checkpoint's files; removed (as far as that works) if the block raises.

        It may be committed in the block or, when files are still written in the background, after it.

        Raises:
            OSError: it cannot be made.
        """
        partial = self._hidden(step, _PARTIAL)
        with naming(partial):
            partial.mkdir()
        with self.discarding(partial):
            yield partial

    @contextmanager
    def discarding(self, partial: Path) -> Iterator[None]:
        """Remove a folder of `building`, as far as that works, if the block raises before it was committed."""
        try:
            yield
        except BaseException:
            self.discard(partial)
            raise

    def discard(self, partial: Path) -> None:
        """Remove a folder of `building` that will not be committed, as far as that works."""
        shutil.rmtree(partial, ignore_errors=True)

    def commit(
        self,
        step: int,
        partial: Path,
        files: Mapping[str, FileFacts | None],
        facts: Mapping[str, Any],
    ) -> Checkpoint:
        """Make a folder of `building` the checkpoint of `step`, then prune.

        Args:
            files: all files in `partial`, by their paths in it; the facts from `seal_file`, or None for a file
                that is sealed here.
            facts: further facts for the manifest; JSON.

        Raises:
            ValueError: `files` and the folder's content differ. `partial` is removed.
            OSError: the file system refused something, such as a full disk. `partial` is removed.
            RuntimeError: this process was taken for dead, and another one writes here.
        """
        name = _HIDDEN.fullmatch(partial.name)
        assert partial.parent == self.root and name is not None, partial
        assert (name[1], name[2]) == (folder_name(step), _PARTIAL), partial
        try:
            _check_content(partial, files)
            sealed = seal_files(partial, (name for name, known in files.items() if known is None))
            known = {name: facts for name, facts in files.items() if facts is not None}
            checkpoint = self._publish(
                partial, Manifest(step, megarl.__version__, known | sealed, dict(facts))
            )
        except BaseException:
            self.discard(partial)
            raise
        try:
            self._prune(step)
        except OSError as error:  # the checkpoint is there all the same
            self._say(f"Warning: older checkpoints in {self.root} cannot be removed: {error}")
        self._notify(committed=True)
        return checkpoint

    def newest_good(self, *, verify: Verify = changed_files) -> Checkpoint | None:
        """The newest checkpoint all of whose files are as they were written; damage in newer ones is reported.

        One that is only at the remote, and newer than any good one here, is fetched first.

        Args:
            verify: reads the files of one that is here.

        Raises:
            ValueError: the remote cannot be read, and there is no good checkpoint here.
        """
        local = self._newest_here(verify)
        if self._mirror is None:
            return local
        self._remote_is_known = True
        try:
            return self._fetch_newer(-1 if local is None else local.step) or local
        except OSError as error:
            self._remote_is_known = False
            if local is None:
                raise ValueError(f"there is no good checkpoint in {self.root}, and {error}") from error
            self._say(
                f"Warning: if there are newer checkpoints than {local.folder}, they cannot be fetched: {error}"
            )
            return local

    def mark_best(self, step: int) -> None:
        """Remember the checkpoint of `step` as the best so far, also over restarts: it is kept until a better one.

        Raises:
            ValueError: there is no such checkpoint.
            OSError: this cannot be written to the disk.
        """
        if step not in self._good_steps():
            raise ValueError(
                f"{self.root} has no good checkpoint of step {step} that could be the best; steps: {steps_in(self.root)}"
            )
        write_best(self.root, step)
        self._best = step
        self._notify()

    def abandon_later(self, step: int) -> None:
        """The run goes on from `step` (-1: from the beginning) though there are checkpoints of later steps: they do not
        count any more, here and at the remote, and are removed once there is a new one. Those of a remote that could not be read
        stay: nobody has chosen to go on without them. Checkpoints that an earlier process could not copy are copied now: the run may be at
        its last step.

        Raises:
            OSError: the file of the best step cannot be written.
        """
        self._abandoned = {
            later
            for later in steps_in(self.root)
            if later > step and _is_checkpoint(self.root / folder_name(later))
        }
        if self._mirror is not None and self._remote_is_known:
            self._mirror.abandon_later(step, self._ignored())
        if self._best is not None and self._best > step:
            write_best(self.root, None)
            self._best = None
        if step >= 0 and self._remote_is_known:
            self._notify()

    def _prune(self, committed: int) -> None:
        """After a commit, remove checkpoints that need not be kept. Damaged folders are left for people to look at."""
        good = self._good_steps()
        kept = kept_steps(good, self._keep, self._best) | {committed}  # also if there are later ones
        superfluous = (set(good) - kept) | self._abandoned
        if not superfluous:
            return
        self._lock.check()
        hidden = []
        with nullcontext() if self._mirror is None else self._mirror.sparing() as copied:
            for step in sorted(superfluous - {copied}):
                hidden.append(self._hidden(step, _PRUNED))
                (self.root / folder_name(step)).rename(hidden[-1])
        self._abandoned -= superfluous - {copied}
        flush_folder(self.root)  # or a removed one could be back after a power cut, with some of its files
        for folder in hidden:
            _remove(folder)

    def _good_steps(self) -> list[int]:
        """Checkpoints with a good manifest; their files are not checked, there may be very many."""
        return [
            step
            for step in steps_in(self.root)
            if step not in self._damaged | self._abandoned and _is_checkpoint(self.root / folder_name(step))
        ]

    def _newest_here(self, verify: Verify) -> Checkpoint | None:
        for step in sorted(set(steps_in(self.root)) - self._abandoned, reverse=True):
            folder = self.root / folder_name(step)
            try:
                checkpoint = read_checkpoint(folder)
            except ValueError as error:
                self._say(f"Warning: {error}; {folder} is ignored")
                continue
            damage = find_damage(checkpoint, console=self._console, verify=verify)
            if not damage:
                return checkpoint
            self._damaged.add(step)
            self._say(f"Warning: the checkpoint {folder} is damaged and ignored: {shortened(damage)}")
        return None

    def _fetch_newer(self, step: int) -> Checkpoint | None:
        """The newest good checkpoint of the remote that is newer than `step`, now also here.

        Raises:
            OSError: the remote cannot be read, or this disk cannot be written to.
        """
        assert self._mirror is not None
        if self._best is None and (best := self._mirror.best()) is not None:
            write_best(self.root, best)
            self._best = best
        for newer in reversed([there for there in self._mirror.steps() if there > step]):
            try:
                manifest = self._mirror.manifest(newer)
            except ValueError as error:
                self._say(f"Warning: {error}; it is ignored")
                continue
            self._say(
                f"fetching {self._mirror.name(newer)}: {len(manifest.files)} files, {manifest.num_bytes:,} bytes"
            )
            with self.building(newer) as partial:
                damage = self._mirror.download(manifest, partial)
                if not damage:
                    return self._publish(partial, manifest)
            self.discard(partial)
            self._say(
                f"Warning: the checkpoint {self._mirror.name(newer)} is damaged and ignored: {shortened(damage)}"
            )
        return None

    def _publish(self, partial: Path, manifest: Manifest) -> Checkpoint:
        """Write the manifest into a folder whose files are on the disk, and rename the folder to its final name."""
        final = self.root / folder_name(manifest.step)
        with naming(final):
            write_flushed(partial / MANIFEST_FILE, manifest.to_bytes())
            for folder, _, _ in os.walk(partial, topdown=False):
                flush_folder(folder)
            self._lock.check()
            old = self._hidden(manifest.step, _REPLACED) if final.exists() else None
            if old is not None:
                final.rename(old)
            try:
                partial.rename(final)
            except OSError:
                if old is not None:
                    old.rename(final)
                raise
            flush_folder(self.root)
        self._damaged.discard(manifest.step)
        self._abandoned.discard(manifest.step)
        if old is not None:
            _remove(old)
        return Checkpoint(manifest.step, final, manifest)

    def _ignored(self) -> frozenset[int]:
        return frozenset(self._damaged | self._abandoned)

    def _notify(self, *, committed: bool = False) -> None:
        if self._mirror is not None:
            self._mirror.notify(self._ignored(), committed=committed)

    def _recover(self) -> None:
        """Clean up after killed processes: a checkpoint that was about to be replaced is put back, the rest removed."""
        for path in self.root.glob(f".{STATE_FILE}.*.tmp"):
            path.unlink()
        for path in sorted(self.root.iterdir()):
            match = _HIDDEN.fullmatch(path.name)
            if match is None:
                continue
            final = self.root / match[1]
            if match[2] == _REPLACED and not final.exists() and _is_checkpoint(path):
                path.rename(final)
                flush_folder(self.root)
                self._say(f"{final}: put back; an earlier run ended while it replaced it")
            else:
                _remove(path)
                self._say(f"removed {path}, which an earlier run left unfinished")

    def _hidden(self, step: int, what: str) -> Path:
        """A path that was never used: a rank that is late may still write into an earlier one."""
        self._num_hidden += 1
        return self.root / f".{folder_name(step)}.{self._lock.token}-{self._num_hidden}.{what}"


def _is_checkpoint(folder: Path) -> bool:
    try:
        read_checkpoint(folder)
    except ValueError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Delete a folder as far as that works; the rest of it is no checkpoint."""
    with suppress(OSError):
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _check_content(folder: Path, files: Mapping[str, FileFacts | None]) -> None:
    """Raise ValueError unless `files` are exactly the files in the folder, with the sizes that are known."""
    there = {}
    for parent, folders, names in os.walk(folder):
        for name in (*names, *(name for name in folders if os.path.islink(os.path.join(parent, name)))):
            path = Path(parent, name)
            there[path.relative_to(folder).as_posix()] = path.lstat()
    problems = [
        *(f"{name} is there and was not announced" for name in sorted(there.keys() - files.keys())),
        *(f"{name} was announced and is not there" for name in sorted(files.keys() - there.keys())),
    ]
    for name in sorted(there.keys() & files.keys()):
        found, known = there[name], files[name]
        if not stat.S_ISREG(found.st_mode):
            problems.append(f"{name} is no file but a link or something else")
        elif known is not None and found.st_size != known.bytes:
            problems.append(f"{name} has {found.st_size} bytes instead of {known.bytes}")
        elif name == MANIFEST_FILE:
            problems.append(f"{name} is for the store to write")
    if problems:
        raise ValueError(f"{folder} cannot become a checkpoint: {shortened(problems)}")
