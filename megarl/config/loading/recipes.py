"""Recipes that come with megarl: `recipe:NAME` stands for them wherever a recipe, a base, a model or a file is named.

A name is a path in the folder recipes/: "quickstart_ppo" is quickstart_ppo.yaml, "models/qwen2.5-7b" a folder with the
config.json of a model, "three_stages_rule.py" a file.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from megarl.util.packages import shipped

PREFIX = "recipe:"


@dataclass(frozen=True)
class Recipe:
    """A recipe that a command runs.

    Attributes:
        command: of megarl: train, sft, rm, dpo or eval.
        text: the first sentence of its first comment.
    """

    name: str
    command: str
    text: str


def recipe_path(path: str | Path) -> Path:
    """The file or folder that `recipe:NAME` stands for; any other path as it is.

    Raises:
        ValueError: there is none of that name; says which is the nearest.
    """
    name = str(path)
    if not name.startswith(PREFIX):
        return Path(path)
    name = name.removeprefix(PREFIX).removesuffix(".yaml")
    places = _places()
    if name not in places:
        raise ValueError(f"there is no {PREFIX}{name}{_nearest(name) or ': `megarl recipes` lists them'}")
    return places[name]


def shown(path: str | Path) -> str:
    """The inverse of `recipe_path`, for messages."""
    names = {place: name for name, place in _places().items()}
    return f"{PREFIX}{names[Path(path)]}" if Path(path) in names else str(path)


def meant_recipe(path: Path) -> str:
    """For a file that does not exist: `; did you mean recipe:NAME?`, or nothing."""
    return _nearest(path.name.removesuffix(".yaml"))


def recipes() -> list[Recipe]:
    """Recipes that a command runs, by name; not the bases of others."""
    return list(filter(None, (_read(name, place) for name, place in sorted(_places().items()))))


def _places() -> Mapping[str, Path]:
    """The path that each name stands for."""
    return _places_in(shipped() / "recipes")


@cache
def _places_in(root: Path) -> Mapping[str, Path]:
    """The same below `root`, listed once: a configuration asks for each path that it names."""
    return {str(path.relative_to(root)).removesuffix(".yaml"): path for path in _named(root)}


def _named(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        if path.suffix in (".yaml", ".py"):
            yield path
        elif path.name == "config.json":
            yield path.parent


def _nearest(name: str) -> str:
    near = get_close_matches(name, _places(), n=1, cutoff=0.6)
    return f"; did you mean {PREFIX}{near[0]}?" if near else ""


def run_by(path: Path) -> str | None:
    """The command that a recipe's first comment says it is run by (`# Run: megarl sft ...`); None: it says nothing."""
    return _command(_first_comment(recipe_path(path)))


def _first_comment(place: Path) -> str:
    comment = re.match(r"(?:#.*\n)*", place.read_text(encoding="utf-8"))
    assert comment is not None, "the pattern also matches an empty text"
    return " ".join(line.removeprefix("#").strip() for line in comment[0].splitlines())


def _command(words: str) -> str | None:
    command = re.search(r"Run: +megarl (\w+) ", words)
    return None if command is None else command[1]


def _read(name: str, place: Path) -> Recipe | None:
    """None: a file without a command in its first comment."""
    if place.suffix != ".yaml":
        return None
    words = _first_comment(place)
    command = _command(words)
    return Recipe(name, command, re.split(r"\. |\.$", words)[0]) if command is not None else None
