"""The fields of a JSON object from a user's file, each read as the type it must have: the one place where types are checked.

A field that is null counts as absent.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.util.files import read_json_object

_MOST = (1 << 31) - 1  # of any size or number in a model
_LARGEST = 1e30  # no number of a model is as large, and whatever is computed with it stays finite
_SHOWN = 80  # characters of a value in a message


class Fields:
    """`values` by key, read from `file` (as messages name it).

    The methods that take a field raise:
        ValueError: names file and field; it is missing and has no `default`, or has another type than the method returns.
    """

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self.values, self.file = dict(values), file

    @classmethod
    def read(cls, file: Path) -> "Fields":
        """The fields of a file. ValueError: names the file; it holds no JSON object. OSError: it cannot be read."""
        return cls(read_json_object(file), str(file))

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def require(self, *keys: str) -> None:
        """Refuse an object without a value for each of `keys`, all missing ones at once."""
        missing = [key for key in keys if key not in self]
        if missing:
            raise ValueError(f"{self.file} lacks {', '.join(missing)}")

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        """An integer from `least` to `most`."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:  # a bool is an int, too
            upper = "on" if most == _MOST else f"to {most}"
            raise self._mistake(key, f"a whole number from {least} {upper}")
        return value

    def number(self, key: str, default: float | None = None, *, zero: bool = False) -> float:
        """A finite number above 0; with `zero` also 0."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 <= value < _LARGEST or (value == 0 and not zero):
            raise self._mistake(key, "a number from 0 on" if zero else "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._mistake(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._mistake(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts; empty without the field."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._mistake(key, "a list of texts")
        return value

    def object(self, key: str) -> "Fields":
        """An object within this one; an empty one without the field."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self._mistake(key, "an object")
        return Fields(value, f"{self.file}: {key}")

    def _value(self, key: str, default: Any) -> Any:
        if key not in self and default is None:
            self.require(key)
        return self.values[key] if key in self else default

    def _mistake(self, key: str, right: str) -> ValueError:
        return ValueError(f"{self.file}: {key} must be {right}, found {short(self.values[key])}")


def load_hf_config(path: str) -> Fields:
    """The fields of `config.json` in a Hugging Face model folder.

    Raises:
        ValueError: no such folder or file, or it holds no JSON object.
    """
    folder = Path(path).expanduser()
    file = folder / "config.json"
    if not folder.is_dir():
        raise ValueError(f"model path {path!r} is not a folder; a Hugging Face model folder is needed")
    if not file.is_file():
        raise ValueError(f"model folder {path!r} has no config.json")
    return Fields.read(file)


def short(value: Any) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
