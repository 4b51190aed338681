"""The `adapter_config.json` of a folder of adapters, as PEFT 0.21 writes it: the facts in it, and the modules that it names.

An adapter's computation is fully described by its tensors' names and shapes and the few keys of `AdapterFacts`: any other key
with an effect is refused.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.schema.models import LoraConfig
from megarl.models import ModelConfig
from megarl.models.fields import Fields, short
from megarl.models.lora import adaptable_weights, adapted_weights

CONFIG_FILE = "adapter_config.json"
_HEADS = {"score", "classifier"}  # modules of sequence classifiers that PEFT saves in full
# Keys with no effect on a loaded adapter's computation, whatever their values.
_NEUTRAL = {"auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern",
            "layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "peft_version",
            "qalora_group_size", "revision", "target_modules", "task_type"}  # fmt: skip
# Ways to start an adapter that leave the base model as it is.
_INIT = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterFacts:
    """The facts of a folder's adapters.

    Attributes:
        alpha: as it is written.
        rank_pattern, alpha_pattern: pattern of PEFT's names -> the value in place of `rank` and `alpha` there; the first that
            fits counts.
        parameters: PEFT's names of parameters with adapters, or ends of such names; other adapters are of modules.
        heads: modules that were saved in full.
    """

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    parameters: tuple[str, ...]
    heads: frozenset[str]

    @property
    def scaling(self) -> float:
        """The factor of outputs where no pattern fits."""
        return self._scaling(self.alpha, self.rank)

    def rank_of(self, name: str) -> int:
        """The rank of the adapter of a module or parameter (PEFT's name)."""
        return self.rank_pattern.get(_fitting(self.rank_pattern, name), self.rank)

    def scaling_of(self, name: str) -> float:
        """The factor of the output of a module's or parameter's adapter (PEFT's name)."""
        return self._scaling(
            self.alpha_pattern.get(_fitting(self.alpha_pattern, name), self.alpha), self.rank_of(name)
        )

    def _scaling(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def peft_name(self, module: str) -> str:
        """PEFT's name of a module's adapter when it looks for patterns: by the parameter, where that was named."""
        parameter = f"{module}.weight"
        named = any(parameter == end or parameter.endswith(f".{end}") for end in self.parameters)
        return parameter if named else module


def _fitting(patterns: dict, name: str) -> str:
    """The first pattern that fits, as PEFT's `get_pattern_key` finds it; "" for none."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", name)), "")


def read_facts(folder: Path) -> AdapterFacts:
    """The facts of a folder's adapters. ValueError: no such folder, a key of the wrong type, or one that asks for something unsupported."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"{str(folder)!r} is no folder of adapters in PEFT's format: it has no {CONFIG_FILE}"
        )
    keys = Fields.read(file)
    kind = keys.values.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{file}: peft_type {short(kind)} is not supported; supported: 'LORA'")
    facts = AdapterFacts(
        rank=keys.count("r"),
        alpha=keys.number("lora_alpha"),
        use_rslora=keys.flag("use_rslora", False),
        use_dora=keys.flag("use_dora", False),
        rank_pattern={pattern: ranks.count(pattern) for pattern, ranks in _patterns(keys, "rank_pattern")},
        alpha_pattern={
            pattern: alphas.number(pattern) for pattern, alphas in _patterns(keys, "alpha_pattern")
        },
        parameters=tuple(keys.texts("target_parameters")),
        heads=frozenset(keys.texts("modules_to_save")),
    )
    asked = {
        "bias": keys.text("bias", "none") != "none",
        "init_lora_weights": keys.values.get("init_lora_weights") not in _INIT,
        "modules_to_save": not facts.heads <= _HEADS,
    }
    known = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
             "target_parameters", *_NEUTRAL, *asked}  # fmt: skip
    wrong = [key for key, is_wrong in asked.items() if is_wrong]
    wrong += [key for key, value in keys.values.items() if key not in known and value]
    if wrong:
        found = ", ".join(f"{key}={short(keys.values[key])}" for key in wrong)
        raise ValueError(f"{file}: not supported: {found}")
    return facts


def _patterns(keys: Fields, key: str) -> list[tuple[str, Fields]]:
    """The patterns of a key that are not null; ValueError: one is no regular expression."""
    fields = keys.object(key)
    for pattern in fields.values:
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{fields.file}: {short(pattern)} is no regular expression: {error}") from None
    return [(pattern, fields) for pattern in fields.values]


# Target modules, chosen so that PEFT and SGLang find a folder's tensors. Transformers 5 has the routed experts of a layer in two
# parameters, `experts.gate_up_proj` and `experts.down_proj`. PEFT 0.21 reads adapters of single experts into adapters of these, gate
# and up as one of twice the rank (A one above the other, B block-diagonal), but takes every `gate_proj`, `up_proj` and `down_proj`
# among `target_modules` for an expert's, including the ones of dense layers and shared experts. So where such layers have adapters,
# all MLPs are named as parameters (`target_parameters`), and `target_modules` has them under SGLang's own names, which PEFT leaves alone.

FUSED = r".*\.experts\.gate_up_proj"  # the parameter of twice the rank, as PEFT's patterns name it
_MLP = ("gate_proj", "up_proj", "down_proj")


def targets(config: ModelConfig, lora: LoraConfig, alpha: float) -> dict[str, Any]:
    """The keys of `adapter_config.json` that say which modules have adapters.

    Args:
        alpha: the value of `lora_alpha` there.
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
    """The last parts of the modules' names where all modules of a name are chosen, else full names: patterns would do for PEFT,
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
