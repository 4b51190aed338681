"""Checks of a layout against the facts of a model: what must divide what."""

from typing import Protocol

from megarl.config.problems import raise_if_any
from megarl.config.resolve import needs_reference, resolve
from megarl.config.schema import EvalConfig, MegatronConfig, SFTConfig, TrainConfig

ACTOR_KEY = "actor_rollout_ref.actor.megatron"
ROLLOUT_KEY = "actor_rollout_ref.rollout"


class ModelFacts(Protocol):
    """The numbers of a model that a layout must fit; a ModelConfig has them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_query_groups(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...


def check_model(
    megatron: MegatronConfig,
    *,
    num_layers: int,
    num_attention_heads: int,
    num_query_groups: int,
    ffn_hidden_size: int,
    key: str = ACTOR_KEY,
) -> None:
    """Raise one ValueError with all that does not divide, if a model does not fit the layout of the section `key`."""
    sizes = _sizes(num_attention_heads, num_query_groups, ffn_hidden_size)
    raise_if_any("the model does not fit its layout", _megatron_problems(key, megatron, num_layers, sizes))


def check_rollout_model(
    tensor_model_parallel_size: int,
    *,
    num_attention_heads: int,
    num_query_groups: int,
    ffn_hidden_size: int,
    key: str = ROLLOUT_KEY,
) -> None:
    """The same for a rollout engine, which may also give several ranks the same key/value head."""
    sizes = _sizes(num_attention_heads, num_query_groups, ffn_hidden_size)
    problems = _rollout_problems(key, tensor_model_parallel_size, sizes)
    raise_if_any("the model does not fit its layout", problems)


def check_models(
    config: TrainConfig | SFTConfig | EvalConfig, model: ModelFacts, critic: ModelFacts | None = None
) -> None:
    """`check_model` for every role of a run, all problems in one ValueError.

    Args:
        model: facts of the model that is trained or evaluated.
        critic: those of critic.model.path; None: the same.
    """
    config = resolve(config)
    megatrons: list[tuple[str, MegatronConfig | None, ModelFacts]] = []
    rollout: tuple[str, int] | None = None
    if isinstance(config, SFTConfig):
        megatrons = [("megatron", config.megatron, model)]
    elif isinstance(config, TrainConfig):
        policy = config.actor_rollout_ref
        megatrons = [(ACTOR_KEY, policy.actor.megatron, model)]
        if needs_reference(config) and policy.ref.megatron != policy.actor.megatron:
            megatrons.append(("actor_rollout_ref.ref.megatron", policy.ref.megatron, model))
        if config.critic is not None:
            megatrons.append(("critic.megatron", config.critic.megatron, critic or model))
        rollout = (ROLLOUT_KEY, policy.rollout.tensor_model_parallel_size)
    else:
        rollout = ("rollout", config.rollout.tensor_model_parallel_size)
    problems = []
    for key, megatron, facts in megatrons:
        assert megatron is not None, "resolved"
        problems += _megatron_problems(key, megatron, facts.num_layers, _sizes_of(facts))
    if rollout is not None:
        problems += _rollout_problems(*rollout, _sizes_of(model))
    raise_if_any("the model does not fit its layout", problems)


def _sizes(heads: int, groups: int, ffn: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_query_groups": groups, "ffn_hidden_size": ffn}


def _sizes_of(facts: ModelFacts) -> dict[str, int]:
    return _sizes(facts.num_attention_heads, facts.num_query_groups, facts.ffn_hidden_size)


def _megatron_problems(key: str, megatron: MegatronConfig, layers: int, sizes: dict[str, int]) -> list[str]:
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    vpp = megatron.virtual_pipeline_model_parallel_size or 1
    possible = [
        size for size in range(1, min(sizes.values()) + 1) if not any(n % size for n in sizes.values())
    ]
    problems = [
        f"{key}.tensor_model_parallel_size={tp} does not divide {name}={size}; possible: {_list(possible)}"
        for name, size in sizes.items()
        if size % tp
    ]
    if layers % (pp * vpp):
        chunks = f" x virtual_pipeline_model_parallel_size={vpp} chunks" if vpp > 1 else ""
        possible = [
            size
            for size in range(1, layers // vpp + 1)
            if layers % (size * vpp) == 0 and (vpp == 1 or size > 1)
        ]
        problems.append(
            f"{key}.pipeline_model_parallel_size={pp}{chunks} does not divide num_layers={layers}; "
            f"possible: {_list(possible)}"
        )
    return problems


def _rollout_problems(key: str, tp: int, sizes: dict[str, int]) -> list[str]:
    heads, groups, ffn = sizes.values()

    def fits(size: int) -> bool:
        return not (heads % size or ffn % size or (groups % size and size % groups))

    if fits(tp):
        return []
    causes = [
        f"{name}={sizes[name]}" for name in ("num_attention_heads", "ffn_hidden_size") if sizes[name] % tp
    ]
    text = f"does not divide {' and '.join(causes)}" if causes else ""
    if groups % tp and tp % groups:
        text += f"{' and ' if text else ''}neither divides num_query_groups={groups} nor is a multiple of it"
    possible = [size for size in range(1, heads + 1) if fits(size)]
    return [f"{key}.tensor_model_parallel_size={tp} {text}; possible: {_list(possible)}"]


def _list(numbers: list[int]) -> str:
    return ",".join(map(str, numbers)) if numbers else "none"
