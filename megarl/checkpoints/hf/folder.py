"""What makes up a Hugging Face folder: the weights' files and their index, config, tokenizer, generation config."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megarl.models import ModelConfig
from megarl.util.files import json_object

# what a model folder holds beside its weights: config.json is written anew
_COMPANIONS = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt",
               "chat_template*", "added_tokens.json", "*.model", "*.py")  # fmt: skip


def read_companions(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    mtp: bool = False,
    fields: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """What the Hugging Face folder of a model holds beside its weights, for a copy of it: file name -> content.

    Args:
        dtype: of the copy's weights, which its config says; a config that says that they are quantised no longer does.
        mtp: whether the copy has the model's multi-token prediction layers; otherwise its config says that there are none.
        fields: what else its config says in place of the model's.

    Raises:
        ValueError: names one of these files that should hold a JSON object, and does not.
        OSError: one cannot be read.
    """
    hf = {**config.hf, "dtype": str(dtype).removeprefix("torch.")}
    for key in ("torch_dtype", "quantization_config"):
        hf.pop(key, None)
    if config.num_mtp_layers and not mtp:
        hf["num_nextn_predict_layers"] = 0
    hf |= fields or {}
    found = (file for pattern in _COMPANIONS for file in folder.glob(pattern) if file.is_file())
    files = {file.name: file.read_bytes() for file in found}
    for name, content in files.items():
        if name.endswith(".json"):
            json_object(content, str(folder / name))
    return {**files, "config.json": (json.dumps(hf, indent=2) + "\n").encode()}


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the disk is full or not writable.
    """
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
    except SafetensorError as error:  # how safetensors says that the disk is full: "... (os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error), str(file)) from error


class HFFolderWriter:
    """Writes the weights into `folder` as `num_files` safetensors files, and an index of more than one."""

    def __init__(self, folder: Path, num_files: int) -> None:
        self.folder, self.num_files = folder, num_files
        self._weight_map: dict[str, str] = {}
        self._bytes = 0

    def write_file(self, at: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write file `at`, from 0.

        Raises:
            OSError: the disk is full or not writable.
        """
        name = "model.safetensors"
        if self.num_files > 1:
            name = f"model-{at + 1:05d}-of-{self.num_files:05d}.safetensors"
        save_tensors(tensors, self.folder / name)
        self._weight_map |= dict.fromkeys(tensors, name)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def finish(self, companions: Mapping[str, bytes]) -> None:
        if self.num_files > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": self._weight_map}
            path = self.folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n")
        for name, content in companions.items():
            (self.folder / name).write_bytes(content)
