"""A layer's router knows its micro-batch, and keeps nothing else of it."""

import weakref
from types import SimpleNamespace

import torch
from torch import Tensor

from megarl.megatron.packing import PackedBounds
from megarl.megatron.routers import RouterPass


class Layer(torch.nn.Module):
    """A layer whose MLP has a router."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.mlp = SimpleNamespace(sequence_parallel=False), torch.nn.Module()
        self.mlp.router, self.mlp.moe_layer_recompute = torch.nn.Identity(), False

    def forward(self, states: Tensor, *, packed_seq_params: PackedBounds) -> Tensor:
        return self.mlp.router(states)


def test_no_choice_of_keys_outlives_its_micro_batch() -> None:
    """A choice takes a bit for each pair of tokens of a text: on the device while engines generate there it would be gigabytes of long texts."""
    layer, mask = Layer(), torch.tensor([True, False])
    router_pass = RouterPass(layer)
    bounds = PackedBounds(qkv_format="thd", mask=mask, choices={0: torch.zeros(2, 1, dtype=torch.uint8)})
    choice = weakref.ref(bounds.choices[0])
    layer(torch.zeros(2, 4), packed_seq_params=bounds)
    assert router_pass.bounds is not None and router_pass.bounds.mask is mask
    del bounds
    assert choice() is None
