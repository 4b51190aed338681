"""Hugging Face files -> Megatron shards: each rank reads only the slices that it holds."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megarl.checkpoints.hf.fused import of_language_model, read_part, split_experts
from megarl.layout import Box, Copy, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, logical_tensors, mtp_copies, read_model_config
from megarl.models.float8 import ROW_SCALES, SCALES, Block, dequantise, in_blocks, quantise
from megarl.models.table import VALUE_HEAD, VALUE_HEAD_BIAS
from megarl.models.weight_files import stored_tensors
from megarl.weight_sync.layouts import hf_layout, megatron_layout

_FLOAT8 = "F8_E4M3"
# safetensors' names
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    _FLOAT8: torch.float8_e4m3fn,
}


def open_weights(file: Path) -> safe_open:
    """Open a safetensors file; ValueError if it is none, or not all of it is there."""
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is no complete safetensors file: {error}") from None


class HFReader:
    """Reads boxes of a Hugging Face checkpoint's tensors (`tensors`, by name) without reading entire tensors.

    A tensor in float8 (e4m3) with a scale for each block of it, `<name>_scale_inv` (DeepSeek-V3's checkpoints and others
    made like them), is read as the values that it stands for: each element times its block's scale; so is one with a scale for each row,
    `<name>_scale` (compressed-tensors'). Experts that are stored
    in one tensor are read as single ones, and a language model beside a vision tower as if it were alone (`megarl.checkpoints.hf.fused`).
    A classifier's head of two labels is read as one of one label where `two_labels` allows it: the second row less the first, whose output is
    the logit of the second label's probability, but for the bias (`two_label_bias`).
    """

    def __init__(self, path: str, two_labels: bool = False) -> None:
        self.path = path
        stored = stored_tensors(path)
        self._names = of_language_model(stored)
        self._files = {name: stored[own] for name, own in self._names.items()}
        self.tensors, self._parts = split_experts(self._files, lambda: self._config.family == "qwen3_5_moe")
        self._stack = ExitStack()
        self._open: dict[Path, safe_open] = {}
        found = [self.tensors[name].shape for name in (VALUE_HEAD, VALUE_HEAD_BIAS) if name in self.tensors]
        self.has_two_labels = two_labels and [shape[0] for shape in found] == [2, 2]

    def __enter__(self) -> "HFReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def check(self, config: ModelConfig, head: str, mtp: bool = False) -> None:
        """Refuse a checkpoint whose names or shapes are not the model's with that head, as the headers tell.

        mtp: whether its multi-token prediction layers must be there, but for tensors that repeat the model's; without it
            they may be there or not.

        Raises:
            ValueError: names every tensor that is missing, left over or of another shape.
        """
        shapes = logical_tensors(config, head, mtp)
        copies = mtp_copies(config) if mtp else {}
        ignore = {*logical_tensors(config, mtp=True), "lm_head.weight", "score.weight"} - set(shapes)
        if self.has_two_labels:
            ignore.add(VALUE_HEAD_BIAS)
        optional = {*ignore, *copies, *(("score.weight",) if head == "value" else ())}
        wrong = [f"{name} is missing" for name in shapes if name not in self.tensors and name not in optional]
        for name in self.tensors:
            tensor = _scaled_by(name)
            if tensor in shapes:
                wrong += self._mistakes(name, shapes[tensor], config)
            elif tensor not in ignore and not name.endswith("rotary_emb.inv_freq"):
                wrong.append(f"{name} is not a tensor of this model")
        if wrong:
            raise ValueError(f"checkpoint {self.path} does not fit its config: " + "; ".join(wrong))

    def _mistakes(self, name: str, shape: tuple[int, ...], config: ModelConfig) -> Iterator[str]:
        """The mistakes of the tensor `name`, which should have `shape` or hold the scales of a tensor of this shape."""
        found, tensor = self.shape(name), _scaled_by(name)
        quantised = tensor in self.tensors and self.tensors[tensor].dtype == _FLOAT8
        of_rows = (1, shape[-1]) if config.scaled_channels else None
        if name != tensor:
            block = config.fp8_block if name.endswith(SCALES) else of_rows
            if block is None or not quantised:
                reason = (
                    "config.json says of no quantisation" if block is None else f"{tensor} is not in float8"
                )
                yield f"{name} is there, but {reason}"
                return
            shape = in_blocks(shape, block)
        elif quantised and name + (ROW_SCALES if of_rows else SCALES) not in self.tensors:
            yield f"{name} is in float8, but {name}{ROW_SCALES if of_rows else SCALES} is missing"
        if found != shape:
            yield f"{name} has shape {found}, config.json makes it {shape}"

    def check_mtp_copies(self, config: ModelConfig) -> None:
        """Refuse MTP layers whose repeated embedding or head is not the model's; reads all of them.

        Raises:
            ValueError: names the tensors that differ.
        """
        for name, original in mtp_copies(config).items():
            if name in self.tensors and not self._equal(name, original):
                raise ValueError(f"checkpoint {self.path}: {name} should be equal to {original}, but is not")

    def _equal(self, name: str, other: str) -> bool:
        (rows, *rest), step = self.shape(name), 4096
        for first in range(0, rows, step):
            box = Box.rows(first, min(step, rows - first), (rows, *rest))
            if not torch.equal(self.read(name, box), self.read(other, box)):
                return False
        return True

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The values in the box; float32 for a tensor in float8 with scales, and for a head of two labels."""
        if name == VALUE_HEAD and self.has_two_labels:
            first, second = self._slice(name)[(slice(0, 2), *box.slices[1:])].float()
            return (second - first)[None]
        if name in self._parts:
            return read_part(self._parts[name], box, self._slice)
        values = self._slice(name)[box.slices]
        found = self._scales_of(name)
        if found is None:
            return values
        (row, column), (rows, columns) = box.start, found.block
        scales = self._slice(found.name)[_blocks_of(box, found.block)].float()
        return dequantise(values, scales, found.block, torch.float32, (row % rows, column % columns))

    def _scales_of(self, name: str) -> "_Scales | None":
        """The scales of a tensor in float8; None: it has none."""
        if name + ROW_SCALES in self.tensors:
            return _Scales(name + ROW_SCALES, (1, self.tensors[name].shape[-1]))
        if name + SCALES not in self.tensors:
            return None
        block = self._config.fp8_block
        assert block is not None, f"{name}{SCALES} is there, but config.json says of no quantisation"
        return _Scales(name + SCALES, block)

    @cached_property
    def _config(self) -> ModelConfig:
        return read_model_config(self.path)

    def read_blocks(self, name: str, box: Box, block: Block) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Values and scales as the file has them, of a box of complete blocks; None: the tensor has no blocks of this size."""
        if name + SCALES not in self.tensors or self._config.fp8_block != block:
            return None
        return self._slice(name)[box.slices], self._slice(name + SCALES)[_blocks_of(box, block)]

    def two_label_bias(self) -> float:
        """The number that, added to the output of the head of one label, gives the logit of the second label's probability."""
        assert self.has_two_labels
        first, second = self._slice(VALUE_HEAD_BIAS)[:].double().tolist()
        return second - first

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as `read` gives it."""
        shape = self.tensors[name].shape
        return (1, *shape[1:]) if name == VALUE_HEAD and self.has_two_labels else shape

    def dtype(self, name: str) -> torch.dtype:
        """The type of the tensor's values: as the file has it, or the model's own for one in float8 with scales.

        Raises:
            ValueError: a type that no weight has; names the tensor.
        """
        if self._scales_of(name) is not None:
            return getattr(torch, self._config.dtype)
        found = self.tensors[name].dtype
        if found not in _DTYPES:
            raise ValueError(
                f"{self.tensors[name].file}: {name} is of type {found}; supported: {', '.join(_DTYPES)}"
            )
        return _DTYPES[found]

    def _slice(self, name: str):
        file = self._files[name].file
        if file not in self._open:
            self._open[file] = self._stack.enter_context(open_weights(file))
        return self._open[file].get_slice(self._names[name])


class _Scales(NamedTuple):
    """The name of a tensor's scales, and the block that shares one."""

    name: str
    block: Block


def _scaled_by(name: str) -> str:
    """The name of the tensor whose scales are in `name`; `name` itself if it has no scales."""
    if name.endswith("weight" + ROW_SCALES):
        return name.removesuffix(ROW_SCALES)
    return name.removesuffix(SCALES)


def check_hf_weights(
    path: str, config: ModelConfig, head: str = "lm", mtp: bool = False, copies: bool = False
) -> None:
    """Refuse files that `load_hf_weights` would refuse, from their headers alone.

    Args:
        mtp: whether multi-token prediction layers must be there, too.
        copies: whether their copies of the model's embedding and head must be equal to these; both are then read.
    """
    with HFReader(path) as reader:
        reader.check(config, head, mtp)
        if copies:
            reader.check_mtp_copies(config)


def load_hf_weights(
    path: str,
    config: ModelConfig,
    parallel: ParallelLayout,
    rank: int,
    parameters: Mapping[str, torch.Tensor],
    head: str = "lm",
    base_block: int | None = None,
    mtp: bool = False,
    two_labels: bool = False,
) -> None:
    """Fill a Megatron rank's parameters (named as pieces name them) from the checkpoint at `path`.

    Padding rows of the vocabulary become zero. A value head that the checkpoint lacks keeps the values
    it was built with; the language model head of a checkpoint is not read for head="value".

    Args:
        base_block: rows and columns of a block of the parameters that are in float8 (`build_model`). These are taken as
            they are from a checkpoint with blocks of this size; others are quantised, one parameter at a time.
        mtp: whether the model was built with its multi-token prediction layers.
        two_labels: as in `HFReader`.

    Raises:
        ValueError: the checkpoint lacks a tensor, has one too many or one of another shape.
    """
    plan = make_plan(hf_layout(config, head, mtp), megatron_layout(config, parallel, head, mtp=mtp))
    needed = plan.copies_to(rank)
    with HFReader(path, two_labels) as reader:
        reader.check(config, head, mtp)
        copies = [copy for copy in needed if copy.tensor in reader.tensors]
        in_blocks = {local for local in parameters if local + SCALES in parameters}
        for local in {copy.target_local for copy in copies} - in_blocks:
            parameters[local].zero_()
        for copy in copies:
            if copy.target_local not in in_blocks:
                parameters[copy.target_local][copy.target_box.slices].copy_(
                    reader.read(copy.tensor, copy.box)
                )
        if in_blocks:
            assert base_block is not None
            load_blocks(reader, copies, parameters, in_blocks, (base_block, base_block))
    unfilled = (
        set(parameters) - {copy.target_local for copy in needed} - {f"{name}{SCALES}" for name in in_blocks}
    )
    assert not unfilled, f"parameters that no weight table names: {sorted(unfilled)}"


def load_value_head(path: str, weight: torch.Tensor) -> None:
    """Fill a value head's weight from the checkpoint at `path`; one that it lacks keeps its values."""
    with HFReader(path) as reader:
        if VALUE_HEAD in reader.tensors:
            weight.copy_(reader.read(VALUE_HEAD, Box.whole(tuple(weight.shape))))


def load_blocks(
    reader: HFReader,
    copies: Iterable[Copy],
    parameters: Mapping[str, torch.Tensor],
    names: set[str],
    block: Block,
) -> None:
    """Fill the parameters `names`, each of which comes with its scales.

    In addition to the model one parameter's values are held at a time, in float32.

    Args:
        copies: the checkpoint's slices and their places in the parameters; no slice of `names` cuts a block.
    """
    by_name: dict[str, list[Copy]] = {name: [] for name in names}
    for copy in copies:
        if copy.target_local in by_name:
            by_name[copy.target_local].append(copy)
    for name, parts in by_name.items():
        values, scales = parameters[name], parameters[name + SCALES]
        for copy in parts:
            place = values[copy.target_box.slices]
            place_of_scales = scales[_blocks_of(copy.target_box, block)]
            stored = reader.read_blocks(copy.tensor, copy.box, block)
            if stored is None:
                quantise(reader.read(copy.tensor, copy.box).to(values.device), block, place, place_of_scales)
            else:
                place.copy_(stored[0])
                place_of_scales.copy_(stored[1])


def _blocks_of(box: Box, block: Block) -> tuple[slice, ...]:
    return tuple(
        slice(start // step, -(-(start + extent) // step))
        for start, extent, step in zip(box.start, box.size, block, strict=True)
    )
