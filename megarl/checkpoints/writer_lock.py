"""One writer at a time in a folder, also over NFS, and also after a `kill -9`.

Each writer has a file of its own in the folder, `.writer.<token>`, which identifies it, and touches it every
`BEAT_SECONDS`. To become the writer, a process creates its file and then looks at all others; if one of them belongs to
a living process, it withdraws. Of two processes that start at once at least one sees the other, so there are never two writers
(at worst neither becomes one, and both try again a few times). Files of the dead are removed. Nothing here needs locks of the
file system, which many network file systems do not have, or keep after their client died.

A writer is dead if it is:
- on this machine (same boot, same process namespace): a process that does not exist, or that began at another time;
- elsewhere: a process whose file was not touched for `DEAD_SECONDS`. Times are the file system server's, so that clocks may
  differ. The start waits until this is decided: a job that is queued again after its node died goes on by itself.

A writer that was taken for dead (its machine was suspended, say) finds its file gone and writes nothing more: `check`.
"""

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from megarl.util.files import naming

BEAT_SECONDS = 5.0
DEAD_SECONDS = 60.0

_PREFIX = ".writer."
_ATTEMPTS = 3
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Writer:
    """The facts of a process by which others can tell whether it lives.

    Attributes:
        machine: the boot and the namespace of processes in which `pid` is valid (a container has its own).
        started: when the process began, in clock ticks since the boot; 0: not known.
        since: when it became a writer, for people.
    """

    host: str
    machine: str
    pid: int
    started: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class WriterLock:
    """Makes this process the only writer in `folder` until `release`.

    Args:
        say: is told when the start waits for the end of another machine's writer.
        beat_seconds, dead_seconds: as above; equal for all writers of the folder.

    Raises:
        ValueError: another process that lives writes there; the error says which.
        OSError: the folder cannot be written to.
    """

    def __init__(
        self,
        folder: str | Path,
        say: Callable[[str], None],
        *,
        beat_seconds: float = BEAT_SECONDS,
        dead_seconds: float = DEAD_SECONDS,
    ) -> None:
        self.token = os.urandom(6).hex()
        self._folder = Path(folder)
        self._say = say
        self._beat_seconds = beat_seconds
        self._dead_seconds = dead_seconds
        self._released = threading.Event()
        self._path = self._folder / f"{_PREFIX}{self.token}"
        self._acquire()

    def check(self) -> None:
        """Make sure that this process still is the writer; to be called before a change that others would see.

        Raises:
            RuntimeError: it was taken for dead.
        """
        if _touched(self._path) is None:
            raise RuntimeError(
                f"this process may not write to {self._folder} any more: its mark there, {self._path.name}, is gone; another "
                f"run removes it if there was no sign of life for {self._dead_seconds:g} s (a machine that was suspended, a file "
                "system that hung)"
            )

    def release(self) -> None:
        """Let others write."""
        self._released.set()
        self._beats.join()
        self._path.unlink(missing_ok=True)

    def _acquire(self) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            self._begin()
            try:
                holder = self._living_other()
            except BaseException:
                self.release()
                raise
            if holder is None:
                return
            self.release()
            if attempt < _ATTEMPTS:  # the other one may be about to end, or withdraw because it saw this one
                time.sleep(random.uniform(0.1, 0.5) * attempt)
        raise ValueError(
            f"another run writes to {self._folder}: {holder}. Two runs would destroy each other's files: wait for its "
            "end, stop it, or give this run another folder"
        )

    def _begin(self) -> None:
        with naming(self._path):
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            try:
                os.write(handle, json.dumps(asdict(_this_process())).encode())
                os.fsync(handle)
            except OSError:
                self._path.unlink()
                raise
            finally:
                os.close(handle)
        self._released.clear()
        self._beats = threading.Thread(target=self._beat, name="writer-lock", daemon=True)
        self._beats.start()

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            try:
                os.utime(self._path)  # with the server's time
            except FileNotFoundError:  # `check` reports it
                return
            except OSError:  # a server that is away for a moment: the next beat comes
                continue

    def _living_other(self) -> str | None:
        """Another living writer of the folder, in words; None: there is none. The files of dead ones before it are removed."""
        for path in sorted(self._folder.glob(f"{_PREFIX}*")):
            if path == self._path:
                continue
            writer = _read(path)
            if writer is not None and writer.machine == _machine():
                lives = _started(writer.pid) == writer.started
            else:
                lives = self._gives_sign(path, writer)
            if lives:
                return "a process whose file does not describe it" if writer is None else str(writer)
            path.unlink(missing_ok=True)
        return None

    def _gives_sign(self, path: Path, writer: Writer | None) -> bool:
        """Wait until a file is touched (True), or is gone or too old (False)."""
        os.utime(self._path)
        now, seen = _touched(self._path), _touched(path)
        if now is None or seen is None:
            return False
        begin, silent = time.monotonic(), max(now - seen, 0.0)
        if silent < self._dead_seconds:
            self._say(
                f"{self._folder}: last written by {writer or 'an unknown process'}, {silent:.0f} s ago; waiting at most "
                f"{self._dead_seconds - silent:.0f} s to see whether it still lives"
            )
        while silent + time.monotonic() - begin < self._dead_seconds:
            time.sleep(_POLL_SECONDS)
            touched = _touched(path)
            if touched is None:
                return False
            if touched != seen:
                return True
        return False


def _this_process() -> Writer:
    since = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    return Writer(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()) or 0, since)


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> int | None:
    """When a process of this machine began, in clock ticks since the boot; None: it is not there, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _read(path: Path) -> Writer | None:
    """The writer that a file describes; None: the file is gone, or was not written to its end."""
    try:
        return Writer(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _touched(path: Path) -> float | None:
    """When a file was touched last; None: it is gone. The file is opened so that NFS asks its server, not its cache."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None
