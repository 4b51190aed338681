"""Sampling on a CPU with one random number a token.

SGLang draws with a request's seed by Gumbel noise: a hash, two logarithms and a sum in float64 for each entry of the vocabulary,
which a GPU has at hand (0.5.21). Here a token is the first at which the probabilities up to it pass a uniform number: they are
summed in float64, each row by itself, so that a token does not depend on the requests beside its own.
"""

from collections.abc import Callable

import numpy as np
import torch


def register() -> None:
    """Called in each scheduler process on a CPU before SGLang runs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.sampler.sampling_from_probs_torch", sample, HookType.AROUND)


def sample(
    original: Callable[..., torch.Tensor],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around SGLang's own, which is left what has no seeds.

    Args:
        probs: [n, vocabulary], nonnegative; their sums need not be 1.
        sampling_seed, positions: [n], int64: a request's, and of the token before the one that is drawn.

    Returns:
        [n], int32; no token of probability 0.
    """
    if sampling_seed is None:
        return original(probs, sampling_seed, positions)
    up_to = probs.cumsum(-1, dtype=torch.float64)
    drawn = torch.from_numpy(uniforms(sampling_seed.numpy(), positions.numpy()))[:, None] * up_to[:, -1:]
    tokens = torch.searchsorted(up_to, drawn, right=True, out_int32=True).view(-1)
    return tokens.clamp_(
        max=probs.shape[-1] - 1
    )  # beyond are those of NaNs alone: their log-probs tell of them


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The numbers at `positions` of the SplitMix64 streams that begin at `seeds` (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators", OOPSLA, figure 17; mix64 is its variant 13).

    Args:
        seeds, positions: [n], int64; positions from 0.

    Returns:
        [n], float64 in [0, 1), of 53 bits.
    """
    z = seeds.view(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return ((z ^ z >> np.uint64(31)) >> np.uint64(11)) * 2.0**-53
