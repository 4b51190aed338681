"""Folders of adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`, as PEFT 0.21 has them.

Tensors have the logical names of `megarl.models.lora` after the prefix `base_model.model.`, or lie in tensors of the experts' parameters;
a value head is stored as `score.weight`, a module that PEFT saves in full.

Transformers 5 has a layer's routed experts in two parameters; their adapters are read as adapters of single experts. To a parameter
[experts, out, in] PEFT 0.21 (`ParamWrapper`) gives one A [experts * rank, in], expert by expert, and one B [out, rank * experts],
whose columns go rank by rank, with the columns of all experts next to each other. A layer's wrappers are nested: names begin with
`mlp.experts.` and `mlp.experts.base_layer.`, in the order in which PEFT met the parameters; the shapes tell which is which.
`gate_up_proj` has gate's rows above up's, so both have the same A.
"""

import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.checkpoints.hf.load import open_weights
from megarl.checkpoints.hf.peft_config import CONFIG_FILE, read_facts, targets
from megarl.config.schema.models import LoraConfig
from megarl.layout import Box
from megarl.models import ModelConfig, logical_tensors
from megarl.models.layers import expert_projections, name_in_files, name_in_models
from megarl.models.lora import MAGNITUDE, A, B, adapted_weights, scaling
from megarl.models.shards import Shapes
from megarl.models.table import VALUE_HEAD
from megarl.models.weight_files import read_header, some

PARAMETERS = ("gate_up_proj", "down_proj")
_FUSED = re.compile(rf"((.*\.experts)(?:\.base_layer)*){re.escape(A)}")


class Part(NamedTuple):
    """A tensor within the stored one `stored`: `shape` from `row` on, every `step`-th column from `column` on."""

    stored: str
    shape: tuple[int, ...]
    row: int = 0
    column: int = 0
    step: int = 1


class Adapted(NamedTuple):
    """The adapter of a module: PEFT's name of the module or parameter, and where its tensors A and B are."""

    peft_name: str
    a: Part
    b: Part


def fused_modules(names: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The tensors of a folder (name -> shape) that belong to experts' parameters: the name without A's end -> the layer's
    experts ("model.layers.1.mlp.experts")."""
    found = (_FUSED.fullmatch(name) for name in names)
    return {match[1]: match[2] for match in found if match}


def split_experts(stored: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, Adapted]:
    """The single experts' adapters by module ("model.layers.1.mlp.experts.3.gate_proj").

    Args:
        stored: name -> shape of a folder's tensors.

    Raises:
        ValueError: B is missing; shapes do not fit a parameter of the model's experts; a parameter is there twice.
    """
    assert config.moe is not None
    count, ffn, hidden = config.moe.num_experts, config.moe.ffn_hidden_size, config.hidden_size
    gate, up, down = expert_projections(config)
    # (in, out) -> the parameter, and the projections in it with their first rows
    kinds = {
        (hidden, 2 * ffn): ("gate_up_proj", {gate: 0, up: ffn}),
        (ffn, hidden): ("down_proj", {down: 0}),
    }
    modules: dict[str, Adapted] = {}
    for module, experts in fused_modules(stored).items():
        if module + B not in stored:
            raise ValueError(f"missing: {module}{B}")
        a_shape, b_shape = stored[module + A], stored[module + B]
        kind, projections = kinds.get((*a_shape[1:], *b_shape[:-1]), ("", {}))
        if not projections or a_shape[0] != b_shape[-1] or a_shape[0] % count or not a_shape[0]:
            raise ValueError(
                f"{module} has A of shape {a_shape} and B of shape {b_shape}, which are of none of the parameters of "
                f"{count} experts of width {ffn} with hidden_size={hidden}"
            )
        (rows, columns), out = a_shape, b_shape[0]
        rank = rows // count
        for projection, first in projections.items():
            height = out // len(projections)
            for expert in range(count):
                name = f"{name_in_files(config, experts)}.{expert}.{projection}"
                if name in modules or name + A in stored:
                    raise ValueError(f"{name} has an adapter twice, one of them in {module}")
                a = Part(module + A, (rank, columns), row=expert * rank)
                b = Part(module + B, (height, rank), row=first, column=expert, step=count)
                modules[name] = Adapted(f"{experts}.{kind}", a, b)
    return modules


WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_TYPES = ("F64", "F32", "F16", "BF16")
_SHOWN = 6  # mistakes in a message


def is_adapter(path: str | Path) -> bool:
    """Whether a folder is one of adapters; a Megatron checkpoint that holds some has their config, too."""
    folder = Path(path).expanduser()
    return (folder / CONFIG_FILE).is_file() and not (folder / "metadata.json").is_file()


class PeftReader:
    """Reads boxes of a folder's tensors, by their logical names.

    Args:
        config: of the model that the adapters should be of: adapters of experts' parameters are then read as adapters of
            single experts. Without it all tensors are as the folder has them.

    Raises:
        ValueError: no such folder, a file that is missing or incomplete, a key that is not supported, experts' adapters that
            are not of this model.
    """

    def __init__(self, path: str, config: ModelConfig | None = None) -> None:
        self.path, self.config = path, config
        folder = Path(path).expanduser()
        self.facts = read_facts(folder)
        file = folder / WEIGHTS_FILE
        if not file.is_file():
            hint = (
                "; adapter_model.bin is not read: save it again with safe_serialization=True"
                if (folder / "adapter_model.bin").is_file()
                else ""
            )
            raise ValueError(f"adapter {path!r} has no {WEIGHTS_FILE}{hint}")
        header = read_header(file)
        others = sorted(name for name in header if not name.startswith(PREFIX))
        if others:
            raise ValueError(f"{file}: names begin with {PREFIX!r} in PEFT's format, found {some(others)}")
        self._stored = {name.removeprefix(PREFIX): tensor for name, tensor in header.items()}
        self._experts: dict[str, Adapted] = {}
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        if config is not None and config.moe is not None:
            try:
                self._experts = split_experts(shapes, config)
            except ValueError as error:
                raise ValueError(f"adapter {path!r} is not of this model: {error}") from None
        parts = {name: Part(name, shape) for name, shape in shapes.items()}
        for module, adapted in self._experts.items():
            parts |= {module + A: adapted.a, module + B: adapted.b}
        taken = {part.stored for adapted in self._experts.values() for part in (adapted.a, adapted.b)}
        self._parts = {self._logical(name): part for name, part in parts.items() if name not in taken}
        self.names = frozenset(self._parts)
        self._reader = open_weights(file)
        # both B of a layer's experts: every expert has columns of each
        self._full_tensor = lru_cache(maxsize=2)(lambda stored: self._reader.get_tensor(PREFIX + stored))

    def __enter__(self) -> "PeftReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._full_tensor.cache_clear()
        self._reader.__exit__(*exception)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """The values in the box; all of them without one.

        Raises:
            ValueError: some are not finite.
        """
        part = self._parts[name]
        box = box or Box.whole(part.shape)
        if part.step == 1:
            place = Box((box.start[0] + part.row, *box.start[1:]), box.size)
            values = self._reader.get_slice(PREFIX + part.stored)[place.slices]
        else:
            rows = self._full_tensor(part.stored)[part.row : part.row + part.shape[0]]
            values = rows[:, part.column :: part.step][box.slices]
        if not values.isfinite().all():
            raise ValueError(f"adapter {self.path!r}: {name} has values that are no finite numbers")
        return values

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name].shape

    def rank(self, module: str) -> int:
        """The rank of the module's adapter, by the config; the tensors' rank is compared with it when the folder is checked."""
        return self.facts.rank_of(self._peft_name(module))

    def scaling(self, module: str) -> float:
        """The factor of the module's adapter's output."""
        return self.facts.scaling_of(self._peft_name(module))

    def scalings(self) -> dict[str, float]:
        """The factor of every adapter's output, by PEFT's name of module or parameter."""
        shapes = {name: part.shape for name, part in self._parts.items()}
        fused = fused_modules(shapes)  # without a config each may be of either parameter
        names = {self._peft_name(module) for module in self._modules() if module not in fused}
        names |= {f"{experts}.{parameter}" for experts in fused.values() for parameter in PARAMETERS}
        return {name: self.facts.scaling_of(name) for name in sorted(names)}

    def _logical(self, name: str) -> str:
        return name if self.config is None else name_in_files(self.config, name)

    def _peft_name(self, module: str) -> str:
        adapted = self._experts.get(module)
        if adapted is not None:
            return adapted.peft_name
        return self.facts.peft_name(module if self.config is None else name_in_models(self.config, module))

    def _modules(self) -> list[str]:
        return [name.removesuffix(A) for name in self._parts if name.endswith(A)]

    def check(self, lora: LoraConfig) -> None:
        """Refuse adapters that differ from section `lora` on the reader's model, as the config and the headers tell.

        Adapters of a smaller rank than others, and of another alpha, are taken: see `load_adapters`.

        Raises:
            ValueError: names each difference with both values.
        """
        assert self.config is not None
        facts, wrong = self.facts, []
        rank, factor = self._widest()
        if rank != lora.rank:
            found = f"{CONFIG_FILE} has r={facts.rank}" + (
                f", by rank_pattern up to {rank}" if rank != facts.rank else ""
            )
            wrong.append(f"{found}, lora.rank is {lora.rank}")
        elif not math.isclose(factor, scaling(lora), rel_tol=1e-6):
            wrong.append(
                f"their outputs are multiplied with {factor:g} (lora_alpha={facts.alpha:g}, "
                f"use_rslora={facts.use_rslora}), with {scaling(lora):g} by lora.alpha={lora.alpha or lora.rank:g}, "
                f"lora.use_rslora={lora.use_rslora}"
            )
        if facts.use_dora != lora.use_dora:
            wrong.append(f"{CONFIG_FILE} has use_dora={facts.use_dora}, lora.use_dora is {lora.use_dora}")
        if (lora.shared_a or lora.expert_groups) and len(
            {(self.rank(m), self.scaling(m)) for m in self._modules()}
        ) > 1:
            wrong.append(
                "rank_pattern or alpha_pattern makes adapters differ that lora.shared_a or lora.expert_groups share"
            )
        if not wrong:
            wrong = self._mistakes(self._shapes(adapted_weights(self.config, lora)) | self._head())
        if wrong:
            raise ValueError(f"adapter {self.path!r} does not fit section lora: {'; '.join(wrong)}")

    def _widest(self) -> tuple[int, float]:
        """The largest rank, and the factor of outputs of adapters of this rank: the default one if the default rank is the
        largest, else the first such adapter's."""
        ranks = {module: self.rank(module) for module in self._modules()}
        rank = max(ranks.values(), default=self.facts.rank)
        factors = [self.scaling(module) for module, own in ranks.items() if own == rank]
        return rank, self.facts.scaling if rank == self.facts.rank or not factors else factors[0]

    def check_base(self) -> list[str]:
        """Refuse adapters that are not of the reader's model; returns the modules that have one, in the model's order.

        Raises:
            ValueError: a tensor of another shape than the model makes it, one of no linear layer, one that is missing.
        """
        assert self.config is not None
        adapted = {
            weight: shape
            for weight, shape in logical_tensors(self.config).items()
            if {weight.removesuffix(".weight") + end for end in (A, B)} & self.names
        }
        wrong = self._mistakes(self._shapes(adapted) | self._head())
        if wrong or not adapted:
            found = "; ".join(wrong) or "it has no tensor of it"
            raise ValueError(f"adapter {self.path!r} is not of this model: {found}")
        return [weight.removesuffix(".weight") for weight in adapted]

    def _shapes(self, weights: Shapes) -> Shapes:
        """The tensors of these weights' adapters."""
        shapes: Shapes = {}
        for weight, (*rows, columns) in weights.items():
            module = weight.removesuffix(".weight")
            rank = self.rank(module)
            shapes |= {module + A: (rank, columns), module + B: (*rows, rank)}
            if self.facts.use_dora:
                shapes[module + MAGNITUDE] = tuple(rows)
        return shapes

    def _head(self) -> Shapes:
        """The value head that was saved in full, if there is one."""
        assert self.config is not None
        there = "score" in self.facts.heads and VALUE_HEAD in self.names
        return {VALUE_HEAD: (1, self.config.hidden_size)} if there else {}

    def _mistakes(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Tensors that are missing, left over, or of another shape or type."""
        missing = [name for name in shapes if name not in self.names]
        left_over = sorted(self.names - shapes.keys())
        wrong = [f"missing: {some(missing)}"] if missing else []
        wrong += [f"left over: {some(left_over)}"] if left_over else []
        for name in sorted(self.names & shapes.keys()):
            part = self._parts[name]
            dtype = self._stored[part.stored].dtype
            if part.shape != shapes[name]:
                wrong.append(f"{name} has shape {part.shape}, it should be {shapes[name]}")
            elif dtype not in _TYPES:
                wrong.append(f"{name} is of type {dtype}, supported: {', '.join(_TYPES)}")
        return wrong[:_SHOWN]


def adapter_config(
    config: ModelConfig, lora: LoraConfig, source_model: str, head: str = "lm"
) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    rsLoRA is written as the alpha that has the same effect without it: SGLang 0.5.21 does not read `use_rslora`, and
    PEFT 0.21 ignores it when it fuses the adapters of experts.

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
        # PEFT refuses dropout for adapters of parameters, such as experts'
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
