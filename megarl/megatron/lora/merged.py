"""A rank's weights as they are without float8, and with adapters merged into them, each made when it is asked for.

Guarantee: only the last one is kept, so a caller that keeps none has one merged tensor in addition to the model at a time,
and many slices of one weight cost one merge.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl.megatron.build import local_parameters, unwrap
from megarl.megatron.lora.adapter import adapters_in, weight_name
from megarl.megatron.lora.fp8_base import computed_weight, exact_weight
from megarl.models.computed import ComputedWeight, LowRankTerm
from megarl.models.float8 import FP8, SCALES
from megarl.models.lora import ADAPTER


class ExactWeights(Mapping[str, Tensor]):
    """`local_parameters` as if none were in float8: a float8 parameter's values are computed on request.

    Only the last one is kept, so a caller that keeps none has one at a time.
    """

    def __init__(self, tensors: Mapping[str, Tensor], chunks: Sequence[torch.nn.Module]) -> None:
        """
        Args:
            tensors: `local_parameters(chunks)`, or some of them.
            chunks: without their wrapping.
        """
        self.in_float8 = {name for name, tensor in tensors.items() if tensor.dtype == FP8}
        scales = {name + SCALES for name in self.in_float8}
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in scales}
        self._chunks = chunks
        self._makers: dict[str, Callable[[], Tensor]] = {
            name: partial(self._make, name) for name in self.in_float8
        }
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._makers:
            return self._tensors[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # gone before the next one is made
            self._last = (name, self._makers[name]())
        return self._last[1]

    def _make(self, name: str) -> Tensor:
        """One of `in_float8`, as a new tensor."""
        chunk, path = name.split(":", 1)
        layer, _, kind = path.rpartition(".")
        return exact_weight(self._chunks[int(chunk)].get_submodule(layer), kind)

    def computed(self) -> dict[str, ComputedWeight]:
        """The parts from which weights are made on request, valid as long as these parts stay where they are."""
        return {name: self._computed(name, None) for name in self.in_float8}

    def _computed(self, name: str, term: LowRankTerm | None) -> ComputedWeight:
        chunk, path = name.split(":", 1)
        layer, _, kind = path.rpartition(".")
        return computed_weight(self._chunks[int(chunk)].get_submodule(layer), kind, term)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class MergedParameters(ExactWeights):
    """`local_parameters` without the adapters' tensors, and with adapters merged into the weights that have any.

    A weight without adapters is the model's own tensor; one with adapters, or held in float8, is a new one, in the type
    in which the model computes.
    Every rank makes one (with DoRA this works out norms, which ranks share); each may then ask for any tensor. It has
    the weights of the time when it was made: make a new one after an update.
    """

    def __init__(
        self, chunks: list[DistributedDataParallel] | list[GPTModel], adapter: str = ADAPTER
    ) -> None:
        """
        Args:
            adapter: the name of the set that is merged; others are left out.
        """
        shown = local_parameters(chunks)
        merges: dict[str, Callable[[], Tensor]] = {}
        terms: dict[str, Callable[[], LowRankTerm]] = {}
        for index, chunk in enumerate(unwrap(chunks)):
            for path, name, module in adapters_in(chunk):
                for kind, _ in module.named_parameters():
                    del shown[f"{index}:{path}.{name}.{kind}"]
                if name != adapter:
                    continue
                layer = chunk.get_submodule(path)
                for expert in module.experts:
                    norms = module.norms(layer, expert) if module.use_dora else None
                    local = f"{index}:{path}.{weight_name(expert)}"
                    merges[local] = partial(module.merged, layer, expert, norms)
                    terms[local] = partial(module.term, expert, norms)
        super().__init__(shown, unwrap(chunks))
        self._makers |= merges
        self._terms = terms

    def computed(self) -> dict[str, ComputedWeight]:
        merged = {name: self._computed(name, term()) for name, term in self._terms.items()}
        return super().computed() | merged
