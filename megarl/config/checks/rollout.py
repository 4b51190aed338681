"""Checks of how responses are generated: sampling, dynamic sampling, overlong responses, environments, validation sets."""

import re
from collections.abc import Iterator
from dataclasses import fields

from megarl.config.checks.data import file_problems
from megarl.config.checks.values import registered_problems
from megarl.config.schema.commands import EvalConfig, RolloutConfig, TrainConfig
from megarl.config.schema.rollout import ENVIRONMENTS, MultiTurnConfig

_ROLLOUT = "actor_rollout_ref.rollout"
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]*")  # part of a file's name, and of a metric's


def rollout_problems(config: TrainConfig) -> Iterator[str]:
    """Of a resolved configuration."""
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
    buffer = config.reward_model.overlong_buffer
    if buffer.enable and buffer.len > data.max_response_length:
        yield (
            f"reward_model.overlong_buffer.len={buffer.len} is more than data.max_response_length="
            f"{data.max_response_length}"
        )


def _lora_sync_problems(config: TrainConfig) -> Iterator[str]:
    """Of rollout.lora_sync, beside what the model says to it."""
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


def val_set_problems(config: TrainConfig | EvalConfig, data_files: bool) -> Iterator[str]:
    """The sets of data.val_sets."""
    for name, val_set in (config.data.val_sets or {}).items():
        if not _SET_NAME.fullmatch(name):
            yield (
                f"data.val_sets has {name!r}: a name may have letters, digits and _ . @ -, because files are named after "
                "the set"
            )
        if val_set.max_samples == 0:
            yield f"data.val_sets.{name}.max_samples=0: it must be -1 (all) or at least 1"
        if data_files:
            yield from file_problems(f"data.val_sets.{name}.files", val_set.files)
    if isinstance(config, EvalConfig) and config.data.val_files is None and not config.data.val_sets:
        yield "data.val_files is required (or data.val_sets): the problems to answer"


_TRAINING = "actor_rollout_ref.rollout"
# Those that change the distribution that is sampled from, and the values with which they do not.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
_CUTS = ("top_p", "top_k", "min_p")


def training_sampling_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Of training rollouts: what is sampled from must be what the trainer's log-probs are of."""
    for name, allowed in NEUTRAL_SAMPLING.items():
        value = getattr(rollout, name)
        if value == allowed:
            continue
        if name in _CUTS:
            reason = (
                f"training rollouts must sample from all tokens ({name}={allowed:g}), because the trainer's log-probs "
                "are those of the whole distribution, not of the cut one"
            )
        else:
            reason = (
                f"training rollouts must sample from the policy as it is ({name}={allowed:g}), because the trainer's "
                "log-probs know of no penalty"
            )
        yield f"{_TRAINING}.{name}={value}: {reason} (rollout.val_kwargs.{name} may be set)"


def evaluation_sampling_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Of evaluation, which samples as val_kwargs says."""
    for name in ("n", "temperature", *NEUTRAL_SAMPLING):
        value = getattr(rollout, name)
        if value != getattr(RolloutConfig(), name):
            yield f"rollout.{name}={value} is of training rollouts; evaluation reads rollout.val_kwargs.{name}"


def multi_turn_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Of the section multi_turn, and of tokens that end a turn."""
    if isinstance(config, TrainConfig):
        rollout, prefix = config.actor_rollout_ref.rollout, _TRAINING
    else:
        rollout, prefix = config.rollout, "rollout"
    multi_turn = rollout.multi_turn
    if any(token < 0 for token in rollout.stop_token_ids):
        yield f"{prefix}.stop_token_ids={list(rollout.stop_token_ids)}: token ids are not negative"
    if not multi_turn.enable:
        given = [
            member.name
            for member in fields(MultiTurnConfig)
            if getattr(multi_turn, member.name) != member.default
        ]
        if given:
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
