"""The user's own reward function, loaded from a .py file."""

import inspect

from megarl.plugins import import_file
from megarl.rewards.registry import RewardFunction

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(path: str, name: str = "compute_score") -> RewardFunction:
    """The function `name` of the file `path`; it is called with the four arguments of `_ARGUMENTS` by keyword.

    ValueError, with the config key and what was found: no such file, not a .py file, a file that fails while it
    is imported, no such name in it, a name that is not callable or is async, a function that does not take these
    arguments.
    """
    module = import_file(path, "custom_reward_function.path")
    if not hasattr(module, name):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(
            f"custom_reward_function.name={name!r}: {path} has no such function; "
            f"it defines {', '.join(functions) if functions else 'none'}"
        )
    function = getattr(module, name)
    _check_function(function, f"custom_reward_function.name={name!r} in {path}")
    return function


def _check_function(function: object, where: str) -> None:
    if not callable(function):
        raise ValueError(f"{where}: a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{where}: an async function; it must be a plain one")
    wanted = f"compute_score({', '.join(_ARGUMENTS)})"
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # a builtin or extension type without a signature
        raise ValueError(f"{where}: its signature cannot be read; it must be {wanted}") from error
    try:
        signature.bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise ValueError(
            f"{where}: its signature is {signature}; it is called as {wanted} by keyword, which fails: {error}"
        ) from error
