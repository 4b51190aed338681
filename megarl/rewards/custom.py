"""The user's own reward function, loaded from a .py file."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megarl.util.plugins import import_file

# (data_source, solution_str, ground_truth, extra_info) by keyword, and prompt_str if it has such a parameter
# -> a number, or a dict with one under "score"; or a coroutine of that.
RewardFunction = Callable[..., Any]
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(
    path: str, name: str = "compute_score", kwargs: Mapping[str, Any] | None = None
) -> RewardFunction:
    """The function `name` of the file `path`; it is called with the four arguments of `_ARGUMENTS` by keyword, and
    with `prompt_str` if it has such a parameter, and is given `kwargs` besides. It may be async.

    ValueError, with the config key and what was found: no such file, not a .py file, a file that fails while it
    is imported, no such name in it, a name that is not callable, a function that does not take these arguments.
    """
    module = import_file(path, "custom_reward_function.path")
    if not hasattr(module, name):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(
            f"custom_reward_function.name={name!r}: {path} has no such function; "
            f"it defines {', '.join(functions) if functions else 'none'}"
        )
    function = getattr(module, name)
    _check_function(function, f"custom_reward_function.name={name!r} in {path}", kwargs or {})
    return functools.partial(function, **kwargs) if kwargs else function


def _check_function(function: object, where: str, kwargs: Mapping[str, Any]) -> None:
    if not callable(function):
        raise ValueError(f"{where}: a {type(function).__name__}, not a function")
    wanted = f"compute_score({', '.join([*_ARGUMENTS, *kwargs])})"
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # a builtin or extension type without a signature
        raise ValueError(f"{where}: its signature cannot be read; it must be {wanted}") from error
    try:
        prompt = {"prompt_str": ""} if "prompt_str" in signature.parameters else {}
        signature.bind(**dict.fromkeys(_ARGUMENTS), **prompt, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{where}: its signature is {signature}; it is called as {wanted} by keyword, which fails: {error}"
        ) from error
