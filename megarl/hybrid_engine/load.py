"""Hugging Face files -> Megatron shards: each rank reads only the slices that it holds."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.hybrid_engine.layouts import hf_layout, megatron_layout
from megarl.layout import Box, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, logical_tensors


def checkpoint_files(path: str) -> dict[str, Path]:
    """Tensor name -> the safetensors file of the Hugging Face folder that holds it.

    Raises:
        ValueError: no safetensors there, or an index that names a missing file.
    """
    folder = Path(path).expanduser()
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        missing = sorted({file.name for file in files.values() if not file.is_file()})
        if missing:
            raise ValueError(f"{index} names files that are not there: {', '.join(missing)}")
        return files
    if not single.is_file():
        raise ValueError(
            f"model folder {path!r} holds no model.safetensors and no model.safetensors.index.json"
        )
    with open_weights(single) as reader:
        return dict.fromkeys(reader.keys(), single)


def open_weights(file: Path) -> safe_open:
    """Open a safetensors file; ValueError if it is none, or not all of it is there."""
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is no complete safetensors file: {error}") from None


class HFReader:
    """Reads boxes of a Hugging Face checkpoint's tensors without reading the whole tensors."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.files = checkpoint_files(path)
        self._stack = ExitStack()
        self._open: dict[Path, safe_open] = {}

    def __enter__(self) -> "HFReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def check(self, config: ModelConfig, head: str) -> None:
        """Refuse a checkpoint whose names or shapes are not the model's with that head, as the headers tell.

        Raises:
            ValueError: names every tensor that is missing, left over or of another shape.
        """
        shapes = logical_tensors(config, head)
        ignore = {*logical_tensors(config), "lm_head.weight", "score.weight"} - set(shapes)
        if head == "value":
            ignore.add("score.weight")  # may be missing
        wrong = [f"{name} is missing" for name in shapes if name not in self.files and name not in ignore]
        for name in self.files:
            if name in shapes:
                shape = tuple(self._slice(name).get_shape())
                if shape != shapes[name]:
                    wrong.append(f"{name} has shape {shape}, config.json makes it {shapes[name]}")
            elif name not in ignore and not name.endswith("rotary_emb.inv_freq"):
                wrong.append(f"{name} is not a tensor of this model")
        if wrong:
            raise ValueError(f"checkpoint {self.path} does not fit its config: " + "; ".join(wrong))

    def read(self, name: str, box: Box) -> torch.Tensor:
        return self._slice(name)[box.slices]

    def _slice(self, name: str):
        file = self.files[name]
        if file not in self._open:
            self._open[file] = self._stack.enter_context(open_weights(file))
        return self._open[file].get_slice(name)


def check_hf_weights(path: str, config: ModelConfig, head: str = "lm") -> None:
    """Refuse what `load_hf_weights` would refuse, from the headers of the files alone."""
    with HFReader(path) as reader:
        reader.check(config, head)


def load_hf_weights(
    path: str,
    config: ModelConfig,
    parallel: ParallelLayout,
    rank: int,
    parameters: Mapping[str, torch.Tensor],
    head: str = "lm",
) -> None:
    """Fill a Megatron rank's parameters (named as pieces name them) from the checkpoint at `path`.

    Padding rows of the vocabulary become zero. A value head that the checkpoint lacks keeps the values
    it was built with; the language model head of a checkpoint is not read for head="value".

    Raises:
        ValueError: the checkpoint lacks a tensor, has one too many or one of another shape.
    """
    plan = make_plan(hf_layout(config, head), megatron_layout(config, parallel, head), [rank])
    with HFReader(path) as reader:
        reader.check(config, head)
        copies = [copy for copy in plan.copies if copy.tensor in reader.files]
        for local in {copy.target_local for copy in copies}:
            parameters[local].zero_()
        for copy in copies:
            parameters[copy.target_local][copy.target_box.slices].copy_(reader.read(copy.tensor, copy.box))
    unfilled = set(parameters) - {copy.target_local for copy in plan.copies}
    assert not unfilled, f"parameters that no weight table names: {sorted(unfilled)}"
