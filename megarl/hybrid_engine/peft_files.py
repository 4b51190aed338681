"""Folders of adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, as PEFT 0.21 has them.

Tensors are called `base_model.model.` and the logical names of `megarl.models.lora`; a value head is there as
`score.weight`, a module that PEFT saves whole. What an adapter computes is all in the names, the shapes and the few keys of
`AdapterFacts`: any other key that asks for something is refused.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config.lora_section import LoraConfig
from megarl.hybrid_engine.load import open_weights
from megarl.hybrid_engine.peft_targets import FUSED, targets
from megarl.layout import Box
from megarl.models import ModelConfig, logical_tensors
from megarl.models.lora import MAGNITUDE, A, B, adapted_weights, logical_adapters, scaling
from megarl.models.table import VALUE_HEAD

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_HEADS = {"score", "classifier"}  # what PEFT saves whole of sequence classifiers
# Keys that change nothing of what a loaded adapter computes, whatever they say.
_NEUTRAL = {"auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern",
            "layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "peft_version",
            "qalora_group_size", "revision", "target_modules", "target_parameters", "task_type"}  # fmt: skip
# Ways to start an adapter that leave the base model as it is.
_INIT = (None, True, False, "gaussian", "eva", "orthogonal")
_TYPES = ("F64", "F32", "F16", "BF16")
_SHOWN = 6  # names in a message


@dataclass(frozen=True)
class AdapterFacts:
    """What a folder says of its adapters; `alpha` as it is written, `heads`: modules that were saved whole."""

    rank: int
    alpha: float
    use_rslora: bool
    use_dora: bool
    heads: frozenset[str]

    @property
    def scaling(self) -> float:
        """What their outputs are multiplied with."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def is_adapter(path: str | Path) -> bool:
    """Whether a folder is one of adapters; a Megatron checkpoint that holds some has their config, too."""
    folder = Path(path).expanduser()
    return (folder / CONFIG_FILE).is_file() and not (folder / "metadata.json").is_file()


class PeftReader:
    """Reads boxes of a folder's tensors, by their logical names.

    Raises:
        ValueError: no such folder, a file that is missing or not whole, a key that is not supported.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        folder = Path(path).expanduser()
        self.facts = _read_facts(folder)
        file = folder / WEIGHTS_FILE
        if not file.is_file():
            hint = (
                "; adapter_model.bin is not read: save it again with safe_serialization=True"
                if (folder / "adapter_model.bin").is_file()
                else ""
            )
            raise ValueError(f"adapter {path!r} has no {WEIGHTS_FILE}{hint}")
        self._reader = open_weights(file)
        names = self._reader.keys()
        foreign = sorted(name for name in names if not name.startswith(PREFIX))
        if foreign:
            raise ValueError(f"{file}: names begin with {PREFIX!r} in PEFT's format, found {_some(foreign)}")
        self.names = frozenset(name.removeprefix(PREFIX) for name in names)

    def __enter__(self) -> "PeftReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._reader.__exit__(*exception)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """The values in the box; all of them without one."""
        part = self._reader.get_slice(PREFIX + name)
        return part[(box or Box.whole(self.shape(name))).slices]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._reader.get_slice(PREFIX + name).get_shape())

    def check(self, config: ModelConfig, lora: LoraConfig) -> None:
        """Refuse adapters that are not those of section `lora`, as the config and the headers tell.

        Raises:
            ValueError: names each difference with both values.
        """
        facts, wrong = self.facts, []
        if facts.rank != lora.rank:
            wrong.append(f"{CONFIG_FILE} has r={facts.rank}, lora.rank is {lora.rank}")
        elif not math.isclose(facts.scaling, scaling(lora), rel_tol=1e-6):
            wrong.append(
                f"their outputs are multiplied with {facts.scaling:g} (lora_alpha={facts.alpha:g}, "
                f"use_rslora={facts.use_rslora}), with {scaling(lora):g} by lora.alpha={lora.alpha or lora.rank:g}, "
                f"lora.use_rslora={lora.use_rslora}"
            )
        if facts.use_dora != lora.use_dora:
            wrong.append(f"{CONFIG_FILE} has use_dora={facts.use_dora}, lora.use_dora is {lora.use_dora}")
        if not wrong:
            wrong = self._mistakes(logical_adapters(config, lora) | self._head(config))
        if wrong:
            raise ValueError(f"adapter {self.path!r} does not fit section lora: {'; '.join(wrong)}")

    def check_base(self, config: ModelConfig) -> list[str]:
        """Refuse adapters that are not of this model; returns the modules that have one, in the model's order.

        Raises:
            ValueError: a tensor of another shape than the model makes it, one of no linear layer, one that is missing.
        """
        shapes, modules = self._head(config), []
        for weight, shape in logical_tensors(config).items():
            module = weight.removesuffix(".weight")
            if module + A in self.names or module + B in self.names:
                modules.append(module)
                shapes |= {module + A: (self.facts.rank, shape[-1]), module + B: (shape[0], self.facts.rank)}
                if self.facts.use_dora:
                    shapes[module + MAGNITUDE] = (shape[0],)
        wrong = self._mistakes(shapes)
        if wrong or not modules:
            found = "; ".join(wrong) or "it has no tensor of it"
            raise ValueError(f"adapter {self.path!r} is not of this model: {found}")
        return modules

    def _head(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """The value head that was saved whole, if there is one."""
        there = "score" in self.facts.heads and VALUE_HEAD in self.names
        return {VALUE_HEAD: (1, config.hidden_size)} if there else {}

    def _mistakes(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """What is missing, left over, or of another shape or type."""
        missing = [name for name in shapes if name not in self.names]
        left_over = sorted(self.names - shapes.keys())
        wrong = [f"missing: {_some(missing)}"] if missing else []
        wrong += [f"left over: {_some(left_over)}"] if left_over else []
        for name in sorted(self.names & shapes.keys()):
            part = self._reader.get_slice(PREFIX + name)
            if tuple(part.get_shape()) != shapes[name]:
                wrong.append(f"{name} has shape {tuple(part.get_shape())}, it should be {shapes[name]}")
            elif part.get_dtype() not in _TYPES:
                wrong.append(f"{name} is of type {part.get_dtype()}, supported: {', '.join(_TYPES)}")
        return wrong[:_SHOWN]


def _read_facts(folder: Path) -> AdapterFacts:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"{str(folder)!r} is no folder of adapters in PEFT's format: it has no {CONFIG_FILE}"
        )
    try:
        keys: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if keys.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type {keys.get('peft_type')!r} is not supported; supported: 'LORA'")
    rank, alpha = keys.get("r"), keys.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"{file}: r and lora_alpha must be numbers, found {rank!r} and {alpha!r}")
    heads = frozenset(keys.get("modules_to_save") or ())
    asked = {
        # what `targets` writes of experts says nothing that is not in the tensors; no other rank or alpha is read
        "rank_pattern": (keys.get("rank_pattern") or {}) not in ({}, {FUSED: 2 * rank}),
        "alpha_pattern": (keys.get("alpha_pattern") or {}) not in ({}, {FUSED: 2 * alpha}),
        "bias": keys.get("bias", "none") != "none",
        "init_lora_weights": keys.get("init_lora_weights") not in _INIT,
        "modules_to_save": not heads <= _HEADS,
    }
    known = {"peft_type", "r", "lora_alpha", "use_rslora", "use_dora", *_NEUTRAL, *asked}
    wrong = [key for key, is_wrong in asked.items() if is_wrong]
    wrong += [key for key, value in keys.items() if key not in known and value]
    if wrong:
        found = ", ".join(f"{key}={keys[key]!r}" for key in wrong)
        raise ValueError(f"{file}: not supported: {found}")
    return AdapterFacts(rank, alpha, bool(keys.get("use_rslora")), bool(keys.get("use_dora")), heads)


def adapter_config(
    config: ModelConfig, lora: LoraConfig, source_model: str, head: str = "lm"
) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    rsLoRA is written as the alpha that has the same effect without it: SGLang 0.5.21 does not read `use_rslora`, and
    PEFT 0.21 does not think of it when it fuses the adapters of experts.

    Args:
        source_model: the base model's folder.
        head: "value" for a model with a value head, which is a sequence classifier to PEFT.
    """
    alpha = scaling(lora) * lora.rank if lora.use_rslora else float(lora.alpha or lora.rank)
    alpha = int(alpha) if alpha.is_integer() else alpha
    keys = targets(config, lora, alpha)
    experts = keys["target_parameters"] or any(".experts." in name for name in adapted_weights(config, lora))
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if head == "value" else "CAUSAL_LM",
        "base_model_name_or_path": source_model,
        "r": lora.rank,
        "lora_alpha": alpha,
        # PEFT refuses dropout for adapters of parameters, such as those of experts
        "lora_dropout": 0.0 if experts else lora.dropout,
        **keys,
        "exclude_modules": None,
        "use_rslora": False,
        "use_dora": lora.use_dora,
        "modules_to_save": ["score"] if head == "value" else None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
