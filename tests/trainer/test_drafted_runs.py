"""A run with speculative decoding equals the run without."""

from pathlib import Path

import pytest

from tests.fixtures.runs import MEASURED, TWO_STEPS, on, steps, succeed
from tests.rollout.invariance import needs_compiler, needs_invariance

DRAFTED = "rollout/accept_length"


@pytest.mark.slow
@needs_compiler
@needs_invariance
def test_a_run_with_drafted_tokens_has_the_numbers_of_one_without(ppo_run, tmp_path: Path) -> None:
    """All metrics are equal bit by bit, except the accept length."""
    task, folder, _ = ppo_run
    found = tmp_path / "run"
    given = [key for key in TWO_STEPS if "profile" not in key]
    succeed("train", *given, "actor_rollout_ref.rollout.speculative.algorithm=ngram", *on(task, found))
    for one, other in zip(steps(folder), steps(found), strict=True):
        length = other.pop(DRAFTED)
        assert 1.0 <= length <= 4.0 and DRAFTED not in one
        names = {name for name in one.keys() | other.keys() if not name.startswith(MEASURED)} - {"time"}
        assert {"actor/grad_norm", "critic/score/mean", "response_length/mean"} <= names
        assert {name: other.get(name) for name in names} == {name: one.get(name) for name in names}
