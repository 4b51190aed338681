"""Sets of parameters that are trained on one frozen model, one at a time: the actor's adapters, and the critic's with its
value head.

Each set has gradient buffers and an optimizer of its own (`wrap_for_training` and `build_optimizer`, called while the set
is all that asks for gradients). All other differences between the sets lie in the model itself, and are switched:

- which adapters are on;
- which parameters ask for gradients: Megatron's last reductions look at all that do, in whichever buffers they are;
- the settings that all chunks share, where Megatron's schedules look for them (seen with megatron-core 0.19.2).
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megarl.megatron.build import unwrap
from megarl.megatron.lora.adapter import adapters_in


@dataclass(frozen=True)
class ParameterSet:
    """Parameters that are trained together.

    Attributes:
        adapter: the name of its adapters.
        parameters: its adapters' and, if there is one, the value head's.
        no_sync, scale: Megatron's settings for it.
    """

    chunks: list[DistributedDataParallel]
    adapter: str
    parameters: tuple[torch.nn.Parameter, ...]
    no_sync: Callable | list[Callable] | None
    scale: Callable[[Any], Any] | None

    def switch_on(self) -> None:
        """Have this set alone trained and computed with, until another one is switched on."""
        own = set(self.parameters)
        for chunk in unwrap(self.chunks):
            for _, name, module in adapters_in(chunk):
                module.on = name == self.adapter
            for parameter in chunk.parameters():
                parameter.requires_grad_(parameter in own)
            chunk.config.no_sync_func, chunk.config.grad_scale_func = self.no_sync, self.scale


def parameter_set(chunks: list[DistributedDataParallel], adapter: str) -> ParameterSet:
    """The set that asks for gradients now; called when its optimizer has been built."""
    parameters = tuple(
        parameter for chunk in unwrap(chunks) for parameter in chunk.parameters() if parameter.requires_grad
    )
    settings = chunks[0].config
    return ParameterSet(chunks, adapter, parameters, settings.no_sync_func, settings.grad_scale_func)


@contextlib.contextmanager
def in_turn(one: ParameterSet, usual: ParameterSet) -> Iterator[None]:
    """While this is active, `one` is on; then `usual` is again."""
    one.switch_on()
    try:
        yield
    finally:
        usual.switch_on()
