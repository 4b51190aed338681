"""What a user should know of a configuration that is right: keys that were given and have no effect in it, and why, and
what is missing from it that such runs usually have."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megarl.config.resolve import megatron_sections, needs_reference
from megarl.config.schema.commands import POLICY, ActorConfig, CriticConfig, EvalConfig, TrainConfig
from megarl.config.schema.supervised import RMConfig, SFTConfig, TuningConfig


def notes(config: TrainConfig | TuningConfig | EvalConfig, given: Collection[str]) -> list[str]:
    """A line for each key that was given in vain, or that is missed.

    Args:
        config: unresolved, accepted by `check_config`.
        given: the dotted keys that the recipe (but not its base) and its overrides give.
    """
    if isinstance(config, TuningConfig):
        return list(_unused_tuning(config, given))
    if not isinstance(config, TrainConfig):
        return []
    return [
        *_overruled_sizes(config),
        *_large_micro_batches(config),
        *_unused_reference(config, given),
        *_unused_algorithm(config, given),
        *_uncorrected(config),
    ]


def said_here(origins: Mapping[str, str], recipe: str | Path | None) -> list[str]:
    """The keys that were given by overrides or by the recipe itself, not by the files that it names as its base.

    Args:
        origins: those of `load_with_origins`.
    """
    return [key for key, where in origins.items() if where.startswith(("override ", f"{recipe} line "))]


def _overruled_sizes(config: TrainConfig) -> Iterator[str]:
    """Sizes of micro-batches that use_dynamic_bsz overrules."""
    shared = config.actor_rollout_ref.actor.use_dynamic_bsz
    for key, section in megatron_sections(config).items():
        if key == "reward_model":  # it has no such switch
            continue
        prefix, first = ("log_prob_", "log_prob_") if key == f"{POLICY}.ref" else ("", "ppo_")
        tokens, trajectories = f"{first}max_token_len_per_gpu", f"{first}micro_batch_size_per_gpu"
        own = getattr(section, f"{prefix}use_dynamic_bsz")
        dynamic = shared if own is None else own
        unused = {True: trajectories, False: tokens, None: None}[dynamic]
        if unused is None or getattr(section, unused) is None:
            continue
        place = f"{POLICY}.actor.use_dynamic_bsz" if own is None else f"{key}.{prefix}use_dynamic_bsz"
        size = (
            f"by tokens, at most {key}.{tokens}"
            if dynamic
            else f"by trajectories, at most {key}.{trajectories}"
        )
        yield f"{key}.{unused}={getattr(section, unused)} is not used: {place}={str(dynamic).lower()} cuts micro-batches {size}"


def _large_micro_batches(config: TrainConfig) -> Iterator[str]:
    for key, section in megatron_sections(config).items():
        if not isinstance(section, ActorConfig | CriticConfig):
            continue
        micro = section.ppo_micro_batch_size_per_gpu
        mini = section.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
        size = mini * config.actor_rollout_ref.rollout.n
        if micro is not None and not section.use_dynamic_bsz and micro > size:
            yield (
                f"{key}.ppo_micro_batch_size_per_gpu={micro} is never reached: a mini-batch has {size} trajectories in all"
            )


def _unused_reference(config: TrainConfig, given: Collection[str]) -> Iterator[str]:
    if needs_reference(config):
        if not config.algorithm.use_kl_in_reward:
            yield from _in_vain(
                given, ("algorithm.kl_ctrl.", "algorithm.kl_penalty"), "algorithm.use_kl_in_reward=true"
            )
        return
    yield from _in_vain(
        given,
        (f"{POLICY}.ref.", "algorithm.kl_ctrl.", "algorithm.kl_penalty", f"{POLICY}.actor.kl_loss_"),
        f"algorithm.use_kl_in_reward=true (KL in the reward) or {POLICY}.actor.use_kl_loss=true (in the loss)",
    )


def _unused_algorithm(config: TrainConfig, given: Collection[str]) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type != "adaptive":
        keys = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")
        yield from _in_vain(given, keys, "algorithm.kl_ctrl.type=adaptive")
    if algorithm.adv_estimator == "grpo":
        yield from _in_vain(given, ("algorithm.lam", "algorithm.gamma"), "algorithm.adv_estimator=gae")
    if not config.reward_model.enable:
        yield from _in_vain(
            [key for key in given if not key.startswith("reward_model.overlong_buffer")],
            (
                "reward_model.model.",
                "reward_model.micro_batch",
                "reward_model.max_",
                "reward_model.megatron.",
            ),
            "reward_model.enable=true",
        )


def _uncorrected(config: TrainConfig) -> Iterator[str]:
    """Trajectories of older weights, and nothing that corrects for it."""
    correction = config.algorithm.rollout_correction
    corrected = correction.bypass_mode or correction.rollout_is or correction.rollout_rs
    if config.trainer.mode != "sync" and not corrected:
        yield (
            f"trainer.mode={config.trainer.mode} trains on responses of older weights, for which nothing corrects: set "
            "algorithm.rollout_correction.rollout_is=token (truncated importance weights), rollout_rs (masks), or bypass_mode=true "
            "(ratios to the engine's log-probs)"
        )


def _unused_tuning(config: TuningConfig, given: Collection[str]) -> Iterator[str]:
    if config.trainer.early_stop_patience is None:
        yield from _in_vain(given, ("trainer.early_stop_min_delta",), "trainer.early_stop_patience")
    if isinstance(config, SFTConfig):
        if config.data.text_key is None:
            yield from _in_vain(given, ("data.append_eos",), "data.text_key")
        elif "data.prompt_key" in given:
            yield "data.prompt_key has no effect with data.text_key, which reads plain text"
        if config.data.text_key is None and config.data.response_key is None:
            yield from _in_vain(given, ("data.prompt_key",), "data.response_key")
    if isinstance(config, RMConfig) and config.data.normalize == "none":
        yield from _in_vain(given, ("data.normalize_max_samples",), "data.normalize")


def _in_vain(given: Collection[str], prefixes: tuple[str, ...], needed: str) -> Iterator[str]:
    found = [key for key in given if key.startswith(prefixes)]
    if found:
        verb = "has" if len(found) == 1 else "have"
        yield f"{', '.join(found)} {verb} no effect without {needed}"
