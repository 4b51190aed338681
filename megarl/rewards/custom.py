"""The user's own reward function, loaded from a .py file."""

import hashlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from megarl.rewards.registry import RewardFunction

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(path: str, name: str = "compute_score") -> RewardFunction:
    """The function `name` of the file `path`; it is called with the four arguments of `_ARGUMENTS` by keyword.

    ValueError, with the config key and what was found: no such file, not a .py file, a file that fails while it
    is imported, no such name in it, a name that is not callable or is async, a function that does not take these
    arguments.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"custom_reward_function.path={path!r}: there is no such file")
    if file.suffix != ".py":
        raise ValueError(f"custom_reward_function.path={path!r}: not a .py file")
    module = _import_file(file.resolve())
    if not hasattr(module, name):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(
            f"custom_reward_function.name={name!r}: {file} has no such function; "
            f"it defines {', '.join(functions) if functions else 'none'}"
        )
    function = getattr(module, name)
    _check_function(function, f"custom_reward_function.name={name!r} in {file}")
    return function


def _import_file(file: Path) -> ModuleType:
    # One module name per file, in sys.modules: dataclasses and pickle look a class's module up there.
    module_name = f"megarl_custom_reward_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(
            f"custom_reward_function.path={str(file)!r}: importing it failed with {type(error).__name__}: {error}"
        ) from error
    return module


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
