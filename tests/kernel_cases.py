"""What the scripts of Triton kernels' cases have in common (`python -m tests.megatron.interpreted_head interpret`, with TRITON_INTERPRET=1, or `...
compile`): they print {case: what was found} as JSON.

Each has a process of its own: Triton reads the variable when it is imported, and other packages would notice that it can be imported.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megarl.shadow.device import PACKAGES


def print_cases(
    interpreted: Sequence[Callable[[], Any]],
    compiled: Callable[[], Any] | None = None,
    around: AbstractContextManager[Any] | None = None,
    seldom: Sequence[Callable[[], Any]] = (),
) -> None:
    """Run the interpreted cases whose names follow in the command (none: all), or `compiled`.

    Args:
        around: in which interpreted cases run.
        seldom: interpreted cases that run where they are named.
    """
    sys.path.insert(0, str(PACKAGES))
    import triton

    how, *names = sys.argv[1:]
    if how == "compile":
        assert compiled is not None
        print(json.dumps(compiled()))
        return
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 has to be set"
    with around or nullcontext():
        chosen = (
            [case for case in (*interpreted, *seldom) if case.__name__ in names] if names else interpreted
        )
        print(json.dumps({case.__name__: case() for case in chosen}))
