"""Checks of where scores come from, and the Scorer that a configuration describes."""

import re

import pytest

from megarl.config import check_config
from megarl.rewards.processes.scorer import make_scorer
from megarl.rewards.sample import Sample
from tests.config.conftest import lines_of

JUDGE = ("reward.rule=llm_judge", "reward.judge.base_url=http://h:1/v1", "reward.judge.model=m")


def problems(config) -> list[str]:
    return lines_of(lambda: check_config(config))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.rule=gsm"], "reward.rule='gsm' is unknown; megarl has gsm8k, gsm8k_flexible, math, .*; did you mean gsm8k"),
        (["reward.rule=math", "reward.gsm8k_rule_reward=true"], "reward.rule='math' and reward.gsm8k_rule_reward=True: each"),
        (["custom_reward_function.reward_kwargs={a: 1}"], "reward_kwargs are for a function: custom_reward_function.path"),
        (["reward.rule=llm_judge"], "reward.judge.base_url is required with reward.rule='llm_judge'"),
        (["reward.rule=llm_judge"], "reward.judge.model is required"),
        (["reward.judge.model=m"], "reward.judge.model has no effect without reward.rule='llm_judge'"),
        ([*JUDGE, "reward.judge.base_url=localhost:1"], "base_url='localhost:1' must begin with http:// or https://"),
        ([*JUDGE, "reward.judge.prompt=Good?"], r"reward.judge.prompt must contain \{response\}"),
        ([*JUDGE, "reward.judge.pattern=(x"], "reward.judge.pattern='\\(x' is no regular expression: missing"),
        ([*JUDGE, "reward.judge.pattern=x"], "reward.judge.pattern='x' must have a group"),
        ([*JUDGE, "reward.judge.timeout=120"], "reward.judge.timeout=120 must be less than reward.timeout=120"),
        (["reward.code.isolation=docker"], "reward.code.isolation='docker' is unknown"),
    ],
)  # fmt: skip
def test_violations(train, evaluation, overrides, message):
    for config in (train(*overrides), evaluation(*overrides)):
        found = problems(config)
        assert any(re.search(message, line) for line in found), found


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward.gsm8k_rule_reward=true"],  # as an article prints it
        ["reward.rule=gsm8k", "reward.gsm8k_rule_reward=true"],
        ["reward.rule=code", "reward.code.isolation=seccomp"],
        JUDGE,
    ],
)
def test_what_is_accepted(train, evaluation, overrides):
    check_config(train(*overrides))
    check_config(evaluation(*overrides))


def test_two_ways_to_score_all_rows_are_refused(train, tmp_path):
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 1.0")
    config = train(f"custom_reward_function.path={tmp_path}/reward.py", "reward.rule=math")
    assert any(
        re.search("path=.*reward.py' and reward.rule='math': each says", line) for line in problems(config)
    )


def test_a_rule_for_all_rows(train):
    with make_scorer(train("reward.gsm8k_rule_reward=true", "reward.num_workers=1")) as scorer:
        scorer.submit([Sample("a", "a source without a rule", "", "#### 7", "7", None)])
        assert scorer.collect()["a"].score == 1.0


def test_a_function_of_ones_own_with_arguments(evaluation, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def mine(data_source, solution_str, ground_truth, extra_info, *, bonus):\n    return len(solution_str) + bonus"
    )
    config = evaluation(
        f"custom_reward_function.path={tmp_path}/reward.py",
        "custom_reward_function.name=mine",
        "custom_reward_function.reward_kwargs={bonus: 10}",
        "reward.num_workers=1",
    )
    with make_scorer(config) as scorer:
        scorer.submit([Sample("a", "d", "", "four", "", None)])
        assert scorer.collect()["a"].score == 14.0


def test_the_key_of_the_judge_must_be_there(train, monkeypatch):
    monkeypatch.delenv("TEST_JUDGE_KEY", raising=False)
    config = train(*JUDGE, "reward.judge.api_key_env=TEST_JUDGE_KEY")
    with pytest.raises(ValueError, match="api_key_env='TEST_JUDGE_KEY': this variable is not set"):
        make_scorer(config)
    monkeypatch.setenv("TEST_JUDGE_KEY", "secret")
    make_scorer(config).close()
