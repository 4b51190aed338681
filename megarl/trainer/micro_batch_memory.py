"""How many tokens a micro-batch may have, by the memory of GPUs: the formulas of `megarl plan memory`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megarl.config import TrainConfig, TuningConfig, resolve
from megarl.config.hub import fetch_models
from megarl.memory.model import StageBytes, model_bytes
from megarl.models import read_model_config
from megarl.trainer.memory_plan import PlanInputs, plan_memory
from megarl.trainer.model_uses import tuning_use

MULTIPLES = (16, 8, 4, 2)  # of what a micro-batch must hold, that are tried
MOST_TOKENS = 65536  # more than fills a GPU makes it no faster
RESERVE = (
    6 << 30
)  # bytes of a GPU that are left to what `megarl.memory.reserve` lists: as much as two models and an engine take


def fitting_tokens(config: TrainConfig | TuningConfig, least: int, limit: int) -> int:
    """The greatest of `MULTIPLES` of what a micro-batch must hold with which what the models hold and work on fits; else just that.

    Args:
        config: unresolved, accepted by `preflight`.
        least: tokens that a micro-batch must hold. limit: bytes of a GPU.
    """
    full = fetch_models(resolve(config), weights=False)
    peak = _training_peak(config, full, limit) if isinstance(full, TrainConfig) else _tuning_peak(full)
    for multiple in MULTIPLES:
        tokens = multiple * least
        if tokens <= MOST_TOKENS and peak(tokens) + RESERVE <= limit:
            return tokens
    return least


def _training_peak(config: TrainConfig, full: TrainConfig, limit: int) -> Callable[[int], int]:
    """Bytes of the fullest device in the phases of the models, by tokens of a micro-batch."""
    critic, reward = full.critic, full.reward_model
    inputs = PlanInputs(
        read_model_config(full.actor_rollout_ref.model.path),
        None if critic is None else read_model_config(critic.model.path),
        read_model_config(reward.model.path) if reward.enable else None,
    )

    def peak(tokens: int) -> int:
        policy = config.actor_rollout_ref
        actor = replace(policy.actor, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=tokens)
        sized = resolve(replace(config, actor_rollout_ref=replace(policy, actor=actor)))
        plan = plan_memory(sized, inputs, limit, RESERVE)
        return max(plan.fullest(phase) for phase in plan.phases if phase not in ("sync", "generate"))

    return peak


def _tuning_peak(config: TuningConfig) -> Callable[[int], int]:
    use = tuning_use(config, PlanInputs(read_model_config(config.model.path)))
    return lambda tokens: max(map(_held, model_bytes(replace(use, tokens=tokens, evaluated=tokens))))


def _held(stage: StageBytes) -> int:
    held = stage.held
    return held.weights + held.adapters + held.gradients + held.optimizer + stage.kept + stage.working
