"""What Ray's servers say of errors goes into a file of the run, not between the lines that the run prints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray._private.worker


@contextmanager
def ray_words_in(path: Path) -> Iterator[None]:
    """Append them to `path` meanwhile, each with its time.

    A driver of Ray 2.60 has a thread that prints them to standard output, such as "A worker died or was killed while executing a
    task", whatever `log_to_driver` says, by this function of its module.
    """
    printed = ray._private.worker.print_to_stdstream

    def write(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{time.ctime()} {data['pid']}: {line.rstrip()}\n" for line in data["lines"])

    ray._private.worker.print_to_stdstream = write
    try:
        yield
    finally:
        ray._private.worker.print_to_stdstream = printed
