"""Checks of the timeline's size and of what is traced."""

import pytest

from megarl.config import check_config
from tests.config.conftest import lines_of


def test_what_is_traced_may_be_chosen(train) -> None:
    check_config(
        train(
            "trainer.total_training_steps=5", "trainer.profile_steps=[3, 5]", "trainer.profile_ranks=[0, 7]",
            "trainer.timeline_mb=0",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.profile_ranks=[1]"], "trainer.profile_ranks is of traces: give trainer.profile_steps"),
        (["trainer.profile_steps=[0]"], "trainer.profile_steps"),
        (["trainer.timeline_mb=-1"], "trainer.timeline_mb"),
    ],
)
def test_what_makes_no_sense_is_refused(train, overrides: list[str], message: str) -> None:
    lines = lines_of(lambda: check_config(train(*overrides)))
    assert any(line.startswith(message) for line in lines), lines
