"""Failures with a remedy: a lost process, after which a run is restarted, and a full disk, which is reported with a key.

Guarantees:
- A run that is restarted from its last checkpoint ends with the numbers that it would have had undisturbed, as after any resume.
- An error of a full disk names the file or folder, and the key that moves it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import ray
from rich.console import Console

from megarl.checkpoints import steps_in
from megarl.checkpoints.manifest import folder_name
from megarl.cluster import ClusterSetup, RayFailed, WorkerFailed, WorkerLost
from megarl.config import TrainConfig, TuningConfig
from megarl.trainer.run.earlier_runs import CHECKPOINTS
from megarl.trainer.run.preemption import REQUEUE, Preemption

C = TypeVar("C", bound=TrainConfig | TuningConfig)


def with_restarts(
    config: C, train: Callable[[C, ClusterSetup | None], str], cluster_setup: ClusterSetup | None
) -> str:
    """Call `train(config, cluster_setup)`, again after each lost process, at most `trainer.max_restarts` times; returns its result.

    All processes of the lost run have ended before a restart. A rank that raises is not restarted: it would raise again. A restart has the
    time that is left of `trainer.max_run_minutes`.

    Raises:
        WorkerLost, RayFailed: no restart is left. Other exceptions of `train` are raised at once.
    """
    allowed, begun, minutes = config.trainer.max_restarts, time.monotonic(), config.trainer.max_run_minutes
    for number in range(allowed + 1):
        try:
            return train(config, cluster_setup)
        except (WorkerLost, RayFailed) as loss:
            if number == allowed:
                raise
            lines = [str(loss), f"starting again: {number + 1} of trainer.max_restarts={allowed}"]
        Console().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        config, cluster_setup = as_restarted(config), None  # they ended with the run's cluster
        if minutes is not None:
            left = max(minutes - (time.monotonic() - begun) / 60, 0.001)  # the key's values are over 0
            config = replace(config, trainer=replace(config.trainer, max_run_minutes=left))
    raise AssertionError("the last one returns or raises")


@contextmanager
def ending_after_signal(preemption: Preemption) -> Iterator[None]:
    """End with REQUEUE a run that was told to end and then loses a process: the sender of the signal restarts it, not this process.

    Raises:
        SystemExit: with REQUEUE, for a loss.
    """
    try:
        yield
    except (WorkerLost, RayFailed) as loss:
        if preemption.requested is None:
            raise
        text = f"{loss}\nending, to be started again: the run was told to end ({preemption.requested})"
        Console().print(text, markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(REQUEUE) from loss


def as_restarted(config: C) -> C:
    """The configuration of a run's restart, which continues from the run's own newest checkpoint if there is one.

    A run that began with an earlier step of its folder, and has saved none since, begins with that one again: its remote still has the later
    ones, which it has left.
    """
    root = Path(config.trainer.default_local_dir) / CHECKPOINTS
    steps, begun_with = steps_in(root), config.trainer.resume_from_path
    if not steps:
        return config
    if begun_with is not None and Path(begun_with).resolve() == (root / folder_name(steps[-1])).resolve():
        return config
    return replace(config, trainer=replace(config.trainer, resume_mode="auto", resume_from_path=None))


FULL = (errno.ENOSPC, errno.EDQUOT)
SHARED_MEMORY = "/dev/shm"
# Python's message for a rank's file is "[Errno 28] No space left on device: '/data/run/x'"; libraries leave out parts of it.
_SAID = re.compile("|".join(re.escape(os.strerror(number)) for number in FULL), re.IGNORECASE)
_FILE = re.compile(r"'(/[^']+)'")


@contextmanager
def naming_keys(folders: Mapping[str, str | Path]) -> Iterator[None]:
    """Add advice to errors of a full disk, of this process and of ranks.

    Args:
        folders: folders that the run writes to, by their configuration key.

    Raises:
        OSError: names the file or folder.
        WorkerFailed, RayFailed: the original error with another line.
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
    """Advice for a full disk at `place`."""
    path = Path(place).absolute()
    keys = [key for key, folder in folders.items() if path.is_relative_to(Path(folder).absolute())]
    if keys:  # the key of the outermost folder first
        keys.sort(key=lambda key: len(Path(folders[key]).absolute().parts))
        return f"set {' or '.join(keys)} to a folder on a disk with more room, or make room there"
    if path.is_relative_to(SHARED_MEMORY):
        return "give the machine or the container more shared memory (docker run --shm-size)"
    return f"make room there{', where Ray and others have temporary files' if _is_temporary(path) else ''}"


def _is_temporary(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in ("/tmp", tempfile.gettempdir()))


def _fullest(folders: Mapping[str, str | Path]) -> Path:
    """The folder with the least free space among those that a run writes to: for errors that name no file."""
    places = [*map(Path, folders.values()), Path("/tmp"), Path(tempfile.gettempdir()), Path(SHARED_MEMORY)]
    return min((place for place in places if place.exists()), key=lambda place: shutil.disk_usage(place).free)
