"""One checkpoint into another: planned, moved file by file, checked before it appears."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from megarl.checkpoints.convert.adapters import MergedSource, extract_adapters
from megarl.checkpoints.convert.sources import Source, open_source
from megarl.checkpoints.convert.targets import TARGETS, Moves
from megarl.checkpoints.hf.export import NORMALIZATION_FILE, one_label_fields, read_companions
from megarl.checkpoints.hf.fused import find_vision_tensors
from megarl.util.files import whole_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion. `left_out`: the parts of the source that were left out, in words."""

    num_tensors: int
    num_bytes: int
    num_files: int
    left_out: tuple[str, ...]


def convert(
    source: str,
    target: str,
    *,
    to: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = 4 << 30,
    mtp: bool = True,
    companions: str | None = None,
    adapter: str | None = None,
    console: Console | None = None,
) -> Conversion:
    """Write the checkpoint `source` as another one, the new folder `target`.

    Args:
        to: "hf", "megatron", or "peft" for the adapters that a Megatron checkpoint has in addition to its weights; None: the
            other format than the source's, or "hf" with an adapter.
        dtype: of the weights, one of DTYPES; None: each keeps its own.
        shard_bytes: size of a file; a larger tensor has a file of its own.
        mtp: whether multi-token prediction layers are kept.
        companions: the Hugging Face folder to take config and tokenizer from, for a Megatron checkpoint that has
            none of its own.
        adapter: folder of adapters in PEFT's format to merge into the weights of a Hugging Face folder.
        console: where progress is shown.

    Raises:
        ValueError: a wrong argument; a source with anything missing, left over or of another shape than its config
            makes it; tensors of different types that one tensor is to hold; a value beyond the largest of `dtype`; an
            adapter that is not of this model, or not finite.
        OSError: the disk is full or not writable.
        In either case nothing is left of the target.
    """
    _check_arguments(target, to, dtype, shard_bytes)
    opened = open_source(source, companions, mtp)
    # Adapters alone are few enough to be read at once.
    if to == "peft":
        if adapter is not None:
            raise ValueError(
                "--merge makes a model of an adapter, --to peft takes adapters out of a checkpoint"
            )
        tensors = extract_adapters(opened, target, DTYPES.get(dtype))
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return Conversion(len(tensors), num_bytes, 1, ())
    # All checks come before the first file is written.
    if adapter is not None:
        opened = MergedSource(opened, adapter)
    opened.check()
    kind = to or ("megatron" if opened.kind == "hf" and adapter is None else "hf")
    if kind == "hf" and opened.config.is_nested:
        find_vision_tensors(opened.companions)
    writing = TARGETS[kind](opened.config, opened.head, opened.mtp)
    moves = Moves(opened, writing, DTYPES.get(dtype))
    files = moves.files(shard_bytes)
    fields = _head_fields(opened) if kind == "hf" else None
    companion_files = read_companions(opened.companions, opened.config, moves.main_dtype, opened.mtp, fields)
    left_out = [opened.ignored] if opened.ignored else []
    normalization = opened.companions / NORMALIZATION_FILE
    if opened.head == "value" and normalization.is_file():
        if adapter is None and (companions is None or opened.kind == "hf"):
            companion_files[NORMALIZATION_FILE] = normalization.read_bytes()
        else:
            left_out.append(f"{NORMALIZATION_FILE}, which was measured on other weights")
    with whole_folder(target) as folder:
        with progress(console, moves.num_bytes, f"{opened.kind} -> {kind}") as advance:
            for at, items in enumerate(files):
                tensors = moves.assemble(items)
                writing.write_file(folder, at, len(files), tensors)
                advance(sum(tensor.nbytes for tensor in tensors.values()))
                del tensors  # before the next file's are made
        writing.finish(folder, companion_files, opened.companions)
        _check_written(folder / writing.checkpoint, moves)
    if opened.config.num_mtp_layers and not opened.mtp:
        left_out.append("multi-token prediction layers")
    return Conversion(len(moves.dtypes), moves.num_bytes, len(files), tuple(left_out))


def _head_fields(source: Source) -> dict[str, Any] | None:
    """Fields of config.json for the weights' head: of a critic or reward model that was trained from a language model's folder the
    checkpoint's config is the language model's. None: the config fits.

    Whether the padding token also ends texts is read from the config, which may name several ends.
    """
    hf = source.config.hf
    if source.head != "value" or not source.config.architecture.endswith("ForCausalLM"):
        return None
    pad, ends = hf.get("pad_token_id"), hf.get("eos_token_id")
    is_end = pad in (ends if isinstance(ends, list) else [ends])
    return one_label_fields(source.config, None if is_end else pad)


def _check_arguments(target: str, to: str | None, dtype: str | None, shard_bytes: int) -> None:
    if Path(target).exists():
        raise ValueError(f"{target!r} exists; name a new folder, or remove it first")
    kinds = (*TARGETS, "peft")
    if to not in (None, *kinds):
        raise ValueError(f"a checkpoint can be converted to {', '.join(kinds)}, not to {to!r}")
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    if shard_bytes < 1:
        raise ValueError(f"the size of a file must be at least a byte, found {shard_bytes}")


def _check_written(folder: Path, moves: Moves) -> None:
    """Read names, shapes and types of the written files, and compare them with the target's definition."""
    written = open_source(str(folder))
    assert written.kind == moves.target.kind
    written.check()
    wrong = [
        f"{local} was written as {written.dtype(local)} instead of {dtype}"
        for local, dtype in moves.dtypes.items()
        if written.dtype(local) != dtype
    ]
    assert not wrong, wrong


@contextmanager
def progress(console: Console | None, num_bytes: int, text: str) -> Iterator[Callable[[int], None]]:
    if console is None:
        yield lambda advance: None
        return
    with Progress(*Progress.get_default_columns(), console=console) as progress:
        task = progress.add_task(text, total=num_bytes)
        yield lambda advance: progress.advance(task, advance)
