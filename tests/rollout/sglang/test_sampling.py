"""SGLang's sampling by seed with top_k, top_p and min_p: its function, and megarl's hooks around it."""

from functools import partial

import pytest
import torch

NUM = 4000


def sample(engine, probs, top_k=1 << 30, top_p=1.0, min_p=0.0):
    """The tokens of NUM seeds [NUM]; runs in the engine's process, where SGLang is imported."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as original

    from megarl.rollout.sglang.process import cut_by_min_p

    row = partial(torch.full, (NUM,))
    cuts = row(top_k, dtype=torch.int32), row(top_p), row(min_p)
    seeds, positions = torch.arange(NUM), row(7)
    return cut_by_min_p(original, probs.repeat(NUM, 1), *cuts, min_p > 0, seeds, positions)


@pytest.mark.parametrize(
    ("cuts", "kept"),
    [
        ({}, 6),
        ({"min_p": 0.3}, 3),  # tokens with a probability of at least 0.12
        ({"top_k": 4, "min_p": 0.3}, 3),
        ({"top_k": 2, "min_p": 0.3}, 2),
        ({"top_p": 0.5, "min_p": 0.3}, 2),  # the second token brings the sum above 0.5
        ({"top_p": 0.99, "min_p": 0.2}, 4),
    ],
)
def test_tokens_follow_what_the_cuts_leave(engine, cuts, kept):
    probs = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.15, 0.05])
    tokens = engine.call(partial(sample, **cuts), probs)
    order = probs.argsort(descending=True, stable=True)
    expected = torch.zeros(6)
    expected[order[:kept]] = probs[order[:kept]] / probs[order[:kept]].sum()
    counts = torch.bincount(tokens, minlength=6)
    assert not counts[expected == 0].any()
    there = expected > 0
    # chi-squared with kept - 1 degrees of freedom, five standard deviations of slack
    chi = ((counts - NUM * expected) ** 2 / (NUM * expected))[there].sum().item()
    assert chi < (kept - 1) + 5 * (2 * (kept - 1)) ** 0.5
    assert torch.equal(tokens, engine.call(partial(sample, **cuts), probs))
