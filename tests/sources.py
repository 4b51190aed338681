"""Imports, definitions and calls in the package's files, for the tests that look at all files: each file is parsed once in a process."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from megarl.util.memory import collection_paused

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megarl"


@dataclass(frozen=True)
class Call:
    """A call. `called`: the function, as source text; `given`: the values of arguments that are given by name."""

    line: int
    called: str
    given: Mapping[str | None, ast.expr]

    def given_text(self, name: str) -> str | None:
        """The source text of an argument; None: the argument is not given by name."""
        return ast.unparse(self.given[name]) if name in self.given else None


@dataclass(frozen=True)
class Source:
    """The contents of one file, including functions' bodies and code under TYPE_CHECKING.

    Attributes:
        imports: (line, dotted name) of everything that the file imports.
        taken: (line, module, names) of each `from module import names`, as the file has them.
        attributes: (name, attribute) of each `name.attribute`.
        functions: (name, lines) of each function that is not asynchronous.
    """

    imports: list[tuple[int, str]] = field(default_factory=list)
    taken: list[tuple[int, str, set[str]]] = field(default_factory=list)
    attributes: set[tuple[str, str]] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    functions: list[tuple[str, int]] = field(default_factory=list)


@cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def source_of(path: Path) -> Source:
    with collection_paused():  # a tree becomes garbage when this function ends, and is freed at once
        found, tree = Source(), ast.parse(path.read_text())
        package = path.relative_to(ROOT).with_suffix("").parts[:-1]
        for node in nodes(tree):
            if isinstance(node, ast.Import):
                found.imports.extend((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = [node.module] if node.module else []
                if node.level:
                    base = [*package[: len(package) - node.level + 1], *base]
                found.imports.extend((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
                found.taken.append((node.lineno, node.module or "", {alias.name for alias in node.names}))
            elif isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name):
                    found.attributes.add((node.value.id, node.attr))
            elif isinstance(node, ast.Call):
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                found.calls.append(Call(node.lineno, dotted(node.func), given))
            elif isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                found.functions.append((node.name, node.end_lineno - node.lineno + 1))
    return found


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, but in another order and faster."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                waiting.append(value)
            elif isinstance(value, list):
                waiting.extend(part for part in value if isinstance(part, ast.AST))


def dotted(function: ast.expr) -> str:
    """The source text of the called function; `ast.unparse` takes long."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        return f"{dotted(function.value)}.{function.attr}"
    return ast.unparse(function)
