"""How many tokens a micro-batch may have, by the memory of GPUs: the formulas of `megarl plan memory`."""

from __future__ import annotations

from dataclasses import replace

from megarl.config import TrainConfig, TuningConfig, resolve
from megarl.config.loading.hub import fetch_models
from megarl.plan.inputs import PlanInputs
from megarl.plan.supervised import plan_of

MULTIPLES = (16, 8, 4, 2)  # of what a micro-batch must hold, that are tried
MOST_TOKENS = 65536  # more than fills a GPU makes it no faster


def fitting_tokens(config: TrainConfig | TuningConfig, least: int, limit: int) -> int:
    """The greatest of `MULTIPLES` of what a micro-batch must hold with which what the models hold and work on fits; else just that.

    Args:
        config: unresolved, accepted by `preflight`.
        least: tokens that a micro-batch must hold. limit: bytes of a GPU.
    """
    full = fetch_models(resolve(config), weights=False)
    inputs = PlanInputs.read(full)
    for multiple in MULTIPLES:
        tokens = multiple * least
        if tokens <= MOST_TOKENS and taken(config, inputs, tokens, limit) <= limit:
            return tokens
    return least


def taken(config: TrainConfig | TuningConfig, inputs: PlanInputs, tokens: int, limit: int) -> int:
    """Bytes of the fullest device in the phases of the models, if micro-batches have so many tokens, and of what is beside them."""
    if isinstance(config, TrainConfig):
        policy = config.actor_rollout_ref
        actor = replace(policy.actor, use_dynamic_bsz=True, ppo_max_token_len_per_gpu=tokens)
        config = replace(config, actor_rollout_ref=replace(policy, actor=actor))
    else:
        config = replace(config, max_token_len_per_gpu=tokens)
    plan = plan_of(resolve(config), inputs, limit)
    phases = (phase for phase in plan.phases if phase not in ("sync", "generate"))
    return max(map(plan.fullest, phases)) + plan.reserve
