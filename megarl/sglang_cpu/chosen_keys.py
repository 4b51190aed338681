"""Sparse attention on a CPU: the keys that an indexer chooses for new tokens, as masks for batched_attention.py.

SGLang 0.5.21 has it in compiled kernels for GPUs alone. The model's class (megarl/rollout/sglang/models/sparse_attention.py) leaves with a layer of
attention what its indexer says of the new tokens, as `layer.index`: `queries` [tokens, heads, dim], `weights` [tokens, heads], `keys` [slots, dim]
of the whole cache, `topk`, and `choices`, a dictionary for this module, which the layers that take the same choice share.

Scores of DeepSeek-V3.2's report (arXiv:2512.02556), equation 1. Of equal scores the earlier key is chosen, as in training. As in
batched_attention.py a score's bits depend on its query and its key alone: products come in multiples of 8 rows and 16 columns, and
heads are added up one after the other.
"""

from typing import Any

import torch

from megarl.sglang_cpu.batched_attention import TILE, Group, Prefill, pad, padded_rows, take_slots

LIMIT = 1 << 26  # scores of heads that exist at one time


def of_next_tokens(index: Any, group: Group) -> torch.Tensor:
    """The mask of a group [n, 1, 1, padded], -inf also on the keys that the new tokens do not attend to."""
    return _once(index, group, lambda: _of_next_tokens(index, group))


def _of_next_tokens(index: Any, group: Group) -> torch.Tensor:
    keys = take_slots(index.keys[:, None], group.slots)[:, :, 0]
    queries, weights = index.queries[group.rows][:, None], index.weights[group.rows][:, None]
    hidden = group.mask[:, :, 0].isinf()  # [n, 1, padded]
    chosen = _choose(queries, weights, keys, hidden, index.topk)
    return group.mask.masked_fill(~chosen[:, :, None], float("-inf"))


def of_prompts(index: Any, prompts: Prefill) -> torch.Tensor:
    """Which keys the new tokens of prompts attend to: bool [n, new, length]."""
    return _once(index, prompts, lambda: _of_prompts(index, prompts))


def _of_prompts(index: Any, prompts: Prefill) -> torch.Tensor:
    keys = take_slots(index.keys[:, None], prompts.slots)[:, :, 0]
    (count, new), length = prompts.tokens.shape, keys.shape[1]
    positions = torch.arange(length - new, length)[:, None]
    hidden = (torch.arange(length) > positions).expand(count, -1, -1)
    queries, weights = index.queries[prompts.tokens], index.weights[prompts.tokens]
    return _choose(queries, weights, keys, hidden, index.topk)


def _once(index: Any, asked: Any, make: Any) -> torch.Tensor:
    """The mask that the first of the layers with the same choice has made."""
    found = index.choices.get(id(asked))
    if found is None:
        found = index.choices[id(asked)] = make()
    return found


def _choose(
    queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, topk: int
) -> torch.Tensor:
    """The `topk` keys with the highest scores that are not hidden, or all of these.

    queries: [n, rows, heads, dim]; weights: [n, rows, heads]; keys: [n, length, dim]; hidden: bool [n, rows, length] -> bool, the same.
    """
    if hidden.shape[2] <= topk:
        return ~hidden
    step = max(1, LIMIT // (queries.shape[2] * keys.shape[1]))
    scores = torch.cat(
        [
            torch.cat(
                [
                    _scores(queries[row, first : first + step], weights[row, first : first + step], keys[row])
                    for first in range(0, queries.shape[1], step)
                ]
            )[None]
            for row in range(len(queries))
        ]
    ).masked_fill_(hidden, float("-inf"))
    least = scores.topk(topk, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    missing = topk - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= missing))) & ~hidden


def _scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim], [rows, heads], [length, dim] -> float32 [rows, length]."""
    rows, heads, dim = queries.shape
    length = len(keys)
    flat = pad(queries.float().flatten(0, 1), padded_rows(rows * heads, dim), dim)
    columns = pad(keys.float(), -(-length // TILE) * TILE, dim)
    of_heads = (flat @ columns.T)[: rows * heads, :length].relu_().unflatten(0, (rows, heads))
    total = torch.zeros(rows, length)
    for head in range(heads):
        total += of_heads[:, head] * weights[:, head, None]
    return total
