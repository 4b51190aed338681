"""Which fake tensors have values."""

import torch

from megarl.shadow.mode import FakeMode, Shadow
from megarl.shadow.values import LARGEST_CONSTANT, value_of


def test_integers_that_follow_from_known_ones_are_known() -> None:
    """A router's map of chosen experts, of scores that nobody knows."""
    with FakeMode(), Shadow():
        scores = torch.empty(LARGEST_CONSTANT, 3)
        chosen = torch.zeros_like(scores).int().scatter(1, torch.full((2, 1), 2), 1).bool()
        assert value_of(scores) is None
        assert value_of(chosen.sum(0)).tolist() == [0, 0, 2]


def test_large_floats_of_a_factory_take_no_memory_of_the_host() -> None:
    """Optimizer states of a large model's experts would take as much as on the device."""
    with FakeMode(), Shadow():
        weight = torch.empty(LARGEST_CONSTANT + 1)
        for state in (weight, torch.empty_like(weight), weight.new_empty(2 * LARGEST_CONSTANT)):
            assert value_of(state) is None
        assert value_of(torch.empty_like(weight[:4])) is not None
