"""How routers spread tokens over experts: counted while a policy is trained, and evened out by the routers' biases.

A bias is added to an expert's score for the choice alone. After each update the bias of an expert with more tokens than the mean is lowered
by a fixed rate, and that of an expert with fewer is raised ("auxiliary-loss-free load balancing", arXiv:2408.15664, algorithm 1;
DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Gradients never reach it.

Loads are integers, summed over all ranks: the same in every layout, and so are the biases.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megarl import platform
from megarl.megatron.routers import RouterPass, routed_layers


class ExpertLoads:
    """How many trained tokens the routers of a rank's layers gave to each expert since the last `take`, in passes with gradients.

    Recomputed layers count once: their first pass has no gradients. Prompts and alignment do not count, so that loads are the same
    however sequences are packed.
    """

    def __init__(self, chunks: Sequence[GPTModel], num_layers: int, num_experts: int) -> None:
        """
        Args:
            chunks: without their wrapping.
            num_layers: of the complete model, with experts or not.
        """
        self._routers = {}  # by layer of the model
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=platform.device())
        for layer in routed_layers(chunks):
            number = layer.layer_number - 1
            self._routers[number] = layer.mlp.router
            layer.mlp.router.register_forward_hook(partial(self._count, number, RouterPass(layer)))

    def _count(
        self,
        number: int,
        router_pass: RouterPass,
        router: torch.nn.Module,
        inputs: tuple,
        output: tuple[Tensor, Tensor],
    ) -> None:
        if torch.is_grad_enabled():
            assert router_pass.bounds is not None
            mask = router_pass.own_part(router_pass.bounds.mask)
            self._counts[number] += (output[1] & mask[:, None]).sum(0)

    def forget(self) -> None:
        """Begin again."""
        self._counts.zero_()

    def take(self) -> Tensor:
        """The loads of all layers of the model, int64 [layers, experts], the same on all ranks; they begin again. Collective over all ranks.

        Layers without experts have zeros.
        """
        loads = self._counts.clone()
        self.forget()
        dist.all_reduce(loads)
        return loads

    @torch.no_grad()
    def balance(self, loads: Tensor, rate: float) -> None:
        """Move the biases of this rank's routers by `rate` towards equal loads (of `take`)."""
        for layer, router in self._routers.items():
            load = loads[layer].double()
            router.expert_bias += rate * torch.sign(load.mean() - load).to(router.expert_bias.dtype)


def violations(loads: Tensor) -> dict[int, float]:
    """By layer with experts, by how much the largest load exceeds the mean, relative to it (MaxVio, arXiv:2408.15664, equation 4)."""
    mean = loads.double().mean(1)
    found = (loads.max(1).values / mean - 1).tolist()
    return {layer: value for layer, value in enumerate(found) if mean[layer] > 0}
