"""What may be sampled how, and the section multi_turn."""

import pytest

from megarl.config import check_config
from megarl.config.checks.sampling import NEUTRAL_SAMPLING
from megarl.config.schema.sections import RolloutConfig, SamplingConfig
from tests.config.conftest import lines_of

ROLLOUT = "actor_rollout_ref.rollout"
OTHERS = {
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
}


def test_what_leaves_the_distribution_as_it_is_are_the_defaults():
    assert set(OTHERS) == set(NEUTRAL_SAMPLING)
    for name, value in NEUTRAL_SAMPLING.items():
        assert getattr(RolloutConfig(), name) == getattr(SamplingConfig(), name) == value


@pytest.mark.parametrize(("name", "value"), OTHERS.items())
def test_training_samples_from_the_policy_as_it_is(train, evaluation, name, value):
    (line,) = lines_of(lambda: check_config(train(f"{ROLLOUT}.{name}={value}")))
    assert line.startswith(f"{ROLLOUT}.{name}={value}: training rollouts must sample from ")
    assert f"(rollout.val_kwargs.{name} may be set)" in line
    reason = "not of the cut one" if name in ("top_p", "top_k", "min_p") else "know of no penalty"
    assert reason in line
    check_config(train(f"{ROLLOUT}.val_kwargs.{name}={value}"))
    check_config(evaluation(f"rollout.val_kwargs.{name}={value}"))
    (line,) = lines_of(lambda: check_config(evaluation(f"rollout.{name}={value}")))
    assert line.endswith(f"evaluation reads rollout.val_kwargs.{name}")


def test_penalties_stay_within_what_the_engine_takes(train):
    lines = lines_of(
        lambda: check_config(
            train(
                f"{ROLLOUT}.val_kwargs.repetition_penalty=2.5",
                f"{ROLLOUT}.val_kwargs.frequency_penalty=-3",
                f"{ROLLOUT}.val_kwargs.min_p=1.5",
                f"{ROLLOUT}.stop_token_ids=[5,-1]",
            )
        )
    )
    assert len(lines) == 4 and f"{ROLLOUT}.stop_token_ids=[5, -1]: token ids are not negative" in lines


def test_an_environment_is_named(train, evaluation, tmp_path):
    check_config(train(f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=calculator"))
    check_config(evaluation("rollout.multi_turn.enable=true", "rollout.multi_turn.environment=calculator"))
    (line,) = lines_of(lambda: check_config(train(f"{ROLLOUT}.multi_turn.enable=true")))
    assert line.startswith(f"{ROLLOUT}.multi_turn.environment is required with")
    unknown = ["rollout.multi_turn.enable=true", "rollout.multi_turn.environment=calculater"]
    (line,) = lines_of(lambda: check_config(evaluation(*unknown)))
    assert line.startswith("rollout.multi_turn.environment='calculater' is unknown; megarl has calculator")
    slow = [f"{ROLLOUT}.multi_turn.enable=true", f"{ROLLOUT}.multi_turn.environment=calculator"]
    (line,) = lines_of(lambda: check_config(train(*slow, f"{ROLLOUT}.multi_turn.step_timeout=600")))
    assert "step_timeout=600 must be less than" in line
    (tmp_path / "mine.py").write_text("")
    check_config(evaluation(*unknown, f"plugins=[{tmp_path}/mine.py]"))  # it may be that file's


def test_keys_of_turns_that_there_are_not_are_refused(train):
    config = train(f"{ROLLOUT}.multi_turn.max_user_turns=2", f"{ROLLOUT}.multi_turn.options={{role: user}}")
    (line,) = lines_of(lambda: check_config(config))
    for name in ("max_user_turns", "options"):
        assert f"{ROLLOUT}.multi_turn.{name}" in line
    assert f"without {ROLLOUT}.multi_turn.enable=true" in line


def test_free_options_arrive_as_they_were_written(train):
    config = train(f"{ROLLOUT}.multi_turn.options={{role: user, tries: [1, 2], deep: {{a: 0.5}}}}")
    found = config.actor_rollout_ref.rollout.multi_turn.options
    assert found == {"role": "user", "tries": [1, 2], "deep": {"a": 0.5}}
