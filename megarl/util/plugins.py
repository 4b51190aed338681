"""Registries of objects that the configuration names, and the user's own Python files that add to them.

A registry belongs to the room whose functions it holds (`megarl.algorithms.advantages` has that of estimators, for example);
a user adds to it by a decorator in a file that the recipe names in `plugins`.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Functions (or classes) by name. Filled by its decorator while modules are imported, read afterwards."""

    def __init__(self, kind: str, key: str) -> None:
        """`kind`: the word for an entry in messages; `key`: the configuration key that names one."""
        self.kind, self.key = kind, key
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make an entry known as `<key>=<name>`. ValueError: the name is taken."""

        def register(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already registered ({self._entries[name]})")
            self._entries[name] = entry
            return entry

        return register

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> T:
        """ValueError: unknown name; lists the known ones."""
        if name not in self._entries:
            raise ValueError(f"{self.key}={name!r} is unknown; known: {', '.join(self.names())}")
        return self._entries[name]


def load_plugins(paths: Sequence[str]) -> None:
    """Import the user's files, each once a process, so that their entries are registered.

    ValueError, with the key and the file: no such file, not a .py file, a file that fails while it is imported.
    """
    for path in paths:
        import_file(path, "plugins")


def import_file(path: str, key: str) -> ModuleType:
    """The module of a .py file; a file that was imported before is not imported again.

    Args:
        key: the key of the configuration that names the file, for messages.

    Raises:
        ValueError: no such file, not a .py file, a file that fails while it is imported.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}={path!r}: there is no such file")
    if file.suffix != ".py":
        raise ValueError(f"{key}={path!r}: not a .py file")
    file = file.resolve()
    # One module name per file, in sys.modules: dataclasses and pickle look a class's module up there.
    name = f"megarl_plugin_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(
            f"{key}={str(file)!r}: importing it failed with {type(error).__name__}: {error}"
        ) from error
    return module
