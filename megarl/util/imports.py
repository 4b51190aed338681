"""Imports in less time: what a process imports at its start is never garbage, and need not be searched for it.

torch, transformers and SGLang make a million objects when they are imported. Python's garbage collector goes through all of them again and
again meanwhile, and would at times for as long as the process lives: `python benchmarks/imports.py` measures it.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Garbage is not collected meanwhile, and what there is at the end is left out of all later collections.

    For imports alone: cycles among other objects that end meanwhile would be left out, too, and never be freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
