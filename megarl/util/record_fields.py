"""Fields of another package's data classes: names, types and allowed values, read from its source files without importing it.

An import of SGLang or Megatron-core takes seconds and gigabytes, which a check of a configuration must not.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RecordField:
    """A field of a data class.

    Attributes:
        kind: its annotation.
        choices: the values that it may have; empty: any of its type.
    """

    kind: ast.expr
    choices: tuple[Any, ...] = ()

    @property
    def type_text(self) -> str:
        """The type as its source has it."""
        return ast.unparse(self.kind)

    def takes(self, value: Any) -> bool:
        """Whether a value as YAML gives it (null, true, numbers, text, lists, mappings) is of the type, and one of the choices."""
        return _fits(self.kind, value) and (not self.choices or value is None or value in self.choices)


def package_folder(name: str) -> Path | None:
    """The folder of a top-level package, found without importing it; None: it is not installed."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def read_fields(
    files: Iterable[Path], classes: tuple[str, ...] | None = None, lists: Path | None = None
) -> dict[str, RecordField]:
    """The public fields of the classes in `files`.

    An annotation `A[type, Arg(choices=...)]`, as SGLang (0.5.21) has them, is a type and its choices.

    Args:
        classes: whose fields; None: those of all classes.
        lists: a file with lists of choices that are named there.
    """
    named = _lists(lists) if lists is not None else {}
    found: dict[str, RecordField] = {}
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        found[line.target.id] = _field(line.annotation, named)
    return {name: field for name, field in found.items() if not name.startswith("_")}


def _lists(file: Path) -> dict[str, tuple[Any, ...]]:
    found = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = _literals(node.value, {})
    return found


def _field(annotation: ast.expr, named: Mapping[str, tuple[Any, ...]]) -> RecordField:
    is_annotated = isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in (
        "A",
        "Annotated",
    )
    if not is_annotated:
        return RecordField(annotation)
    assert isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)
    kind, *rest = annotation.slice.elts
    for call in rest:
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            if keyword.arg == "choices":
                return RecordField(kind, _literals(keyword.value, named))
    return RecordField(kind)


def _literals(node: ast.expr, named: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """The values of a list of literals, or of one that has a name; empty: it is computed."""
    if isinstance(node, ast.Name):
        return named.get(node.id, ())
    if isinstance(node, ast.List | ast.Tuple | ast.Set) and all(
        isinstance(item, ast.Constant) for item in node.elts
    ):
        return tuple(item.value for item in node.elts if isinstance(item, ast.Constant))
    return ()


_PLAIN: dict[str, type] = {
    "bool": bool,
    "str": str,
    "dict": dict,
    "Dict": dict,
    "list": list,
    "List": list,
    "tuple": list,
    "Tuple": list,
}
_ITEMS = ("list", "List", "tuple", "Tuple", "set", "Set")


def _fits(kind: ast.expr, value: Any) -> bool:
    """Whether a YAML value is of a type; none is of a type such as a function's."""
    if isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.BitOr):
        return _fits(kind.left, value) or _fits(kind.right, value)
    if isinstance(kind, ast.Constant):  # None, or a type in quotes
        if isinstance(kind.value, str):
            return _fits(ast.parse(kind.value, mode="eval").body, value)
        return kind.value is None and value is None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(kind, ast.Name):
        if kind.id == "int":
            return number and isinstance(value, int)
        return (kind.id == "float" and number) or (kind.id in _PLAIN and isinstance(value, _PLAIN[kind.id]))
    if not isinstance(kind, ast.Subscript):
        return False
    outer = ast.unparse(kind.value)
    inner = list(kind.slice.elts) if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    if outer in ("Optional", "Union"):
        return (outer == "Optional" and value is None) or any(_fits(part, value) for part in inner)
    if outer == "Literal":
        return any(isinstance(part, ast.Constant) and part.value == value for part in inner)
    if outer in _ITEMS:
        return isinstance(value, list) and all(_fits(inner[0], item) for item in value)
    return outer in ("dict", "Dict", "Mapping") and isinstance(value, dict)
