"""The adapters that a Megatron checkpoint holds, as a folder in PEFT's format."""

import shutil

import torch

from megarl.checkpoints.convert.moves import narrow_into
from megarl.checkpoints.convert.sources import MegatronSource, Source
from megarl.checkpoints.dcp import DCPReader, StoredTensor
from megarl.checkpoints.hf.folder import save_tensors
from megarl.checkpoints.hf.peft_facts import CONFIG_FILE
from megarl.checkpoints.hf.peft_files import PREFIX, WEIGHTS_FILE, PeftReader
from megarl.layout import Box
from megarl.models.lora import IN_CHECKPOINTS
from megarl.util.files import whole_folder


def extract_adapters(source: Source, target: str, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Write a checkpoint's adapters into the new folder `target`; returns them.

    Args:
        dtype: what they are written as; None: each keeps its own.

    Raises:
        ValueError: a checkpoint without adapters, or whose adapters are not whole, not of its model, or hold values that
            `dtype` does not.
        OSError: the disk is full or not writable.
        In either case nothing is left of the target.
    """
    if not isinstance(source, MegatronSource) or not source.adapters:
        raise ValueError(f"{source.path!r} has no adapters: --to peft takes those of a Megatron checkpoint")
    facts = source.folder / CONFIG_FILE
    if not facts.is_file():
        raise ValueError(
            f"checkpoint {source.path!r} has adapters, but no {CONFIG_FILE} that says what they are"
        )
    tensors = {
        PREFIX + key.removeprefix(IN_CHECKPOINTS): _whole(source.reader, key, stored, dtype or stored.dtype)
        for key, stored in source.adapters.items()
    }
    with whole_folder(target) as folder:
        save_tensors(tensors, folder / WEIGHTS_FILE)
        shutil.copyfile(facts, folder / CONFIG_FILE)
        with PeftReader(str(folder), source.config) as written:
            written.check_base()
    return tensors


def _whole(reader: DCPReader, key: str, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor put together from its chunks."""
    if sum(chunk.box.numel for chunk in stored.chunks) != Box.whole(stored.shape).numel:
        raise ValueError(f"checkpoint {reader.folder}: {key} is not whole")
    tensor = torch.empty(stored.shape, dtype=dtype)
    for chunk in stored.chunks:
        narrow_into(tensor[chunk.box.slices], reader.load(chunk), f"checkpoint {reader.folder}", key)
    return tensor
