"""Which command a recipe is of."""

from pathlib import Path

import pytest

from megarl.config.loading.recipe_command import TRAINING, recipe_command
from megarl.config.loading.recipes import recipes

ALIKE = "data: {train_files: x.parquet, max_length: 64, train_batch_size: 8}\nmodel: {path: model}\n"


@pytest.mark.parametrize("recipe", [each for each in recipes() if each.command in TRAINING])
def test_shipped_recipes(recipe) -> None:
    assert recipe_command(f"recipe:{recipe.name}", []) == recipe.command


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("data.text_key=text", "sft"),
        ("data.normalize=none", "rm"),
        ("model.head_init=normal", "rm"),
        ("dpo.beta=0.2", "dpo"),
    ],
)
def test_a_key_of_one_command_alone(tmp_path: Path, key: str, command: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ALIKE)
    assert recipe_command(str(recipe), [key]) == command


def test_a_misspelt_key_does_not_hide_the_command(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ALIKE)
    assert recipe_command(str(recipe), ["dpo.beta=0.2", "data.max_lenght=3"]) == "dpo"


def test_keys_that_several_commands_have_alike(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(ALIKE)
    with pytest.raises(
        ValueError, match=r"may be a recipe of `megarl sft`, `megarl rm`, `megarl dpo`.*--command"
    ):
        recipe_command(str(recipe), [])
    recipe.write_text(f"# A model of one's own.\n# Run: megarl rm {recipe}\n{ALIKE}")
    assert recipe_command(str(recipe), []) == "rm"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.yaml"):
        recipe_command(str(tmp_path / "nothing.yaml"), [])
