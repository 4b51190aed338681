"""Which modules a folder of adapters says that it adapts, so that PEFT and SGLang find its tensors.

Transformers 5 has the routed experts of a layer in two parameters, `experts.gate_up_proj` and `experts.down_proj`. PEFT 0.21
reads adapters of single experts into adapters of these, gate and up as one of twice the rank (A one above the other, B
block-diagonal), but takes every `gate_proj`, `up_proj` and `down_proj` among `target_modules` for an expert's, those of dense
layers and shared experts too. So where such layers have adapters, all MLPs are named as parameters (`target_parameters`), and
`target_modules` has them under SGLang's own names, which PEFT leaves alone.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megarl.config.schema.models import LoraConfig
from megarl.models import ModelConfig
from megarl.models.lora import adaptable_weights, adapted_weights

FUSED = r".*\.experts\.gate_up_proj"  # the parameter of twice the rank, as PEFT's patterns name it
_MLP = ("gate_proj", "up_proj", "down_proj")


def targets(config: ModelConfig, lora: LoraConfig, alpha: float) -> dict[str, Any]:
    """The keys of `adapter_config.json` that say which modules have adapters.

    Args:
        alpha: what `lora_alpha` is there.
    """
    weights = adapted_weights(config, lora)
    every = adaptable_weights(config)
    plain = {
        "target_modules": _names(weights, every, parts=1),
        "target_parameters": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    others = [name for name in weights if _last(name) in _MLP and ".experts." not in name]
    if config.moe is None or not others or lora.use_dora:  # PEFT has no DoRA for parameters
        return plain
    fused = _fused(weights, every)
    modules = [name for name in plain["target_modules"] if _module_last(name) not in _MLP]
    if "experts.gate_up_proj" in fused:
        modules.append("gate_up_proj")
    if "experts.down_proj" in fused:
        modules.append("down_proj")  # PEFT takes it for the experts', which it is, too
    twice = any(name.endswith("gate_up_proj") for name in fused)
    return {
        "target_modules": modules,
        "target_parameters": [f"{name}.weight" for name in _names(others, every, parts=2)] + fused,
        "rank_pattern": {FUSED: 2 * lora.rank} if twice else {},
        "alpha_pattern": {FUSED: 2 * alpha} if twice else {},
    }


def _fused(weights: Mapping[str, tuple[int, ...]], every: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The parameters of routed experts that have adapters; a last part of the name where all layers have them.

    Gate without up, or up without gate, is no parameter: these stay for PEFT to refuse.
    """
    found = []
    for name, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        layers = [
            {weight.split(".experts.")[0] for weight in names if weight.endswith(f".experts.0.{part}.weight")}
            for names in (weights, every)
            for part in projections
        ]
        chosen = set.intersection(*layers[: len(projections)])
        if chosen and chosen == layers[-1]:
            found.append(f"experts.{name}")
        else:
            found += [f"{layer}.experts.{name}" for layer in sorted(chosen)]
    return found


def _names(chosen: Any, every: Any, parts: int) -> list[str]:
    """The last parts of the modules' names where all of a name are chosen, else whole names: patterns would do for PEFT,
    but not for SGLang."""
    number = Counter(_last(name, parts) for name in every)
    have = Counter(_last(name, parts) for name in chosen)
    names = [
        _last(name, parts)
        if have[_last(name, parts)] == number[_last(name, parts)]
        else name.removesuffix(".weight")
        for name in chosen
    ]
    return list(dict.fromkeys(names))


def _last(weight: str, parts: int = 1) -> str:
    return _module_last(weight.removesuffix(".weight"), parts)


def _module_last(module: str, parts: int = 1) -> str:
    return ".".join(module.split(".")[-parts:])
