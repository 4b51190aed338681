"""Which command a recipe is of, for what takes the recipes of several."""

from collections.abc import Sequence
from pathlib import Path

from megarl.config.loading.document import Tree, merge, parse_override, read_file
from megarl.config.loading.recipes import run_by
from megarl.config.schema.commands import TrainConfig
from megarl.config.schema.options import field_types, section_type
from megarl.config.schema.supervised import DPOConfig, RMConfig, SFTConfig

TRAINING = {"train": TrainConfig, "sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig}
"""The commands that train a model, each with the class of its recipes."""


def recipe_command(recipe: str, overrides: Sequence[str]) -> str:
    """The command (of `TRAINING`) whose recipe this is: the one that knows most of its keys; where several know as many, the one
    that the file's first comment says (`Run: megarl sft ...`).

    Raises:
        ValueError: a missing file or text that is not YAML; nothing says which of several commands it is.
    """
    tree = read_file(Path(recipe))
    for override in overrides:
        tree = merge(tree, parse_override(override))
    unknown = {name: _unknown(tree, schema) for name, schema in TRAINING.items()}
    best = [name for name, number in unknown.items() if number == min(unknown.values())]
    if len(best) == 1:
        return best[0]
    said = run_by(Path(recipe))
    if said in best:
        return said
    raise ValueError(
        f"{recipe} may be a recipe of `megarl {'`, `megarl '.join(best)}`: its keys are theirs alike; say which with "
        f"--command, or in the file's first comment (# Run: megarl {best[0]} ...)"
    )


def _unknown(tree: Tree, schema: type, depth: int = 2) -> int:
    """Keys and sections down to `depth` that the schema does not have."""
    kinds, number = field_types(schema), 0
    for name, value in tree.items():
        if name not in kinds:
            number += 1
        elif depth > 1 and isinstance(value, dict) and (inner := section_type(kinds[name])) is not None:
            number += _unknown(value, inner, depth - 1)
    return number
