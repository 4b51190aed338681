"""Checks of how responses are generated and scored: sampling, environments, validation sets; rules, the judge, the reward model."""

import re
from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks.data import file_problems
from megarl.config.checks.values import given_keys, registered_problems
from megarl.config.resolve import full_kl_in_loss, full_kl_in_reward, leaves_tokens_out, top_k_in_loss
from megarl.config.schema.commands import EvalConfig, RolloutConfig, TrainConfig, rollout_section
from megarl.config.schema.rewards import RULES, JudgeConfig, RewardModelConfig
from megarl.config.schema.rollout import ENVIRONMENTS

_ROLLOUT = "actor_rollout_ref.rollout"
_JUDGE = "llm_judge"
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]*")  # part of a file's name, and of a metric's


def rollout_problems(config: TrainConfig) -> Iterator[str]:
    """Problems of adapters in syncs, dynamic sampling and the overlong buffer, in a resolved configuration."""
    yield from _lora_sync_problems(config)
    data, groups, n = config.data, config.algorithm.filter_groups, config.actor_rollout_ref.rollout.n
    if groups.enable and n < 2:
        yield (
            f"{_ROLLOUT}.n={n}: algorithm.filter_groups.enable=true drops prompts whose responses do not differ and "
            "needs at least 2"
        )
    if not groups.enable and data.gen_batch_size != data.train_batch_size:
        yield (
            f"data.gen_batch_size={data.gen_batch_size} is not data.train_batch_size={data.train_batch_size}: more (or "
            "fewer) prompts are generated for at a time only with algorithm.filter_groups.enable=true"
        )
    limit, size = groups.max_num_gen_batches, data.gen_batch_size
    assert size is not None, "resolved"
    if groups.enable and 0 < limit * size < data.train_batch_size:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches={limit} x data.gen_batch_size={size} is less than "
            f"data.train_batch_size={data.train_batch_size}: no step could be filled"
        )
    if groups.metric == "seq_final_reward":
        yield (
            "algorithm.filter_groups.metric='seq_final_reward': the KL that it contains is known only after the groups "
            "are chosen; use seq_reward"
        )
    yield from _recorded_experts_problems(config)
    buffer = config.reward_model.overlong_buffer
    if buffer.enable and buffer.len > data.max_response_length:
        yield (
            f"reward_model.overlong_buffer.len={buffer.len} is more than data.max_response_length="
            f"{data.max_response_length}"
        )


def _recorded_experts_problems(config: TrainConfig) -> Iterator[str]:
    """Engines that record experts have room for a pass of a known size.

    RoutedExpertsCapturer (SGLang 0.5.21) makes room for max(chunked_prefill_size, max_running_requests) tokens, and a pass with more ends
    the engine.
    """
    size = (config.actor_rollout_ref.rollout.engine_kwargs or {}).get("chunked_prefill_size")
    if config.actor_rollout_ref.actor.router_replay == "rollout" and isinstance(size, int) and size < 1:
        yield (
            f"{_ROLLOUT}.engine_kwargs.chunked_prefill_size={size} with actor_rollout_ref.actor.router_replay=rollout: SGLang (0.5.21) then has "
            f"room for the experts of max_num_seqs={config.actor_rollout_ref.rollout.max_num_seqs} tokens a pass, and prompts that are not cut "
            "have more; set it above 0 or leave it out, or use router_replay=trainer"
        )


ADAPTERS_OF_GROUPS = (
    "SGLang (0.5.21) serves adapters there with groups of a single device alone, and gathers the names of all requests' adapters over "
    "all devices before every step"
)


def attention_problems(key: str, rollout: RolloutConfig) -> Iterator[str]:
    """Problems of data parallel attention, whatever the model. `key`: of the section."""
    tp, groups = rollout.tensor_model_parallel_size, rollout.attention_data_parallel_size
    name = f"{key}.attention_data_parallel_size={groups}"
    if groups <= 1:
        if rollout.data_parallel_lm_head:
            yield f"{key}.data_parallel_lm_head=true is of several groups: give {key}.attention_data_parallel_size, or leave it out"
        return
    if tp % groups:
        yield f"{name} does not divide {key}.tensor_model_parallel_size={tp}: the groups of an engine are equal"
    if rollout.max_num_seqs < groups:
        yield f"{key}.max_num_seqs={rollout.max_num_seqs} is less than {name}: each group answers requests of its own"
    if rollout.lora_sync == "adapters":
        yield f"{key}.lora_sync=adapters beside {name}: {ADAPTERS_OF_GROUPS}; leave lora_sync out for merged weights"


def _lora_sync_problems(config: TrainConfig) -> Iterator[str]:
    """Problems of rollout.lora_sync, whatever the model."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.lora_sync is None:
        return
    key = f"{_ROLLOUT}.lora_sync={rollout.lora_sync}"
    if config.actor_rollout_ref.model.lora.rank == 0:
        yield f"{key}, but there are no adapters: give actor_rollout_ref.model.lora.rank, or leave it out"
    elif rollout.lora_sync == "adapters":
        if rollout.quantization is not None:
            yield f"{key} beside rollout.quantization={rollout.quantization}: float8 engines are sent merged weights"
        if rollout.sync_skip_unchanged:
            yield (
                f"{key} sends the weights once and all adapters each time; rollout.sync_skip_unchanged=true is of "
                "merged weights: leave one of them out"
            )


def speculative_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Problems of the section speculative, whatever the model and the devices."""
    prefix, rollout = rollout_section(config)
    speculative, key = rollout.speculative, f"{prefix}.speculative"
    if speculative.algorithm is None:
        if given := given_keys(speculative):
            yield f"{', '.join(f'{key}.{name}' for name in given)}: without {key}.algorithm no tokens are drafted"
        return
    algorithm, length = f"{key}.algorithm={speculative.algorithm}", speculative.accept_length
    if (speculative.draft_path is not None) != (speculative.algorithm == "eagle3"):
        wrong = "needs" if speculative.draft_path is None else "has no draft model: leave out"
        yield f"{algorithm} {wrong} {key}.draft_path, the folder of a draft model"
    if length is not None and length > speculative.num_draft_tokens + 1:
        yield (
            f"{key}.accept_length={length:g}: a pass gives at most {key}.num_draft_tokens + 1 = {speculative.num_draft_tokens + 1} tokens"
        )
    if isinstance(config, TrainConfig) and config.actor_rollout_ref.actor.router_replay == "rollout":
        yield (
            f"{algorithm} with actor_rollout_ref.actor.router_replay=rollout: SGLang records experts by place in the cache, has room for those "
            "of one token a request, and does not move them with the tokens that it accepts; use router_replay=trainer, or leave one out"
        )
    if rollout.attention_data_parallel_size > 1:
        yield (
            f"{algorithm} with {prefix}.attention_data_parallel_size={rollout.attention_data_parallel_size} has not been tried; leave out one "
            "of them"
        )
    penalties = [name for name in _PENALTIES if getattr(rollout.val_kwargs, name) != NEUTRAL_SAMPLING[name]]
    for name in penalties:
        yield (
            f"{prefix}.val_kwargs.{name}={getattr(rollout.val_kwargs, name):g} with {algorithm}: SGLang computes penalties once a pass, so that "
            "they would miss the tokens of the pass; leave one out"
        )


def val_set_problems(config: TrainConfig | EvalConfig, data_files: bool) -> Iterator[str]:
    """Problems of the sets of data.val_sets."""
    for name, val_set in (config.data.val_sets or {}).items():
        if not _SET_NAME.fullmatch(name):
            yield (
                f"data.val_sets has {name!r}: a name may have letters, digits and _ . @ -, because files are named after "
                "the set"
            )
        if data_files:
            yield from file_problems(f"data.val_sets.{name}.files", val_set.files)
    if isinstance(config, EvalConfig) and config.data.val_files is None and not config.data.val_sets:
        yield "data.val_files is required (or data.val_sets): the problems to answer"


# Keys that change the distribution that is sampled from, and the values with which they do not.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def training_sampling_problems(config: TrainConfig) -> Iterator[str]:
    """Training rollouts must sample from a distribution whose log-probs the trainer can compute: the policy's, or the policy's over kept tokens."""
    rollout = config.actor_rollout_ref.rollout
    for name in _PENALTIES:
        value, allowed = getattr(rollout, name), NEUTRAL_SAMPLING[name]
        if value != allowed:
            yield (
                f"{_ROLLOUT}.{name}={value}: training rollouts must sample from the policy as it is ({name}={allowed:g}), because the trainer's "
                f"log-probs know of no penalty (rollout.val_kwargs.{name} may be set)"
            )
    if rollout.top_k == 1:
        yield (
            f"{_ROLLOUT}.top_k=1: a token that is drawn from one has the log-prob 0 and no gradient, so that nothing would be learnt; "
            "set it to -1 (all) or at least 2"
        )
    if leaves_tokens_out(rollout):
        yield from kept_token_problems(config, f"{_ROLLOUT}.{_given_cuts(rollout)}")
        if rollout.speculative.algorithm is not None:
            yield (
                f"{_ROLLOUT}.{_given_cuts(rollout)} with {_ROLLOUT}.speculative.algorithm={rollout.speculative.algorithm}: SGLang does not return the "
                "tokens that drafted ones were drawn from, which log-probs are of; leave one of them out (rollout.val_kwargs may have them)"
            )


def _given_cuts(rollout: RolloutConfig) -> str:
    """The first key that leaves tokens out, with its value."""
    names = ("top_p", "top_k", "min_p")
    name = next(name for name in names if getattr(rollout, name) != NEUTRAL_SAMPLING[name])
    return f"{name}={getattr(rollout, name)}"


def kept_token_problems(config: TrainConfig, given: str) -> Iterator[str]:
    """Losses that do not fit trajectories whose tokens were drawn from a part of the vocabulary, as `given` says."""
    uses = {
        "actor_rollout_ref.actor.kl_loss_type": (full_kl_in_loss(config) or top_k_in_loss(config))
        and config.actor_rollout_ref.actor.kl_loss_type,
        "algorithm.kl_penalty": full_kl_in_reward(config) and config.algorithm.kl_penalty,
    }
    for key, value in uses.items():
        if value:
            yield (
                f"{given} with {key}={value}: the exact KL compares distributions over the same tokens, and log-probs are over the tokens that "
                "each token was drawn from; choose low_var_kl, which is estimated by the drawn token"
            )


def evaluation_sampling_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Keys of training rollouts in an evaluation, which samples as val_kwargs says."""
    for name in given_keys(rollout, ("n", "temperature", *NEUTRAL_SAMPLING)):
        value = getattr(rollout, name)
        yield f"rollout.{name}={value} is of training rollouts; evaluation reads rollout.val_kwargs.{name}"


def multi_turn_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Problems of the section multi_turn, and of tokens that end a turn."""
    prefix, rollout = rollout_section(config)
    multi_turn = rollout.multi_turn
    if any(token < 0 for token in rollout.stop_token_ids):
        yield f"{prefix}.stop_token_ids={list(rollout.stop_token_ids)}: token ids are not negative"
    if not multi_turn.enable:
        if given := given_keys(multi_turn):
            names = ", ".join(f"{prefix}.multi_turn.{name}" for name in given)
            yield f"{names}: without {prefix}.multi_turn.enable=true there are no further turns"
        return
    if multi_turn.step_timeout >= rollout.request_timeout:
        yield (
            f"{prefix}.multi_turn.step_timeout={multi_turn.step_timeout:g} must be less than {prefix}.request_timeout="
            f"{rollout.request_timeout:g}, after which an engine that answers nothing counts as broken"
        )
    if multi_turn.environment is None:
        yield (
            f"{prefix}.multi_turn.environment is required with {prefix}.multi_turn.enable=true; megarl has "
            f"{', '.join(ENVIRONMENTS)}"
        )
    else:
        key = f"{prefix}.multi_turn.environment"
        yield from registered_problems(config, key, multi_turn.environment, ENVIRONMENTS)


def reward_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Problems of the reward function, the rules and the judge in a resolved configuration."""
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
        for name in given_keys(reward.judge, ("base_url", "model", "api_key_env")):
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
    """Problems of the reward model in a resolved configuration; its layout and its pool are checked with the other models'."""
    reward = config.reward_model
    if not reward.enable:
        return
    if reward.model.path is None:
        yield "reward_model.model.path is required with reward_model.enable=true: the folder of the model that scores"
    yield from _score_problems(config)
    yield from _tokenizer_problems(config)
    yield from _step_problems(config)
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


def _step_problems(config: TrainConfig) -> Iterator[str]:
    reward, key = config.reward_model, "reward_model.step_separator"
    if reward.step_separator is None:
        if reward.step_reward != "each":
            yield f"reward_model.step_reward={reward.step_reward} needs {key}: without it the model scores no steps"
        return
    if not reward.step_separator:
        yield f'{key}="": a response has no steps then; give the text that ends one, such as two line breaks'
    if config.actor_rollout_ref.rollout.multi_turn.enable:
        yield (
            f"{key} with actor_rollout_ref.rollout.multi_turn.enable=true: steps are those of one response; have the environment, or a "
            "reward function, score turns"
        )
    if reward.step_reward != "each":
        return
    if config.algorithm.adv_estimator == "gdpo":
        yield (
            f"{key} with algorithm.adv_estimator='gdpo', which compares named numbers and would not see the scores of steps; set "
            "reward_model.step_reward=min (product, last), or choose another estimator"
        )
    groups = config.algorithm.filter_groups
    if groups.enable and groups.metric in ("score", "seq_reward", "acc") and not reward.rule_weight:
        yield (
            f"algorithm.filter_groups.metric={groups.metric}: with {key} and without reward_model.rule_weight all scores are 0, since rewards "
            "are those of steps; set it to model, their sum"
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
