"""Checks of where scores come from: rules, the judge, the reward model and its tokenizer and micro-batches."""

import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks.values import registered_problems
from megarl.config.schema.commands import EvalConfig, TrainConfig
from megarl.config.schema.rewards import RULES, JudgeConfig, RewardModelConfig

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


def reward_model_problems(config: TrainConfig) -> Iterator[str]:
    """Of a resolved configuration; its layout and its pool are checked with those of the other models."""
    reward = config.reward_model
    if not reward.enable:
        return
    if reward.model.path is None:
        yield "reward_model.model.path is required with reward_model.enable=true: the folder of the model that scores"
    yield from _score_problems(config)
    yield from _tokenizer_problems(config)
    yield from _micro_batch_problems(reward, config)


def _score_problems(config: TrainConfig) -> Iterator[str]:
    reward = config.reward_model
    if reward.weight == 0:
        yield "reward_model.weight=0: the model's scores would count nothing; set reward_model.enable=false instead"
    rules = {
        "custom_reward_function.path": config.custom_reward_function.path,
        "reward.rule": config.reward.rule,
        "reward.gsm8k_rule_reward": config.reward.gsm8k_rule_reward or None,
    }
    for key, value in rules.items():
        if reward.rule_weight == 0 and value is not None:
            yield (
                f"{key}={value}: its scores would count nothing beside the reward model's; give "
                "reward_model.rule_weight, or leave it out"
            )


def _tokenizer_problems(config: TrainConfig) -> Iterator[str]:
    if config.reward_model.model.input_tokenizer is not None and not config.data.return_raw_input_ids:
        yield (
            "reward_model.model.input_tokenizer needs data.return_raw_input_ids=true: the chat is rendered anew with "
            "the reward model's template, from the messages of the prompt"
        )
    if (
        config.reward_model.model.input_tokenizer is not None
        and config.actor_rollout_ref.rollout.multi_turn.enable
    ):
        yield (
            "reward_model.model.input_tokenizer with actor_rollout_ref.rollout.multi_turn.enable=true: the turns of a "
            "trajectory cannot be rendered anew; a reward model with the policy's tokenizer and template is needed"
        )


def _micro_batch_problems(reward: RewardModelConfig, config: TrainConfig) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    tokens, trajectories = reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu
    inherited = (tokens, trajectories) == (
        actor.ppo_max_token_len_per_gpu,
        actor.ppo_micro_batch_size_per_gpu,
    )
    if tokens is not None and trajectories is not None and not inherited:  # else it is the actor's problem
        yield (
            "reward_model.max_token_len_per_gpu and reward_model.micro_batch_size_per_gpu are both set "
            f"({tokens} tokens, {trajectories} trajectories); give one of them"
        )
    elif tokens is not None and reward.max_length is not None and tokens < reward.max_length:
        longest = config.data.max_prompt_length + config.data.max_response_length
        if inherited and reward.max_length == longest:
            return  # the actor's problem, too
        yield (
            f"reward_model.max_token_len_per_gpu={tokens} is less than reward_model.max_length={reward.max_length}: "
            "a long chat would not fit"
        )
