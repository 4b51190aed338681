"""The models of a recipe as plans need them: read once, then divided over ranks and into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from megarl.config import (
    CriticConfig,
    DPOConfig,
    MegatronConfig,
    OptimConfig,
    PoolConfig,
    RMConfig,
    TrainConfig,
    TuningConfig,
    check_config,
    load_config,
    needs_old_log_probs,
    needs_ref_log_probs,
    needs_reference,
    reference_in_actor,
    resolve,
)
from megarl.config.loading import TRAINING, recipe_command
from megarl.config.loading.hub import fetch_models
from megarl.config.schema.models import LoraConfig
from megarl.costs.flops import ModelFlops
from megarl.costs.model import ModelUse, StageBytes
from megarl.costs.tensors import StageTensors
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, read_model_config
from megarl.models.lora import adapted_weights
from megarl.models.shards import Shapes

C = TypeVar("C", bound=TrainConfig | TuningConfig)


@dataclass
class PlanInputs:
    """Facts and intermediate results shared by many plans of one recipe, which differ by layouts and nodes alone."""

    model: ModelConfig
    critic: ModelConfig | None = None
    reward: ModelConfig | None = None
    adapted: dict[tuple[str, LoraConfig], Shapes] = field(default_factory=dict)
    served: dict[object, int] = field(default_factory=dict)
    stages: dict[object, list[StageBytes]] = field(default_factory=dict)
    tables: dict[object, StageTensors] = field(default_factory=dict)
    flops: dict[tuple[str, str], ModelFlops] = field(default_factory=dict)

    @classmethod
    def read(cls, config: TrainConfig | TuningConfig) -> PlanInputs:
        """The facts of a resolved configuration's models, whose folders are here."""
        if not isinstance(config, TrainConfig):
            return cls(read_model_config(config.model.path))
        critic, reward = config.critic, config.reward_model
        return cls(
            read_model_config(config.actor_rollout_ref.model.path),
            None if critic is None else read_model_config(critic.model.path),
            read_model_config(reward.model.path) if reward.enable else None,
        )

    def weights(self, role: str, model: ModelConfig, lora: LoraConfig) -> Shapes | None:
        if not lora.rank:
            return None
        if (role, lora) not in self.adapted:
            self.adapted[role, lora] = adapted_weights(model, lora)
        return self.adapted[role, lora]


def read_inputs(recipe: str, overrides: list[str], check: bool = True) -> tuple[TrainConfig, PlanInputs]:
    """A recipe, resolved and (without the files of its data) checked, and the facts of its models."""
    return _read(TrainConfig, recipe, overrides, check)


def read_planned(
    recipe: str, overrides: list[str], command: str | None = None, check: bool = True
) -> tuple[TrainConfig | TuningConfig, PlanInputs]:
    """`read_inputs`, also of the recipes of `megarl sft`, `rm` and `dpo`.

    Args:
        command: the recipe's; None: the one that its keys belong to (`recipe_command`).

    Raises:
        ValueError: as `load_config` and `check_config`, and if nothing says which command it is of.
    """
    return _read(TRAINING[command or recipe_command(recipe, overrides)], recipe, overrides, check)


def _read(schema: type[C], recipe: str, overrides: list[str], check: bool) -> tuple[C, PlanInputs]:
    config = load_config(schema, recipe, overrides)
    config = check_config(config, data_files=False) if check else resolve(config)
    config = fetch_models(config, weights=False)
    return config, PlanInputs.read(config)


def precision(name: str | None) -> torch.dtype:
    """The type of weights for a key `dtype`, on GPUs."""
    return getattr(torch, name or "bfloat16")


def tuned_role(config: TuningConfig) -> str:
    """The one role of a command that fits a model to examples: the command's name."""
    return "rm" if isinstance(config, RMConfig) else "dpo" if isinstance(config, DPOConfig) else "sft"


def roles_of(config: TrainConfig | TuningConfig) -> list[str]:
    """The roles that have processes of their own."""
    if isinstance(config, TuningConfig):
        return [tuned_role(config)]
    critic, reference = config.critic, needs_reference(config) and not reference_in_actor(config)
    return [
        "actor",
        *(["critic"] if critic is not None and not critic.model.share_base else []),
        *(["ref"] if reference else []),
        *(["reward_model"] if config.reward_model.enable else []),
    ]


def model_use(config: TrainConfig | TuningConfig, inputs: PlanInputs, role: str) -> ModelUse:
    """The model of a role: actor, critic, ref or reward_model; sft, rm or dpo. `config`: resolved."""
    if isinstance(config, TuningConfig):
        assert role == tuned_role(config), role
        return tuning_use(config, inputs)
    return (
        _evaluated(config, inputs, role)
        if role in ("ref", "reward_model")
        else _trained(config, inputs, role)
    )


def _trained(config: TrainConfig, inputs: PlanInputs, role: str) -> ModelUse:
    policy = config.actor_rollout_ref
    if role == "actor":
        section, lora, model = policy.actor, policy.model.lora, inputs.model
        base_block = lora.blocks
    else:
        assert config.critic is not None
        section, lora, model = config.critic, config.critic.model.lora, inputs.critic or inputs.model
        base_block = policy.model.lora.blocks if config.critic.model.share_base else lora.blocks
    megatron, longest = section.megatron, _longest(config)
    tokens = _tokens(section.ppo_max_token_len_per_gpu, section.ppo_micro_batch_size_per_gpu, longest)
    evaluated = tokens if isinstance(section, CriticConfig) else _evaluated_by_actor(config, tokens)
    return ModelUse(
        config=model,
        layout=_layout(megatron, config.resource_pools[section.resource_pool]),
        tokens=tokens,
        evaluated=evaluated,
        head="lm" if role == "actor" else "value",
        lora=lora,
        adapted=inputs.weights(role, model, lora),
        base_block=base_block,
        **_training(megatron, section.optim),
    )


def _evaluated_by_actor(config: TrainConfig, tokens: int) -> int:
    """Tokens of the largest micro-batch without gradients in the actor's processes; `tokens`: of one of its updates."""
    of_reference = needs_ref_log_probs(config) and reference_in_actor(config)
    if not of_reference:
        return tokens
    reference = _reference_tokens(config)
    return max(tokens, reference) if needs_old_log_probs(config) else reference


def _evaluated(config: TrainConfig, inputs: PlanInputs, role: str) -> ModelUse:
    """A model that is never trained."""
    policy, reward = config.actor_rollout_ref, config.reward_model
    if role == "ref":
        model, megatron, pool, tokens = (
            inputs.model,
            policy.ref.megatron,
            policy.ref.resource_pool,
            _reference_tokens(config),
        )
        base_block = policy.model.lora.blocks  # its weights are held as the actor's are
    else:
        model, megatron, pool = inputs.reward or inputs.model, reward.megatron, reward.resource_pool
        longest = reward.max_length or _longest(config)
        tokens = _tokens(reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu, longest)
        base_block = None
    return ModelUse(
        model,
        _layout(megatron, config.resource_pools[pool]),
        tokens,
        tokens,
        "lm" if role == "ref" else "value",
        trainable=False,
        base_block=base_block,
        itemsize=precision(megatron.dtype).itemsize,
        chunk_tokens=megatron.log_prob_chunk_tokens,
    )


def tuning_use(config: TuningConfig, inputs: PlanInputs) -> ModelUse:
    """The model that is fitted to examples."""
    lora, megatron, trainer = config.model.lora, config.megatron, config.trainer
    tokens = config.max_token_len_per_gpu
    assert tokens is not None, "resolved"
    return ModelUse(
        config=inputs.model,
        layout=ParallelLayout.from_config(megatron, trainer.nnodes * trainer.n_gpus_per_node),
        tokens=tokens,
        evaluated=tokens,
        head="value" if isinstance(config, RMConfig) else "lm",
        lora=lora,
        adapted=inputs.weights(tuned_role(config), inputs.model, lora),
        base_block=lora.blocks,
        **_training(megatron, config.optim),
    )


def _training(megatron: MegatronConfig, optim: OptimConfig) -> dict[str, Any]:
    """The arguments of a `ModelUse` for a model's training."""
    return {
        "itemsize": precision(megatron.dtype).itemsize,
        "distributed": megatron.use_distributed_optimizer,
        "overlap": megatron.overlap_grad_reduce,
        "on_host": optim.optimizer_cpu_offload,
        "recompute": megatron.recompute_granularity,
        "chunk_tokens": megatron.log_prob_chunk_tokens,
    }


def _layout(megatron: MegatronConfig, pool: PoolConfig) -> ParallelLayout:
    return ParallelLayout.from_config(megatron, pool.nnodes * pool.n_gpus_per_node)


def _longest(config: TrainConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _reference_tokens(config: TrainConfig) -> int:
    ref = config.actor_rollout_ref.ref
    return _tokens(
        ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu, _longest(config)
    )


def _tokens(tokens: int | None, trajectories: int | None, longest: int) -> int:
    """Tokens of a micro-batch; one trajectory that is longer is a micro-batch of its own."""
    return tokens if tokens is not None else (trajectories or 1) * longest
