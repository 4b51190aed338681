"""Steps that need no GPU, for the tests of the code that runs steps."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from megarl.gpu_test.runner import Check


def passes(folder: Path) -> Iterator[Check]:
    yield Check("its folder", folder.is_dir(), figures={"tokens_per_s": 12.5})
    yield Check("a note", None, "seen")


def is_wrong(folder: Path) -> Iterator[Check]:
    yield Check("one", True)
    yield Check("two", False, "3, not 2")


def raises(folder: Path) -> Iterator[Check]:
    yield Check("before", True)
    raise RuntimeError("the card is on fire")


def dies(folder: Path) -> Iterator[Check]:
    yield Check("before", True)
    os.kill(os.getpid(), 11)


def hangs(folder: Path) -> Iterator[Check]:
    """Hangs with a child that would hang on, too."""
    child = subprocess.Popen(["sleep", "600"])
    yield Check("a child", True, figures={"pid": child.pid})
    time.sleep(600)


def says_nothing(folder: Path) -> Iterator[Check]:
    yield from ()


def ends_at_once(*arguments: object) -> None:
    """Takes the place of a sender."""
    os._exit(3)
