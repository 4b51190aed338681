"""Saves a checkpoint and is killed (SIGKILL) during the save, once for each moment; run as a script, in a process of its own.

    python -m tests.checkpoints.killed <folder> <what>

`what`: "next" saves step 3 where steps 1 and 2 exist and only the last step is kept; "again" saves step 3 where it exists already. For each moment
a child process works in a folder of its own, `<folder>/<number>`, and is killed before its operation of that number
that changes the file system (or flushes it). One line of JSON each: the number, the operation and the path's name.
"""

import builtins
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.checkpoints import CheckpointStore, Keep
from tests.checkpoints.shared import save

OPERATIONS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir", "utime", "open")


def prepare(root: Path, what: str) -> None:
    """Write the checkpoints that exist before the save."""
    keep = Keep(last=2) if what == "next" else Keep(last=1)
    with CheckpointStore(root, keep) as store:
        for step in {"next": (1, 2), "again": (3,)}[what]:
            save(store, step, attempt=1)


def work(root: Path, what: str) -> None:
    """The save that is killed."""
    with CheckpointStore(root, Keep(last=1), say=lambda line: None) as store:
        save(store, 3, attempt=2)
        store.mark_best(3)


def kill_before(number: int) -> None:
    """Wrap the functions that change the file system, such that this process is killed before the operation of that number."""
    count = [0]

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            writes = name != "open" or (len(args) > 1 and _writes(args[1]))
            if writes and count[0] == number:
                print(json.dumps({"number": number, "operation": name, "of": _name(args[0])}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            count[0] += writes
            return function(*args, **kwargs)

        return wrapped

    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))
    builtins.open = wrap("open", builtins.open)  # type: ignore[assignment]


def _writes(mode: str | int) -> bool:
    return "w" in mode if isinstance(mode, str) else bool(mode & os.O_CREAT)


def _name(target: Any) -> str:
    path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
    return os.path.basename(path)


def main(folder: Path, what: str) -> None:
    os.fsync = lambda handle: None  # a process's death needs no flush, and flushes take most of the time
    before = folder / "before"
    prepare(before, what)
    number, killed = 0, True
    while killed:
        root = folder / str(number)
        shutil.copytree(before, root)
        child = os.fork()
        if child == 0:
            kill_before(number)
            work(root, what)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        killed = status == signal.SIGKILL
        number += 1
    shutil.rmtree(root)  # the folder of the process that was not killed


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
