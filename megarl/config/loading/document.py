"""YAML files and overrides as one tree that remembers where each value was written.

YAML here is its version 1.2 (as in JSON): only `true` and `false` are booleans, `1e-6` is a number, dates are
text. A key that stands twice in a mapping is an error; so is everything that YAML itself refuses.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.loading.recipes import PREFIX, meant_recipe, recipe_path
from megarl.util.yaml_loader import SafeLoader

BASE_KEY = "base"
UNRESOLVED = object()  # the value of an entry that has been reported already


@dataclass(frozen=True)
class Entry:
    """A value that is no mapping: null, a scalar, or a list of entries.

    `text` is how a scalar was written, `where` the file and line, or the override.
    """

    value: Any
    text: str
    where: str


Tree = dict[str, "Tree | Entry"]


_BOOL, _INT, _FLOAT, _NULL, _MERGE, _STR = (
    f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null", "merge", "str")
)
# Plain scalars that are not text: tag, pattern, characters that they begin with.
_PATTERNS = (
    (_BOOL, r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    (_INT, r"[-+]?[0-9][0-9_]*", tuple("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        tuple("-+0123456789."),
    ),
    (_NULL, r"~|null|Null|NULL|", ("~", "n", "N", "")),
    (_MERGE, r"<<", ("<",)),
)
# As PyYAML has them: first character -> [(tag, pattern)].
_RESOLVERS = {
    character: [
        (tag, re.compile(rf"(?:{pattern})\Z")) for tag, pattern, first in _PATTERNS if character in first
    ]
    for *_, characters in _PATTERNS
    for character in characters
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS


class _FastLoader(SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS


def _decimal(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """An integer; version 1.1's octal 010 and sixties 1:30 do not exist here."""
    return int(loader.construct_scalar(node).replace("_", ""))


for _loader in (_Loader, _FastLoader):
    _loader.add_constructor(_INT, _decimal)


class YamlDumper(yaml.SafeDumper):
    """Writes values so that `read_file` reads them back as the same (texts that look like numbers are quoted)."""

    yaml_implicit_resolvers = _RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal lists out instead of referring from one to the other."""
        return True


def read_file(path: Path, _chain: tuple[Path, ...] = ()) -> Tree:
    """The tree of a YAML file, merged over the tree of the file that its key `base` names (relative to the file).

    Either may be `recipe:NAME`, one that comes with megarl.

    Raises:
        ValueError: no such file, not YAML, a key twice, bases in a circle.
    """
    given, path = path.expanduser(), recipe_path(path.expanduser())
    if path.resolve() in _chain:
        circle = " -> ".join(str(link) for link in (*_chain, path.resolve()))
        raise ValueError(f"the configuration's base files form a circle: {circle}")
    if not path.is_file():
        named_by = f" (the base of {_chain[-1]})" if _chain else ""
        raise ValueError(
            f"configuration file {given}{named_by} does not exist (working directory {Path.cwd()}){meant_recipe(given)}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"configuration file {given} is no UTF-8 text: {error}") from None
    tree = parse(text, str(given), with_lines=True)
    if isinstance(tree, Entry):
        if tree.value is not None:
            raise ValueError(f"configuration file {given} must hold a mapping of keys, found {tree.text!r}")
        tree = {}
    base = tree.pop(BASE_KEY, None)
    if base is None:
        return tree
    if not isinstance(base, Entry) or not isinstance(base.value, str):
        raise ValueError(f"configuration file {given}: the key base must be the path of one file")
    below = Path(base.value).expanduser()
    if not base.value.startswith(PREFIX):
        below = path.parent / below
    return merge(read_file(below, (*_chain, path.resolve())), tree)


def parse(text: str, where: str, *, with_lines: bool = False) -> Tree | Entry:
    """One YAML document as a tree; with_lines adds the line number to `where`. ValueError as `read_file`."""
    try:
        return _parse(_FastLoader, text, where, with_lines)
    except yaml.YAMLError:
        pass  # the other parser's messages are better
    try:
        return _parse(_Loader, text, where, with_lines)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if with_lines and mark else ""
        raise ValueError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {error}") from None


def _parse(
    loader_of: Callable[[str], yaml.SafeLoader], text: str, where: str, with_lines: bool
) -> Tree | Entry:
    loader = loader_of(text)
    node = loader.get_single_node()
    if node is None:
        return Entry(None, "", where)
    _refuse_doubles(node, "", {})
    return _convert(loader, node, where, with_lines)


def _convert(loader: yaml.SafeLoader, node: yaml.Node, where: str, with_lines: bool) -> Tree | Entry:
    here = f"{where} line {node.start_mark.line + 1}" if with_lines else where
    if isinstance(node, yaml.ScalarNode):
        return Entry(loader.construct_object(node), node.value, here)
    if isinstance(node, yaml.SequenceNode):
        return _list_entry([_convert(loader, item, where, with_lines) for item in node.value], here)
    assert isinstance(node, yaml.MappingNode)
    loader.flatten_mapping(node)  # merge keys: `<<: *anchor`
    return {_key_name(key): _convert(loader, value, where, with_lines) for key, value in node.value}


def _list_entry(items: list["Tree | Entry"], where: str) -> Entry:
    # No key holds a list of mappings, so a mapping in a list needs no entries of its own.
    return Entry(
        [item if isinstance(item, Entry) else Entry(plain(item), "", where) for item in items], "", where
    )


def _key_name(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.MarkedYAMLError(problem="a key must be a name", problem_mark=node.start_mark)
    return node.value


def _refuse_doubles(node: yaml.Node, prefix: str, seen: dict[int, bool]) -> None:
    """Refuse keys that stand twice in one mapping, and nodes that contain themselves.

    Before merge keys are resolved, since a key beside `<<` rightly replaces the one that comes with it.
    `seen`: id of each node met -> whether its inside has been checked to the end.
    """
    if isinstance(node, yaml.ScalarNode) or seen.get(id(node), False):
        return
    if id(node) in seen:
        raise yaml.MarkedYAMLError(
            problem="an alias inside of what it stands for", problem_mark=node.start_mark
        )
    seen[id(node)] = False
    lines: dict[str, int] = {}
    for pair in node.value:
        if isinstance(node, yaml.SequenceNode):
            _refuse_doubles(pair, f"{prefix}[].", seen)
            continue
        key, value = pair
        name, line = _key_name(key), key.start_mark.line + 1
        if name in lines and key.tag != _MERGE:
            problem = f"the key {prefix}{name} stands there twice, first on line {lines[name]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        lines[name] = line
        _refuse_doubles(value, prefix if key.tag == _MERGE else f"{prefix}{name}.", seen)
    seen[id(node)] = True


def merge(below: Tree, above: Tree) -> Tree:
    """`above` over `below`: mappings are merged, everything else is replaced."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = merge(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def parse_override(text: str) -> Tree:
    """The tree of `a.b.c=value`; the value is YAML, so `null`, `[1, 2]` and `{x: 1}` mean what they say.

    Hydra's `+key` and `++key` (add; add or replace) are `key`: keys are known here, so nothing is added.

    Raises:
        ValueError: no `=`, an empty part in the key, no value, a value that is not YAML.
    """
    where = f"override {text!r}"
    key, equals, value = text.partition("=")
    key = re.sub(r"^\s*\+{1,2}", "", key)
    names = key.strip().split(".")
    if key.startswith("~"):
        raise ValueError(
            f"{where}: keys are not deleted; write {key.lstrip('~')}=null, or the value that it should have"
        )
    if not equals:
        raise ValueError(f"{where}: an override is written key=value")
    if not all(names):
        raise ValueError(f"{where}: {key!r} is not a dotted key")
    if not value.strip():
        raise ValueError(f"{where}: no value; write {key}=null for none or {key}='\"\"' for an empty text")
    tree = parse(value, where)
    for name in reversed(names):
        tree = {name: tree}
    assert isinstance(tree, dict)
    return tree


def entries(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """(dotted key, entry) of every value in a tree."""
    for name, value in tree.items():
        if isinstance(value, Entry):
            yield f"{prefix}{name}", value
        else:
            yield from entries(value, f"{prefix}{name}.")


def plain(tree: Tree | Entry) -> Any:
    """The tree as plain dicts, lists and scalars."""
    if isinstance(tree, Entry):
        return [plain(item) for item in tree.value] if isinstance(tree.value, list) else tree.value
    return {name: plain(value) for name, value in tree.items()}


def interpolate(tree: Tree, defaults: Callable[[], dict[str, Any]], problems: list[str]) -> Tree:
    """Replace OmegaConf's interpolations, such as `${trainer.seed}`, in the values of a tree.

    Args:
        defaults: returns the plain values that interpolations find where the tree has none.
        problems: gets a line for each interpolation that cannot be resolved; its value becomes `UNRESOLVED`.
    """
    if "${" not in str(plain(tree)):
        return tree
    try:
        known = OmegaConf.create(merge(defaults(), plain(tree)))
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None)
        problems.append(f"{key}: the interpolation is not valid: {_first_line(error)}")
        return tree
    return {name: _resolve(item, (name,), known, problems) for name, item in tree.items()}


def _resolve(value: Tree | Entry, path: tuple[str, ...], known: Any, problems: list[str]) -> Tree | Entry:
    if isinstance(value, dict):
        return {name: _resolve(item, (*path, name), known, problems) for name, item in value.items()}
    if "${" not in str(plain(value)):
        return value
    key = ".".join(path)
    try:
        found = OmegaConf.select(known, key, throw_on_missing=True)
        found = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except OmegaConfBaseException as error:
        problems.append(f"{value.where}: {key}={plain(value)}: {_first_line(error)}")
        return Entry(UNRESOLVED, "", value.where)
    return from_plain(found, value.where)


def from_plain(value: Any, where: str) -> Tree | Entry:
    """A tree of plain values. Texts are read as YAML scalars: an interpolated one may spell a number."""
    if isinstance(value, dict):
        return {str(name): from_plain(item, where) for name, item in value.items()}
    if isinstance(value, list):
        return _list_entry([from_plain(item, where) for item in value], where)
    if isinstance(value, str):
        tag = _Loader("").resolve(yaml.ScalarNode, value, (True, False))
        if tag not in (_STR, _MERGE, _NULL):
            return parse(value, where)
    return Entry(value, "" if value is None else str(value), where)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
