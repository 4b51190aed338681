"""Checks of where scores come from."""

import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks.algorithm import registered_problems
from megarl.config.schema.commands import EvalConfig, TrainConfig
from megarl.config.schema.rewards import RULES, JudgeConfig

_JUDGE = "llm_judge"


def reward_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Of a resolved configuration."""
    path, reward = config.custom_reward_function.path, config.reward
    if path is not None:
        if not Path(path).expanduser().is_file():
            yield f"custom_reward_function.path: the file {path} does not exist (working directory {Path.cwd()})"
        elif not path.endswith(".py"):
            yield f"custom_reward_function.path: {path} is no .py file"
    elif config.custom_reward_function.reward_kwargs:
        yield "custom_reward_function.reward_kwargs are for a function: custom_reward_function.path names its file"
    if reward.rule is not None:
        yield from registered_problems(config, "reward.rule", reward.rule, RULES)
    for_all_rows = {
        f"custom_reward_function.path={path!r}": path is not None,
        f"reward.rule={reward.rule!r}": reward.rule is not None,
        "reward.gsm8k_rule_reward=True": reward.gsm8k_rule_reward and reward.rule != "gsm8k",
    }
    given = [key for key, is_given in for_all_rows.items() if is_given]
    if len(given) > 1:
        yield f"{' and '.join(given)}: each says how all rows are scored; give one"
    if reward.rule == _JUDGE:
        yield from _judge_problems(reward.judge, reward.timeout)
    else:
        for name in ("base_url", "model", "api_key_env"):
            if getattr(reward.judge, name) is not None:
                yield f"reward.judge.{name} has no effect without reward.rule={_JUDGE!r}"


def _judge_problems(judge: JudgeConfig, timeout: float) -> Iterator[str]:
    for name in ("base_url", "model"):
        if getattr(judge, name) is None:
            yield f"reward.judge.{name} is required with reward.rule={_JUDGE!r}"
    if judge.base_url is not None and not judge.base_url.startswith(("http://", "https://")):
        yield f"reward.judge.base_url={judge.base_url!r} must begin with http:// or https://"
    if "{response}" not in judge.prompt:
        yield "reward.judge.prompt must contain {response}: the judge is to read it"
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as error:
        yield f"reward.judge.pattern={judge.pattern!r} is no regular expression: {error}"
    else:
        if groups < 1:
            yield f"reward.judge.pattern={judge.pattern!r} must have a group, such as (\\d+), which is the score"
    if judge.timeout >= timeout:
        yield (
            f"reward.judge.timeout={judge.timeout:g} must be less than reward.timeout={timeout:g}, which is for a request and "
            "all its retries"
        )
