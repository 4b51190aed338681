"""Checks of runs that only generate, or only train."""

import re
from pathlib import Path

import pytest

from megarl.config import check_config
from tests.config.conftest import lines_of

POLICY = "actor_rollout_ref"
ONLY = "trainer.rollout_only=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ONLY, "trainer.train_only=."], "trainer.rollout_only and trainer.train_only: give one of them"),
        ([ONLY, "trainer.test_freq=2"], "trainer.test_freq: with trainer.rollout_only nothing is validated"),
        (["trainer.train_only=.", "trainer.val_before_train=true"], "val_before_train: with trainer.train_only nothing"),
        ([ONLY, "trainer.save_freq=2"], "trainer.save_freq: with trainer.rollout_only no model changes"),
        ([ONLY, f"{POLICY}.model.lora.rank=4"], f"{POLICY}.model.lora.rank: trainer.rollout_only has no adapters"),
        (["trainer.train_only=nowhere"], "trainer.train_only=nowhere: there is no such folder"),
        (["trainer.on_nonfinite=ignore"], "trainer.on_nonfinite='ignore' is unknown; megarl has stop, skip"),
    ],
)  # fmt: skip
def test_violations(train, overrides: list[str], message: str) -> None:
    found = lines_of(lambda: check_config(train(*overrides)))
    assert any(re.search(re.escape(message), line) for line in found), found


def test_what_is_told_to_be_set_over_a_recipe_is_enough(train, tmp_path: Path) -> None:
    """Whatever the recipe has: all that generation alone does not do."""
    given = [ONLY, "trainer.test_freq=2", "trainer.val_before_train=true", "trainer.save_freq=2", "trainer.save_minutes=5",
             "trainer.best_metric=reward/mean", "trainer.max_run_minutes=9", "trainer.checkpoint_url=s3://bucket/run",
             f"trainer.resume_from_path={tmp_path}"]  # fmt: skip
    lines = lines_of(lambda: check_config(train(*given)))
    told = [match[1] for line in lines if (match := re.search(r"[Ss]et (trainer\.\w+=\S+)$", line))]
    assert len(told) == len(given) - 1, lines
    check_config(train(*given, *told))


def test_training_alone_needs_no_prompts(train, tmp_path: Path) -> None:
    missing = ("data.train_files=nowhere.parquet", "trainer.test_freq=-1")
    assert any("nowhere.parquet" in line for line in lines_of(lambda: check_config(train(*missing))))
    check_config(train(*missing, f"trainer.train_only={tmp_path}"))
