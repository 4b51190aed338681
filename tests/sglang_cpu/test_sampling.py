"""Sampling with one random number a token: its numbers, and that tokens come as often as they should."""

import numpy as np
import pytest
import torch

from megarl.sglang_cpu.sampling import sample, uniforms

NUM = 4000
PROBS = torch.tensor([0.0, 0.1, 0.4, 0.0, 0.05, 0.25, 0.15, 0.05, 0.0])


def original(*args):
    return "SGLang's own"


def draw(probs, seeds, position=7):
    """probs: [n, vocabulary]."""
    return sample(original, probs, seeds, torch.full((len(seeds),), position))


def test_numbers_are_splitmix64s():
    """The first five of seed 1234567, as Rosetta Code has them ("Pseudo-random numbers/Splitmix64")."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    found = uniforms(np.full(5, 1234567), np.arange(5))
    assert (found * 2**53).astype(np.uint64).tolist() == [number >> 11 for number in expected]
    assert found.max() < 1


@pytest.mark.parametrize("seeds", [torch.arange(NUM), (torch.arange(NUM) << 40) + 3])
@pytest.mark.parametrize("position", [0, 4096])
def test_tokens_follow_the_probabilities(seeds, position):
    tokens = draw(3.0 * PROBS.repeat(NUM, 1), seeds, position)  # they need not sum to 1
    there, counts = PROBS > 0, torch.bincount(tokens, minlength=len(PROBS))
    assert not counts[~there].any()
    # chi-squared with 5 degrees of freedom, five standard deviations of slack
    expected = NUM * PROBS[there]
    assert ((counts[there] - expected) ** 2 / expected).sum().item() < 5 + 5 * 10**0.5


def test_tokens_of_a_sequence_follow_the_probabilities():
    """Those of one seed, at position after position: as often after each other as they should."""
    positions = torch.arange(NUM)
    tokens = sample(original, PROBS.repeat(NUM, 1), torch.full((NUM,), 2**62 + 5), positions).long()
    pairs = torch.bincount(tokens[:-1] * len(PROBS) + tokens[1:], minlength=len(PROBS) ** 2)
    expected = torch.outer(PROBS, PROBS).flatten() * (NUM - 1)
    there = expected > 0
    assert not pairs[~there].any()
    chi = ((pairs - expected)[there] ** 2 / expected[there]).sum().item()
    assert chi < 35 + 5 * 70**0.5


def test_a_token_depends_on_its_own_row_alone():
    """In a large vocabulary, whose sums in another order would differ."""
    probs = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    seeds = torch.arange(16)
    together = draw(probs, seeds)
    assert together.dtype == torch.int32 and len(set(together.tolist())) > 8
    for row in range(16):
        assert draw(probs[row : row + 1].clone(), seeds[row : row + 1]).item() == together[row]
    assert torch.equal(draw(probs[::2], seeds[::2]), together[::2])


def test_what_is_no_number_is_no_index_either():
    tokens = draw(torch.full((4, 50), float("nan")), torch.arange(4))
    assert ((tokens >= 0) & (tokens < 50)).all()


def test_without_seeds_it_is_sglangs():
    assert sample(original, PROBS[None], None, None) == "SGLang's own"
