"""How much responses repeat themselves and each other. Pure functions of token ids."""

from collections.abc import Hashable, Sequence

import numpy as np

NGRAM = 4
# Odd numbers that mix the tokens of an n-gram: two different ones of a batch fall together with probability 2^-64.
_MIXERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64
)


def duplicate_share(responses: Sequence[np.ndarray], prompts: Sequence[Hashable]) -> float | None:
    """Of n responses to a prompt of which u are different, (n - u) / (n - 1): 0 where all differ, 1 where all are equal.
    The mean over prompts with several responses; None without any.

    Args:
        responses: token ids, each [length]; prompts: whose response each one is.
    """
    groups: dict[Hashable, list[bytes]] = {}
    for response, prompt in zip(responses, prompts, strict=True):
        groups.setdefault(prompt, []).append(np.ascontiguousarray(response).tobytes())
    shares = [
        (len(group) - len(set(group))) / (len(group) - 1) for group in groups.values() if len(group) > 1
    ]
    return float(np.mean(shares)) if shares else None


def ngram_repetition(responses: Sequence[np.ndarray]) -> float | None:
    """Of the runs of `NGRAM` tokens in a response, the share that occurred earlier in it; the mean over responses that
    are long enough to have one, None without any.

    Args:
        responses: token ids, each [length].
    """
    rates = []
    for response in responses:
        count = len(response) - NGRAM + 1
        if count < 1:
            continue
        tokens = np.asarray(response).astype(np.uint64)
        mixed = sum(tokens[offset : offset + count] * _MIXERS[offset] for offset in range(NGRAM))
        rates.append(1.0 - len(np.unique(mixed)) / count)
    return float(np.mean(rates)) if rates else None
