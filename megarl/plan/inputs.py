"""The models of a recipe as plans need them: read once, then divided over ranks and into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from megarl.config import (
    DPOConfig,
    MegatronConfig,
    PoolConfig,
    RMConfig,
    RolloutConfig,
    TrainConfig,
    TuningConfig,
    check_config,
    load_config,
    needs_old_log_probs,
    needs_ref_log_probs,
    overlaps,
    reference_in_actor,
    references,
    resolve,
    taught_references,
)
from megarl.config.loading import TRAINING, recipe_command
from megarl.config.loading.hub import fetch_models
from megarl.config.schema.models import LoraConfig
from megarl.costs.flops import ModelFlops, model_flops
from megarl.costs.model import divergence_bytes
from megarl.costs.tensors import CORE_ATTENTION, FULL, ModelUse
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, read_model_config
from megarl.models.lora import adapted_weights
from megarl.models.shards import Shapes
from megarl.util.once import Once
from megarl.weight_sync.layouts import EngineLayout

_CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
C = TypeVar("C", bound=TrainConfig | TuningConfig)


@dataclass
class PlanInputs:
    """Facts and intermediate results shared by many plans of one recipe, which differ by layouts and nodes alone."""

    model: ModelConfig
    critic: ModelConfig | None = None
    reward: ModelConfig | None = None
    teachers: dict[str, ModelConfig] = field(default_factory=dict)  # by role, of `taught_references`
    once: Once = field(default_factory=Once, compare=False, repr=False)

    @classmethod
    def read(cls, config: TrainConfig | TuningConfig) -> PlanInputs:
        """The facts of a resolved configuration's models, whose folders are here."""
        if not isinstance(config, TrainConfig):
            return cls(read_model_config(config.model.path))
        policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
        return cls(
            read_model_config(policy.model.path),
            None if critic is None else read_model_config(critic.model.path),
            read_model_config(reward.model.path) if reward.enable else None,
            read_teachers(config),
        )

    def weights(self, role: str, model: ModelConfig, lora: LoraConfig) -> Shapes | None:
        """The weights of a role's model that have adapters; None: none have."""
        return self.once(("adapted", role, lora), lambda: adapted_weights(model, lora)) if lora.rank else None

    def flops_of(self, model: ModelConfig, head: str) -> ModelFlops:
        """Operations of one of these models."""
        return self.once(("flops", id(model), head), lambda: model_flops(model, head))


def read_teachers(config: TrainConfig) -> dict[str, ModelConfig]:
    """The facts of the references that are other models than the policy, by their roles; `config`: resolved."""
    return {
        role: read_model_config(section.model.path) for role, section in taught_references(config).items()
    }


def read_inputs(recipe: str, overrides: list[str], check: bool = True) -> tuple[TrainConfig, PlanInputs]:
    """A recipe, resolved and (without the files of its data) checked, and the facts of its models."""
    config = read_config(TrainConfig, recipe, overrides, check)
    return config, PlanInputs.read(config)


def read_planned(
    recipe: str, overrides: list[str], command: str | None = None, check: bool = True
) -> tuple[TrainConfig | TuningConfig, PlanInputs]:
    """As `read_inputs`, also for the recipes of `megarl sft`, `rm` and `dpo`.

    Args:
        command: the recipe's; None: the one that its keys belong to (`recipe_command`).

    Raises:
        ValueError: as `load_config` and `check_config`, and if nothing tells the recipe's command.
    """
    config = read_config(TRAINING[command or recipe_command(recipe, overrides)], recipe, overrides, check)
    return config, PlanInputs.read(config)


def read_config(schema: type[C], recipe: str, overrides: list[str], check: bool = True) -> C:
    """A recipe, resolved and (without the files of its data) checked; its models' configurations are on this machine."""
    config = load_config(schema, recipe, overrides)
    config = check_config(config, data_files=False) if check else resolve(config)
    return fetch_models(config, weights=False)


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
    critic = config.critic
    return [
        "actor",
        *(["critic"] if critic is not None and not critic.model.share_base else []),
        *([] if reference_in_actor(config) else references(config)),
        *(["reward_model"] if config.reward_model.enable else []),
    ]


@dataclass(frozen=True)
class RoleFacts:
    """A role of a `TrainConfig`.

    Attributes:
        head: "lm" or "value".
        section: of the configuration; its `optim` exists if the role is trained.
        most: tokens, or texts, of a micro-batch; the one that is not given is None.
        longest: tokens of a text.
        base_block: as in `ModelUse`; the reference's weights are held as the actor's are, a teacher's are not.
    """

    head: str
    model: ModelConfig
    section: Any
    most: tuple[int | None, int | None]
    longest: int
    trained: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    base_block: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch; one text that is longer is a micro-batch of its own."""
        tokens, texts = self.most
        return tokens if tokens is not None else (texts or 1) * self.longest


def role_facts(config: TrainConfig, inputs: PlanInputs, role: str) -> RoleFacts:
    """The facts of a role: actor, critic, one of `references` or reward_model."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    actor, lora = policy.actor, policy.model.lora
    longest = config.data.max_prompt_length + config.data.max_response_length
    if role == "actor":
        most = (actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu)
        return RoleFacts("lm", inputs.model, actor, most, longest, True, lora, lora.blocks)
    if role == "critic":
        assert critic is not None
        most = (critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu)
        own = critic.model.lora
        blocks = lora.blocks if critic.model.share_base else own.blocks
        return RoleFacts("value", inputs.critic or inputs.model, critic, most, longest, True, own, blocks)
    ref = references(config).get(role)
    if ref is not None:
        most = (ref.log_prob_max_token_len_per_gpu, ref.log_prob_micro_batch_size_per_gpu)
        if role in inputs.teachers:
            return RoleFacts("lm", inputs.teachers[role], ref, most, longest)
        return RoleFacts("lm", inputs.model, ref, most, longest, base_block=lora.blocks)
    assert role == "reward_model", role
    most = (reward.max_token_len_per_gpu, reward.micro_batch_size_per_gpu)
    return RoleFacts("value", inputs.reward or inputs.model, reward, most, reward.max_length or longest)


def model_use(config: TrainConfig | TuningConfig, inputs: PlanInputs, role: str) -> ModelUse:
    """The model of a role: actor, critic, one of `references` or reward_model; sft, rm or dpo. `config`: resolved."""
    if isinstance(config, TuningConfig):
        assert role == tuned_role(config), role
        tokens, lora, head = (
            config.max_token_len_per_gpu,
            config.model.lora,
            "value" if role == "rm" else "lm",
        )
        assert tokens is not None, "resolved"
        pool = PoolConfig(nnodes=config.trainer.nnodes, n_gpus_per_node=config.trainer.n_gpus_per_node)
        length = config.data.max_length
        facts = RoleFacts(head, inputs.model, config, (tokens, None), length, True, lora, lora.blocks)
    else:
        facts = role_facts(config, inputs, role)
        pool = config.resource_pools[facts.section.resource_pool]
    megatron, training = facts.section.megatron, {}
    trained_model = config.model if isinstance(config, TuningConfig) else config.actor_rollout_ref.model
    layout = layout_of(megatron, pool)
    # The reference within the actor's processes is evaluated there, too, in micro-batches of its own size.
    evaluated = _evaluated_by_actor(config, inputs, facts.tokens) if role == "actor" else facts.tokens
    # Products in float8 are of whole tiles, on each rank that shares a sequence.
    unit = (
        1 if megatron.fp8 is None else megatron.token_multiple * layout.cp * (layout.tp if layout.sp else 1)
    )
    if facts.trained:
        training = {
            "distributed": megatron.use_distributed_optimizer,
            "overlap": overlaps(
                megatron, layout.dp * layout.cp, on_gpus=True, adapted=facts.lora.rank > 0
            ).gradients,
            "on_host": facts.section.optim.optimizer_cpu_offload,
            "muon": facts.section.optim.muon if facts.section.optim.optimizer == "muon" else None,
            "recompute": megatron.recompute_granularity,
            "recompute_modules": megatron.recompute_modules or CORE_ATTENTION,
        }
    return ModelUse(
        config=facts.model,
        layout=layout,
        tokens=_filled_up(facts.tokens, unit),
        evaluated=_filled_up(evaluated, unit),
        head=facts.head,
        trainable=facts.trained,
        itemsize=precision(megatron.dtype).itemsize,
        lora=facts.lora,
        adapted=inputs.weights(role, facts.model, facts.lora),
        base_block=facts.base_block,
        chunk_tokens=megatron.log_prob_chunk_tokens,
        float8=megatron.fp8 is not None,
        bf16_ends=(megatron.num_layers_at_start_in_bf16, megatron.num_layers_at_end_in_bf16),
        compared=_compared(config) if role == "actor" else 0,
        longest=facts.longest,
        mtp=role in ("actor", "sft") and trained_model.mtp == "train",
        indexers=role in ("actor", "sft") and trained_model.indexer == "train",
        fsdp=megatron.fsdp if facts.trained or megatron.fsdp == FULL else None,
        **training,
    )


def _compared(config: TrainConfig | TuningConfig) -> int:
    """`ModelUse.compared` of the actor."""
    if not isinstance(config, TrainConfig):
        return 0
    actor = config.actor_rollout_ref.actor
    return divergence_bytes(actor.kl_loss_type if actor.use_kl_loss else None, actor.kl_loss_beta)


def _filled_up(tokens: int, unit: int) -> int:
    """Tokens of a micro-batch, filled up to a multiple of `unit`, so that ranks have equal parts for products in float8."""
    return -(-tokens // unit) * unit


def _evaluated_by_actor(config: TrainConfig, inputs: PlanInputs, tokens: int) -> int:
    """Tokens of the largest micro-batch without gradients in the actor's processes; `tokens`: of one of its updates."""
    if not (needs_ref_log_probs(config) and reference_in_actor(config)):
        return tokens
    reference = role_facts(config, inputs, "ref").tokens
    return max(tokens, reference) if needs_old_log_probs(config) else reference


def layout_of(megatron: MegatronConfig, pool: PoolConfig) -> ParallelLayout:
    """The layout of a model on all devices of a pool."""
    return ParallelLayout.from_config(megatron, pool.nnodes * pool.n_gpus_per_node)


def engine_layout(rollout: RolloutConfig) -> EngineLayout:
    """The engines' layout from a resolved section."""
    return EngineLayout.of(rollout, draft=rollout.speculative.algorithm == "mtp")


def cache_dtype(rollout: RolloutConfig) -> torch.dtype:
    """The type of keys and values in the engines' cache on GPUs."""
    return _CACHE_DTYPES.get(rollout.kv_cache_dtype or "", precision(rollout.dtype))
