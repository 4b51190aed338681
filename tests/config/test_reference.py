"""docs/config.md is what the schema says."""

import re
from pathlib import Path

from megarl.cli.main import main
from megarl.config import EvalConfig, RMConfig, SFTConfig, TrainConfig
from megarl.config.reference import reference
from megarl.config.schema.options import section_type, table_type, walk

PAGE = Path(__file__).resolve().parents[2] / "docs/config.md"


def test_the_page_is_that_of_this_schema(capsys) -> None:
    """If it is not: megarl config --reference > docs/config.md"""
    assert main(["config", "--reference"]) == 0
    assert capsys.readouterr().out == PAGE.read_text()


def test_every_key_has_a_row_or_stands_in_a_section_that_refers_to_one() -> None:
    page = reference()
    rows = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    shared = dict(re.findall(r"^### `([^`]+)`\n\n.*\n\nThe keys of `([^`]+)`\.$", page, re.MULTILINE))
    assert shared["critic.optim"] == "actor_rollout_ref.actor.optim"
    for schema in (TrainConfig, SFTConfig, RMConfig, EvalConfig):
        for key, _, kind in walk(schema):
            if section_type(kind) is not None or table_type(kind) is not None:
                continue
            there = [
                key,
                *(
                    f"{new}{key.removeprefix(old)}"
                    for old, new in shared.items()
                    if key.startswith(f"{old}.")
                ),
            ]
            assert any(name in rows for name in there), key


def test_a_row_has_type_default_valid_values_and_meaning() -> None:
    page = reference()
    assert "| `data.train_batch_size` | an integer | required | Prompts a step. Valid: ≥ 1. |" in page
    assert (
        "| `trainer.val_before_train` | true or false | `false` | Validate before the first step. |" in page
    )
    assert "| `algorithm.lam` | a number | `1.0` |" in page and "Valid: ≥ 0 and ≤ 1." in page
    assert "| `--rollout-batch-size` | data.train_batch_size=N, prompts a step |" in page
