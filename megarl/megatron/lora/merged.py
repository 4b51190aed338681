"""A rank's weights as they are with adapters merged into them, each made when it is asked for.

Guarantee: only the last one is kept, so a caller that keeps none has one merged tensor in addition to the model at a time,
and many slices of one weight cost one merge.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel

from megarl.megatron.build import local_parameters, unwrap
from megarl.megatron.lora.adapter import Adapter, ExpertAdapter
from megarl.megatron.lora.fp8_base import ExactWeights
from megarl.models.lora import ADAPTER


class MergedParameters(Mapping[str, torch.Tensor]):
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
        self._last: tuple[str, torch.Tensor] | None = None
        hidden: set[str] = set()
        self._merge: dict[str, Callable[[], torch.Tensor]] = {}
        for index, chunk in enumerate(unwrap(chunks)):
            for path, module in chunk.named_modules():
                if not isinstance(module, Adapter | ExpertAdapter):
                    continue
                layer, _, name = path.rpartition(".")
                hidden |= {f"{index}:{path}.{kind}" for kind, _ in module.named_parameters()}
                if name == adapter:
                    self._add(f"{index}:{layer}", chunk.get_submodule(layer), module)
        shown = {name: tensor for name, tensor in local_parameters(chunks).items() if name not in hidden}
        self._plain = ExactWeights(shown, unwrap(chunks))
        for name in self._plain.in_float8:
            self._merge.setdefault(name, partial(self._plain.make, name))

    def _add(self, name: str, layer: torch.nn.Module, adapter: Adapter | ExpertAdapter) -> None:
        if isinstance(adapter, Adapter):
            norms = adapter.norms(layer) if hasattr(adapter, "m") else None
            self._merge[f"{name}.weight"] = partial(adapter.merged, layer, norms)
            return
        for expert in range(adapter.num_experts):
            norms = adapter.norms(layer, expert) if hasattr(adapter, "m0") else None
            self._merge[f"{name}.weight{expert}"] = partial(adapter.merged, layer, expert, norms)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._merge:
            return self._plain[name]
        if self._last is None or self._last[0] != name:
            self._last = None  # gone before the next one is made
            self._last = (name, self._merge[name]())
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)
