"""Adapters in conversions: extracted from a Megatron checkpoint into a folder in PEFT's format, or merged into a Hugging Face folder.

A merge reads the folder slice by slice. W becomes W + s B A (LoRA, arXiv:2106.09685, section 4.1; s: alpha / r, or
alpha / sqrt(r) for rsLoRA, arXiv:2312.03732), or m (W + s B A) / |W + s B A| by rows (DoRA, arXiv:2402.09353, equation 5),
computed in float32 whatever types the files have.
"""

import shutil
from collections.abc import Iterator, Sequence

import torch

from megarl.checkpoints.convert.sources import MegatronSource, Part, Source
from megarl.checkpoints.convert.targets import narrow_into
from megarl.checkpoints.dcp import DCPReader, StoredTensor
from megarl.checkpoints.hf.export import save_tensors
from megarl.checkpoints.hf.peft import PREFIX, WEIGHTS_FILE, PeftReader
from megarl.checkpoints.hf.peft_config import CONFIG_FILE, read_facts
from megarl.layout import Box, Copy
from megarl.models.lora import IN_CHECKPOINTS, MAGNITUDE, A, B
from megarl.models.table import VALUE_HEAD
from megarl.util.files import whole_folder


def extract_adapters(source: Source, target: str, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Write a checkpoint's adapters into the new folder `target`, and the value head that was trained with them; returns them.

    Args:
        dtype: of the written tensors; None: each keeps its own.

    Raises:
        ValueError: a checkpoint without adapters, or whose adapters are incomplete, not of its model, or have values beyond the range of
            `dtype`.
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
    keys = {key: key.removeprefix(IN_CHECKPOINTS) for key in source.adapters}
    # The facts name the head as one that is there in full, and PEFT would begin a new one where it is not.
    if "score" in read_facts(source.folder).heads and source.head == "value":
        keys["value_head.weight"] = VALUE_HEAD
    tensors = {}
    for key, name in keys.items():
        stored = source.reader.tensors[key]
        tensors[PREFIX + name] = _read_full(source.reader, key, stored, dtype or stored.dtype)
    with whole_folder(target) as folder:
        save_tensors(tensors, folder / WEIGHTS_FILE)
        shutil.copyfile(facts, folder / CONFIG_FILE)
        with PeftReader(str(folder), source.config) as written:
            written.check_base()
    return tensors


def _read_full(reader: DCPReader, key: str, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor put together from its chunks."""
    if sum(chunk.box.numel for chunk in stored.chunks) != Box.whole(stored.shape).numel:
        raise ValueError(f"checkpoint {reader.folder}: {key} is incomplete")
    tensor = torch.empty(stored.shape, dtype=dtype)
    for chunk in stored.chunks:
        narrow_into(tensor[chunk.box.slices], reader.load(chunk), f"checkpoint {reader.folder}", key)
    return tensor


class MergedSource:
    """A source with the adapters of the folder at `adapter` merged into it; see `Source`.

    Raises:
        ValueError: `base` is no Hugging Face folder, or `adapter` no folder of adapters.
    """

    kind = "hf"
    ignored = ""

    def __init__(self, base: Source, adapter: str) -> None:
        if base.kind != "hf":
            raise ValueError(
                f"--merge needs a Hugging Face folder, found the Megatron checkpoint {base.path!r}; convert it first"
            )
        self.base, self.adapter, self.path = base, adapter, base.path
        self.companions, self.config, self.layout = base.companions, base.config, base.layout
        self.head, self.mtp = base.head, base.mtp
        with PeftReader(adapter, base.config) as reader:
            self._modules = frozenset(reader.check_base())
            self._has_head = VALUE_HEAD in reader.names
        if self._has_head and self.head != "value":
            raise ValueError(
                f"adapter {adapter!r} has a value head ({VALUE_HEAD}), {base.path!r} is a language model; merge it into a "
                "model with a value head"
            )

    def check(self) -> None:
        self.base.check()

    def dtype(self, local: str) -> torch.dtype:
        return self.base.dtype(local)

    def read(self, copies: Sequence[Copy]) -> Iterator[Part]:
        with PeftReader(self.adapter, self.config) as reader:
            for part in self.base.read(copies):
                tensor, box = part.copy.tensor, part.copy.box
                assert part.box == part.copy.target_box, "a Hugging Face folder is read copy by copy"
                if tensor == VALUE_HEAD and self._has_head:
                    part = part._replace(values=reader.read(tensor, box))
                elif tensor.removesuffix(".weight") in self._modules:
                    module = tensor.removesuffix(".weight")
                    part = part._replace(values=merge_rows(part.values, reader, module, box))
                yield part


def merge_rows(weight: torch.Tensor, reader: PeftReader, module: str, box: Box) -> torch.Tensor:
    """Rows of a weight with its adapter merged into them.

    Args:
        weight: [*box.size], of any type.
        module: the weight's name without ".weight".
        box: which of the weight's rows; with DoRA it has all columns.

    Returns: [*box.size], float32.

    Raises:
        ValueError: values of the adapter, or of finite weights with it, are not finite.
    """
    (row, column), (rows, columns) = box
    rank = reader.rank(module)
    a = reader.read(module + A, Box((0, column), (rank, columns))).float()
    b = reader.read(module + B, Box((row, 0), (rows, rank))).float()
    merged = torch.addmm(weight.float(), b, a, alpha=reader.scaling(module))
    if reader.facts.use_dora:
        assert columns == reader.shape(module + A)[1], f"{module}: a row is read in parts"
        m = reader.read(module + MAGNITUDE, Box((row,), (rows,))).float()
        merged *= (m / torch.linalg.vector_norm(merged, dim=1))[:, None]
    if not merged.isfinite().all() and weight.isfinite().all():
        raise ValueError(
            f"adapter {reader.path!r}: with it {module}.weight has values that are no finite numbers"
        )
    return merged
