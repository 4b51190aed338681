"""A run that ends because a disk is full says which file or folder it was at, and the key that moves it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray

from megarl.cluster import RayFailed, WorkerFailed

FULL = (errno.ENOSPC, errno.EDQUOT)
SHARED_MEMORY = "/dev/shm"
# As Python says it of a rank's file: "[Errno 28] No space left on device: '/data/run/x'"; libraries leave out a part of it.
_SAID = re.compile("|".join(re.escape(os.strerror(number)) for number in FULL), re.IGNORECASE)
_FILE = re.compile(r"'(/[^']+)'")


@contextmanager
def naming_keys(folders: Mapping[str, str | Path]) -> Iterator[None]:
    """Add to errors of a full disk, of this process and of ranks, what makes room.

    Args:
        folders: where the run writes, by the key that says so.

    Raises:
        OSError: names the file or folder.
        WorkerFailed, RayFailed: theirs, with a line more.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        place = error.filename or str(_fullest(folders))
        raise OSError(error.errno, f"{os.strerror(error.errno)}; {advice(place, folders)}", place) from error
    except (WorkerFailed, RayFailed) as failure:
        message = failure.message if isinstance(failure, WorkerFailed) else str(failure)
        if _SAID.search(message):
            found = _FILE.search(message)
            place = found[1] if found else str(_fullest(folders))
            failure.args = (f"{failure}\n{place}: no space left; {advice(place, folders)}",)
        raise
    except (
        ray.exceptions.OutOfDiskError
    ) as error:  # Ray had no memory for an object, and no room for it in its folder
        place = tempfile.gettempdir()
        raise OSError(
            errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; {advice(place, folders)}", place
        ) from error


def advice(place: str, folders: Mapping[str, str | Path]) -> str:
    """What to do about a full disk at `place`."""
    path = Path(place).absolute()
    keys = [key for key, folder in folders.items() if path.is_relative_to(Path(folder).absolute())]
    if keys:  # the one that moves most comes first
        keys.sort(key=lambda key: len(Path(folders[key]).absolute().parts))
        return f"set {' or '.join(keys)} to a folder on a disk with more room, or make room there"
    if path.is_relative_to(SHARED_MEMORY):
        return "give the machine or the container more shared memory (docker run --shm-size)"
    return f"make room there{', where Ray and others have temporary files' if _is_temporary(path) else ''}"


def _is_temporary(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in ("/tmp", tempfile.gettempdir()))


def _fullest(folders: Mapping[str, str | Path]) -> Path:
    """Of all disks that a run writes to, where the least is left: for errors that do not name a file."""
    places = [*map(Path, folders.values()), Path("/tmp"), Path(tempfile.gettempdir()), Path(SHARED_MEMORY)]
    return min((place for place in places if place.exists()), key=lambda place: shutil.disk_usage(place).free)
