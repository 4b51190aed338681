"""What `adapter_config.json` says of a folder of adapters, as PEFT 0.21 writes it.

What an adapter computes is all in the tensors' names and shapes and the few keys of `AdapterFacts`: any other key that asks
for something is refused.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from megarl.models.fields import Fields, short

CONFIG_FILE = "adapter_config.json"
_HEADS = {"score", "classifier"}  # what PEFT saves whole of sequence classifiers
# Keys that change nothing of what a loaded adapter computes, whatever they say.
_NEUTRAL = {"auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern",
            "layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "peft_version",
            "qalora_group_size", "revision", "target_modules", "task_type"}  # fmt: skip
# Ways to start an adapter that leave the base model as it is.
_INIT = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterFacts:
    """What a folder says of its adapters.

    Attributes:
        alpha: as it is written.
        rank_pattern, alpha_pattern: pattern of PEFT's names -> what is instead of `rank` and `alpha` there; the first that
            fits counts.
        parameters: PEFT's names of parameters with adapters, or ends of such names; other adapters are of modules.
        heads: modules that were saved whole.
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
        """What outputs are multiplied with where no pattern fits."""
        return self._scaling(self.alpha, self.rank)

    def rank_of(self, name: str) -> int:
        """The rank of the adapter of a module or parameter (PEFT's name)."""
        return self.rank_pattern.get(_fitting(self.rank_pattern, name), self.rank)

    def scaling_of(self, name: str) -> float:
        """What its output is multiplied with."""
        return self._scaling(
            self.alpha_pattern.get(_fitting(self.alpha_pattern, name), self.alpha), self.rank_of(name)
        )

    def _scaling(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def peft_name(self, module: str) -> str:
        """What PEFT calls a module's adapter when it looks for patterns: by the parameter, where that was named."""
        parameter = f"{module}.weight"
        named = any(parameter == end or parameter.endswith(f".{end}") for end in self.parameters)
        return parameter if named else module


def _fitting(patterns: dict, name: str) -> str:
    """The first pattern that fits, as PEFT's `get_pattern_key` finds it; "" for none."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", name)), "")


def read_facts(folder: Path) -> AdapterFacts:
    """ValueError: no such folder, a key that is not what it has to be, or asks for what is not supported."""
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
