"""Shared by the scripts that run Triton kernels' cases (`python -m tests.megatron.interpreted_head interpret`, with TRITON_INTERPRET=1, or `...
compile`): they print {case: result} as JSON.

Each script has its own process: Triton reads the variable when it is imported, and other packages would notice that Triton is there.
"""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any
from unittest import mock

from megarl.shadow.device import PACKAGES


def print_cases(
    interpreted: Sequence[Callable[[], Any]],
    compiled: Callable[[], Any] | None = None,
    around: AbstractContextManager[Any] | None = None,
    seldom: Sequence[Callable[[], Any]] = (),
) -> None:
    """Run the interpreted cases whose names follow in the command (none: all), or `compiled`.

    Args:
        around: the context in which interpreted cases run.
        seldom: interpreted cases that run only where they are named.
    """
    sys.path.insert(0, str(PACKAGES))
    import triton

    how, *names = sys.argv[1:]
    if how == "compile":
        assert compiled is not None
        # The key of Triton's cache would need all of Triton's files to be read, and nothing is cached here.
        with mock.patch("triton.runtime.cache.triton_key", lambda: ""):
            print(json.dumps(compiled()))
        return
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 has to be set"
    spare_the_interpreter()
    with around or nullcontext():
        chosen = (
            [case for case in (*interpreted, *seldom) if case.__name__ in names] if names else interpreted
        )
        print(json.dumps({case.__name__: case() for case in chosen}))


def spare_the_interpreter() -> None:
    """Spare Triton's interpreter (3.7.1) work that it repeats in every call to the same effect, nearly half of its time: each function that a kernel
    calls replaces all functions of Triton's language, though the kernel's launch has replaced them; and each value's type is looked up in a new
    dictionary of all types.
    """
    from triton import language
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    @functools.cache
    def languages(function: Callable[..., Any]) -> list[ModuleType]:
        return [
            value for value in function.__globals__.values() if value is language or value is language.core
        ]

    def replace_once(function: Callable[..., Any]) -> Any:
        if any(language.core.is_builtin(module.load) for module in languages(function)):
            return replace(function)
        return interpreter._LangPatchScope()

    look_up, of_types = interpreter._get_np_dtype, {}

    def look_up_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in of_types:
            of_types[name] = look_up(dtype)
        return of_types[name]

    interpreter._patch_lang, interpreter._get_np_dtype = replace_once, look_up_once
