"""Tensors of checkpoints that store all routed experts of a layer in one, read and written as tensors of single experts; and the names of
language models beside a vision tower.

Qwen3.5's checkpoints have `gate_up_proj` [experts, 2 ffn, hidden], gate's rows before up's, and `down_proj` [experts, hidden, ffn]
(transformers 5.12.1, models/qwen3_5_moe); without a vision tower beside them transformers writes tensors of single experts.
gpt-oss's have for each layer `gate_up_proj` [experts, hidden, 2 ffn], whose columns are gate's and up's in turn, `gate_up_proj_bias` [experts, 2 ffn],
`down_proj` [experts, ffn, hidden] and `down_proj_bias` [experts, hidden] (transformers 5.12.1, models/gpt_oss). Published checkpoints have
the two weights in MXFP4 (Open Compute Project, Microscaling Formats v1.0, section 5.2), the other way round: `<name>_blocks` [experts, out, in / 32, 16],
two values of four bits (e2m1) a byte, the lower bits first, and `<name>_scales` [experts, out, in / 32], the exponents of 32 values'
common factor, plus 127.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.layout import Box
from megarl.models import ModelConfig
from megarl.models.weight_files import StoredTensor, stored_tensors

_BLOCKS, _SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1 without its sign, which is the highest bit
_GROUP = 32  # values that share a scale
_STORED = re.compile(rf"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|{_BLOCKS})?")
_SINGLE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")


# How names of a model with a vision tower begin.
_OF_TEXT, _OF_PICTURES = "model.language_model.", "model.visual."


class Part(NamedTuple):
    """An expert's tensor within a stored one: every `step`-th output from `first` on. `by_output`: outputs are stored rows, not columns."""

    stored: str
    expert: int
    first: int
    step: int
    by_output: bool = False


def of_language_model(names: Iterable[str]) -> dict[str, str]:
    """Name -> stored name of the tensors of a checkpoint other than a vision tower's."""
    return {
        f"model.{name.removeprefix(_OF_TEXT)}" if name.startswith(_OF_TEXT) else name: name
        for name in names
        if not name.startswith(_OF_PICTURES)
    }


def find_vision_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the vision tower of the model in a folder.

    Raises:
        ValueError: there are none.
    """
    stored = stored_tensors(str(folder)) if any(folder.glob("*.safetensors")) else {}
    found = {name: tensor for name, tensor in stored.items() if name.startswith(_OF_PICTURES)}
    if not found:
        raise ValueError(
            f"{folder}: config.json has a vision tower (vision_config), which a Hugging Face folder must have, too, and there are no weights "
            "of it (model.visual.*) here; name the folder of the model that was trained (megarl convert: --hf)"
        )
    return found


def read_vision_tensors(folder: Path) -> dict[str, Tensor]:
    """The values of a vision tower's tensors, as they are stored."""
    found, values = find_vision_tensors(folder), dict[str, Tensor]()
    for file in {tensor.file for tensor in found.values()}:
        with safe_open(file, "pt") as opened:
            values |= {name: opened.get_tensor(name) for name, tensor in found.items() if tensor.file == file}
    return values


def split_experts(
    tensors: Mapping[str, StoredTensor], is_halved: Callable[[], bool]
) -> tuple[dict[str, StoredTensor], dict[str, Part]]:
    """The tensors of a checkpoint with single experts' tensors in place of the stored ones, and where each expert's tensor lies.

    Args:
        is_halved: whether stored tensors without biases are Qwen3.5's; other checkpoints' stay as they are: their names mean another order.

    Raises:
        ValueError: a tensor in MXFP4 without its scales, or of an impossible shape.
    """
    found: dict[str, StoredTensor] = {}
    parts: dict[str, Part] = {}
    scales = {name.removesuffix(_BLOCKS) + _SCALES for name in tensors if name.endswith(_BLOCKS)}
    for name, tensor in tensors.items():
        matched = _STORED.fullmatch(name)
        biased = matched is not None and f"{matched[1]}.{matched[2]}_bias" in tensors
        if matched is None or not (biased or is_halved()):
            if name not in scales:
                found[name] = tensor
            continue
        layer, projection, kind = matched.groups()
        names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        if not biased:
            for own, part, shape in _single_experts(name, layer, names, tensor):
                found[own], parts[own] = StoredTensor(tensor.file, tensor.dtype, shape), part
            continue
        shape = _shape(name, tensor, kind, tensors)
        dtype = "BF16" if kind == _BLOCKS else tensor.dtype
        for expert in range(shape[0]):
            for first, single in enumerate(names):
                own = f"{layer}.{expert}.{single}.{'bias' if kind == '_bias' else 'weight'}"
                found[own] = StoredTensor(tensor.file, dtype, (shape[1] // len(names), *shape[2:]))
                parts[own] = Part(name, expert, first, len(names))
    return found, parts


def _single_experts(
    name: str, layer: str, names: Sequence[str], tensor: StoredTensor
) -> Iterator[tuple[str, Part, tuple[int, ...]]]:
    """Single experts' names, places and shapes in a tensor of Qwen3.5's.

    Raises:
        ValueError: it does not have the shape of such a tensor.
    """
    if len(tensor.shape) != 3 or tensor.shape[1] % len(names):
        raise ValueError(
            f"{tensor.file}: {name} has shape {tensor.shape}, which is not that of experts' tensors"
        )
    experts, out, columns = tensor.shape
    rows = out // len(names)
    for expert in range(experts):
        for number, single in enumerate(names):
            part = Part(name, expert, number * rows, 1, by_output=True)
            yield f"{layer}.{expert}.{single}.weight", part, (rows, columns)


def _shape(
    name: str, tensor: StoredTensor, kind: str | None, tensors: Mapping[str, StoredTensor]
) -> tuple[int, ...]:
    """The shape of a stored tensor as [experts, out, in] for a weight, [experts, out] for biases."""
    shape = tensor.shape
    if kind == _BLOCKS:
        scales = tensors.get(name.removesuffix(_BLOCKS) + _SCALES)
        if scales is None or len(shape) != 4 or shape[-1] != _GROUP // 2 or scales.shape != shape[:-1]:
            raise ValueError(
                f"{tensor.file}: {name} of shape {shape} should be MXFP4's blocks of {_GROUP // 2} bytes, with scales of shape "
                f"{shape[:-1]}; found {'none' if scales is None else scales.shape}"
            )
        return (*shape[:2], shape[2] * _GROUP)
    if len(shape) != (2 if kind else 3):
        raise ValueError(f"{tensor.file}: {name} has shape {shape}, which is not that of experts' tensors")
    return shape if kind else (shape[0], shape[2], shape[1])


def read_part(part: Part, box: Box, open_slice: Any) -> Tensor:
    """The values of a box of a single expert's tensor; of MXFP4 in bfloat16, which represents them exactly.

    Args:
        open_slice: name -> a stored tensor to be sliced.
    """
    own, (start, size) = slice(part.expert, part.expert + 1), box
    rows = slice(start[0] * part.step, (start[0] + size[0]) * part.step)
    stored = open_slice(part.stored)
    if part.by_output:
        first = part.first + start[0]
        return stored[own, first : first + size[0], start[1] : start[1] + size[1]][0]
    if len(size) == 1:
        return stored[own, rows][0, part.first :: part.step]
    columns = slice(start[1], start[1] + size[1])
    if not part.stored.endswith(_BLOCKS):
        return stored[own, columns, rows][0].T[part.first :: part.step]
    groups = slice(columns.start // _GROUP, -(-columns.stop // _GROUP))
    scales = open_slice(part.stored.removesuffix(_BLOCKS) + _SCALES)
    values = dequantise(
        *(tensor[own, rows, groups][0, part.first :: part.step] for tensor in (stored, scales))
    )
    return values[:, columns.start - groups.start * _GROUP :][:, : size[1]]


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 blocks [rows, groups, 16] and scales [rows, groups] -> bfloat16 [rows, 32 groups]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1).flatten(-2)
    return torch.ldexp(pairs, scales.int()[..., None] - 127).flatten(-2).to(torch.bfloat16)


def is_fused(config: ModelConfig) -> bool:
    """Whether a model's checkpoints have a layer's experts in one tensor: gpt-oss's, and Qwen3.5's beside a vision tower."""
    return config.moe is not None and (config.moe.biases or config.is_nested)


def stored_name(config: ModelConfig, name: str) -> str:
    """The stored tensor that the tensor `name` is written into; its own name where there is no such tensor."""
    matched = _SINGLE.fullmatch(name) if is_fused(config) else None
    if matched is None:
        return name
    layer, _, projection, kind = matched.groups()
    both = projection if projection == "down_proj" else "gate_up_proj"
    return f"{layer}.{both}{'_bias' if kind == 'bias' else ''}"


def as_stored(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the family's checkpoints have them; of each layer that has experts among them all experts must be there."""
    fused = _fuse_experts(config, tensors)
    if not config.is_nested:
        return fused
    return {
        _OF_TEXT + name.removeprefix("model.") if name.startswith("model.") else name: tensor
        for name, tensor in fused.items()
    }


def _fuse_experts(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(stored_name(config, name), {})[name] = tensor
    return {
        stored: parts[stored] if stored in parts else _fused(config, stored, parts)
        for stored, parts in groups.items()
    }


def _fused(config: ModelConfig, stored: str, parts: Mapping[str, Tensor]) -> Tensor:
    layer, projection = stored.removesuffix("_bias").rsplit(".", 1)
    names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
    kind = "bias" if stored.endswith("_bias") else "weight"
    count = len(parts) // len(names)
    first = parts[f"{layer}.0.{names[0]}.{kind}"]
    out, rest = len(first) * len(names), first.shape[1:]
    if config.moe is not None and not config.moe.biases:
        by_output = first.new_empty((count, out, *rest))
        for expert in range(count):
            for name, place in zip(names, by_output[expert].chunk(len(names)), strict=True):
                place.copy_(parts[f"{layer}.{expert}.{name}.weight"])
        return by_output
    fused = first.new_empty((count, *rest, out))
    for expert in range(count):
        for at, name in enumerate(names):
            fused[expert, ..., at :: len(names)] = parts[f"{layer}.{expert}.{name}.{kind}"].movedim(0, -1)
    return fused
