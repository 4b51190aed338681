"""A Hugging Face folder read as if a folder of adapters were merged into it, slice by slice.

W becomes W + s B A (LoRA, arXiv:2106.09685, section 4.1; s: alpha / r, or alpha / sqrt(r) for rsLoRA, arXiv:2312.03732), or
m (W + s B A) / |W + s B A| by rows (DoRA, arXiv:2402.09353, equation 5), worked out in float32 whatever the types of the
files are.
"""

from collections.abc import Iterator, Sequence

import torch

from megarl.checkpoints.convert.sources import Part, Source
from megarl.checkpoints.hf.peft_files import PeftReader
from megarl.layout import Box, Copy
from megarl.models.lora import MAGNITUDE, A, B
from megarl.models.table import VALUE_HEAD


class MergedSource:
    """A source with the adapters of the folder at `adapter` in it; see `Source`.

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
    """Rows of a weight with its adapter in them.

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
