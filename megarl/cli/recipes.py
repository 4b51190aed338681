"""`megarl recipes`: the list of those that come with megarl, or one of them."""

import argparse

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl.config.loading.recipes import PREFIX, recipe_path, recipes


def run(options: argparse.Namespace) -> None:
    """Print the list, or the file of `options.name`.

    Raises:
        ValueError: there is no recipe of that name; says which is the nearest.
    """
    if options.name is None:
        table = Table("megarl", "recipe", "what", box=SIMPLE_HEAD, pad_edge=False)
        table.columns[1].no_wrap = True
        for recipe in recipes():
            table.add_row(recipe.command, f"{PREFIX}{recipe.name}", escape(recipe.text))
        Console().print(table)
        return
    path = recipe_path(f"{PREFIX}{options.name.removeprefix(PREFIX)}")
    file = path / "config.json" if path.is_dir() else path
    print(file.read_text(encoding="utf-8"), end="")
