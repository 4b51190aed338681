"""Which fake tensors have values."""

import torch

from megarl.shadow.collectives import Alike, Collective
from megarl.shadow.mode import FakeMode, Shadow
from megarl.shadow.values import LARGEST_CONSTANT, value_of


def test_integers_that_follow_from_known_ones_are_known() -> None:
    """A router's map of chosen experts is known, though its scores are not."""
    with FakeMode(), Shadow():
        scores = torch.empty(LARGEST_CONSTANT, 3)
        chosen = torch.zeros_like(scores).int().scatter(1, torch.full((2, 1), 2), 1).bool()
        assert value_of(scores) is None
        assert value_of(chosen.sum(0)).tolist() == [0, 0, 2]


def test_what_an_unknown_value_overwrites_is_unknown() -> None:
    """A tensor is unknown if a part of it is overwritten; and so is a tensor from a peer that does not know its values either."""
    with FakeMode(), Shadow():
        unknown = torch.empty(2 * LARGEST_CONSTANT).byte()
        whole = torch.zeros(4, dtype=torch.uint8)
        whole[1:3] = torch.ones(2, dtype=torch.uint8)
        assert value_of(whole).tolist() == [0, 1, 1, 0]
        whole[:2] = unknown[:2]
        assert value_of(whole) is None
        received = torch.zeros_like(unknown)
        assert value_of(received) is not None
        Alike().exchange(Collective("_allgather_base_", (0,)), (received, unknown), lambda: None)
        assert value_of(received) is None


def test_large_floats_of_a_factory_take_no_memory_of_the_host() -> None:
    """The optimizer states of a large model's experts would take as much memory on the host as on the device."""
    with FakeMode(), Shadow():
        weight = torch.empty(LARGEST_CONSTANT + 1)
        for state in (weight, torch.empty_like(weight), weight.new_empty(2 * LARGEST_CONSTANT)):
            assert value_of(state) is None
        assert value_of(torch.empty_like(weight[:4])) is not None


def test_grouped_products_are_counted() -> None:
    """Each counts as one product over all tokens: forward, and for both gradients."""
    with FakeMode(), Shadow() as shadow:
        x, weight = torch.empty(10, 16, dtype=torch.bfloat16), torch.empty(3, 24, 16, dtype=torch.bfloat16)
        ends = torch.tensor([2, 2, 10], dtype=torch.int32)
        out = torch.nn.functional.grouped_mm(
            x.requires_grad_(), weight.requires_grad_().transpose(1, 2), offs=ends
        )
        out.backward(torch.empty_like(out))
        assert shadow.flops[shadow.phase].total() == 3 * 2 * 10 * 16 * 24
