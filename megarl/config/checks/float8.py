"""Checks of training in float8 (`megatron.fp8`): settings with which it has not been executed are refused."""

from collections.abc import Iterator

from megarl.config.resolve import megatron_sections
from megarl.config.schema.commands import POLICY, TrainConfig
from megarl.config.schema.models import LoraConfig, MegatronConfig
from megarl.config.schema.supervised import TuningConfig

_ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
_RECOMPUTED = ("moe", "mlp", "shared_experts", "core_attn")


def float8_problems(config: TrainConfig | TuningConfig) -> Iterator[str]:
    """Problems of training in float8 in a resolved configuration."""
    reported: list[MegatronConfig] = []
    for key, megatron, model_key, lora in _models(config):
        if megatron in reported:  # the actor's, which other roles take from it
            continue
        reported.append(megatron)
        if megatron.fp8 is None:
            for name in _ENDS:
                if getattr(megatron, name):
                    yield f"{key}.{name}={getattr(megatron, name)} is of {key}.fp8, which is null; set that, or leave it out"
            continue
        yield from _problems(key, megatron)
        if lora.rank:
            yield (
                f"{key}.fp8={megatron.fp8} goes without {model_key}.lora.rank={lora.rank}: adapters' products are megarl's own, which would stay in "
                f"{megatron.dtype or 'bfloat16'} beside a base that is quantised anew in each pass; set {key}.fp8 to null. A base that is held in "
                f"float8 is {model_key}.lora.base_dtype"
            )


def _models(config: TrainConfig | TuningConfig) -> Iterator[tuple[str, MegatronConfig, str, LoraConfig]]:
    """By model: the key and the section megatron, then the key and the adapters of the model that they are put on."""
    if isinstance(config, TuningConfig):
        yield "megatron", config.megatron, "model", config.model.lora
        return
    policy, critic = config.actor_rollout_ref, config.critic
    for key, section in megatron_sections(config).items():
        assert section.megatron is not None, "resolved"
        if key == "critic":
            assert critic is not None
            yield f"{key}.megatron", section.megatron, "critic.model", critic.model.lora
        else:
            lora = LoraConfig() if key == "reward_model" else policy.model.lora
            yield f"{key}.megatron", section.megatron, f"{POLICY}.model", lora


def _problems(key: str, megatron: MegatronConfig) -> Iterator[str]:
    given = f"{key}.fp8={megatron.fp8}"
    if megatron.dtype not in (None, "bfloat16"):
        why = (
            "gradients of scaled losses are quantised by blocks of their own"
            if megatron.dtype == "float16"
            else "only products of bfloat16 tensors have been executed, as a shadow"
        )
        yield f"{given} goes without {key}.dtype={megatron.dtype}: {why}; leave dtype out"
    if megatron.fsdp is not None:
        yield (
            f"{given} goes without {key}.fsdp={megatron.fsdp}: the float8 copies of weights last longer than gathered weights do; leave out one "
            "of them"
        )
    if megatron.sequence_parallel is False and megatron.tensor_model_parallel_size > 1:
        yield f"{given} with {key}.sequence_parallel=false has not been executed; leave sequence_parallel out"
    modules = megatron.recompute_modules or ("core_attn",)
    if megatron.recompute_granularity == "selective" and (
        untried := [name for name in modules if name in _RECOMPUTED]
    ):
        yield (
            f"{given} with {key}.recompute_modules={','.join(untried)} has not been executed; layernorm, mla_up_proj, moe_act and "
            "recompute_granularity=full have, as a shadow"
        )
    overrides = megatron.override_transformer_config or {}
    for name, value in (
        ("moe_token_dispatcher_type", "flex"),
        ("moe_shared_expert_overlap", True),
        ("fine_grained_activation_offloading", True),
    ):
        if overrides.get(name) == value:
            yield f"{given} with {key}.override_transformer_config.{name}={value} has not been executed; leave out one of them"
