"""Decode attention on a CPU for a whole batch at a time.

SGLang's `torch_native` backend attends one sequence after the other, in Python, in each layer: about 0.1 ms each,
which is most of a decode step on a small model (sglang 0.5.21). Here the sequences of a batch are
padded to one tensor, gathered from the KV cache by one index, and attended by one call. Sequences
of very different lengths go in groups, so that less than half of what is gathered is padding.

The functions here know tensors only; `sglang_attention` plugs them into SGLang.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Group:
    """Sequences of similar length. `rows` [n]: where they are in the batch; `slots` [n, longest]: where their
    keys and values lie in the cache; `mask` [n, 1, 1, longest]: added to the scores, -inf on padding."""

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Rows in groups in which the shortest sequence is longer than half of the longest."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    for row in order:
        if not groups or 2 * lengths[row] <= lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(row)
    return groups


def make_groups(
    lengths: torch.Tensor, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, dtype: torch.dtype
) -> list[Group]:
    """The groups of a decode batch.

    Args:
        lengths: [batch], tokens of each sequence, the new one included.
        req_to_token: [requests, context], cache slot of each token of each request.
        req_pool_indices: [batch], the sequences' rows in `req_to_token`.
    """
    groups = []
    for members in group_by_length(lengths.tolist()):
        rows = torch.tensor(members)
        longest = int(lengths[members[0]])
        real = torch.arange(longest) < lengths[rows, None]
        slots = req_to_token[req_pool_indices[rows], :longest].long()
        slots = torch.where(real, slots, 0)  # slot 0 is SGLang's own padding: finite, never read
        mask = torch.zeros(real.shape, dtype=dtype).masked_fill_(~real, float("-inf"))
        groups.append(Group(rows, slots, mask[:, None, None, :]))
    return groups


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of one new token per sequence.

    Args:
        query: [n, heads, dim]; heads of a group share a key head: they are its "query positions" below.
        keys: [n, length, key heads, dim]; values: [n, length, key heads, value dim].
        mask: [n, 1, 1, length].

    Returns:
        [n, heads, value dim].
    """
    n, heads, dim = query.shape
    num_kv = keys.shape[2]
    out = torch.nn.functional.scaled_dot_product_attention(
        query.view(n, num_kv, heads // num_kv, dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=scale,
    )
    return out.reshape(n, heads, values.shape[3])
