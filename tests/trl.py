"""Functions of TRL's trainers, taken from their sources: importing the trainers takes packages that are not installed."""

import ast
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch


@cache
def trl_function(file: str, name: str) -> Callable[..., Any]:
    """The function or method `name` of a file of TRL's package; it may use only torch and functions of the same file."""
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(Path(folder, file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    wanted = [functions[found] for found in {name, "log1mexp"} & functions.keys()]
    for node in wanted:
        node.decorator_list = []
    found: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    exec(compile(ast.Module(wanted, []), file, "exec"), found)
    return found[name]
