"""Attention on a CPU for a whole batch at a time, as functions of tensors; attention.py plugs them into SGLang.

SGLang's `torch_native` backend attends one sequence after the other, in Python, in each layer: about 0.1 ms each,
which is most of a decode step on a small model (sglang 0.5.21). Here the sequences of a batch are
padded to one tensor, gathered from the KV cache by one index, and attended by one call. Sequences
of very different lengths go in groups, so that less than half of the gathered keys are padding.

In float32 a token's attention has the same bits however it is computed: as part of a prompt, after a cached part of it,
or as the next token, beside any other sequences. torch's kernel takes its products from MKL, whose rounding depends on their
sizes, so these are chosen by the token's own position alone, or such that they make no difference (torch 2.13.0,
MKL 2024.2):

- queries come in multiples of 8 rows (16 where heads are wider than 128), keys in multiples of 16 (`padded_length`). Queries of
  decode are not padded where an engine need not be deterministic (`same_bits`);
- tokens at positions below 192 see up to 192 keys at once, later ones multiples of 512, which is the kernel's own block.
"""

from dataclasses import dataclass, replace

import torch

TILE = 16  # keys
SHORT = 192  # MKL does not cut sums of products of up to this many terms: it does from 193 on with AVX2, from 385 with AVX-512
BLOCK = 512  # keys that torch's kernel takes at a time
TOGETHER = 4096  # tokens of equally long prompts whose keys and values are copied at a time


@dataclass(frozen=True)
class Group:
    """Sequences of similar length. `rows` [n]: their rows in the batch, or a slice for all of it; `slots` [n, padded]: cache slots of
    their keys and values; `mask` [n, 1, 1, padded]: added to the scores, -inf on padding."""

    rows: torch.Tensor | slice
    slots: torch.Tensor
    mask: torch.Tensor


def padded_length(length: int) -> int:
    """Number of keys for a sequence of `length` tokens, padding included."""
    step = TILE if length <= SHORT else BLOCK
    return -(-length // step) * step


def padded_rows(rows: int, width: int) -> int:
    """Number of query rows for `rows` rows with heads of `width`, padding included."""
    step = 8 if width <= 128 else 16
    return -(-rows // step) * step


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Rows in groups, in each of which the shortest sequence (padded) is longer than half of the longest.

    Sequences of up to `SHORT` tokens are never in a group with longer ones.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    for row in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if 2 * padded_length(lengths[row]) <= padded_length(longest) or lengths[row] <= SHORT < longest:
            longest = 0
        if not longest:
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
    members = group_by_length(lengths.tolist())
    if len(members) == 1:  # in their own order, so that no query or output need be moved
        return [_make_group(slice(None), lengths, req_to_token, req_pool_indices, dtype)]
    return [
        _make_group(rows, lengths[rows], req_to_token, req_pool_indices[rows], dtype)
        for rows in map(torch.tensor, members)
    ]


def _make_group(
    rows: torch.Tensor | slice,
    lengths: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    dtype: torch.dtype,
) -> Group:
    """lengths, req_pool_indices: [n], of the group's sequences."""
    longest = int(lengths.max())
    padding = torch.arange(padded_length(longest)) >= lengths[:, None]
    slots = torch.zeros(padding.shape, dtype=torch.int64)  # 0: SGLang's own padding, finite and never read
    slots[:, :longest] = req_to_token[req_pool_indices, :longest]
    slots.masked_fill_(padding, 0)
    mask = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf"))
    return Group(rows, slots, mask[:, None, None, :])


def take_slots(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """cache[slots], row by row: three times as fast as by an index (torch 2.13.0).

    cache: [all slots, key heads, dim]; slots: [n, padded] -> [n, padded, key heads, dim].
    """
    return cache.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    same_bits: bool = True,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence.

    Args:
        query: [n, heads, dim]; heads of a group share a key head: they are its "query positions" below.
        keys: [n, padded, key heads, dim]; values: [n, padded, key heads, value dim].
        mask: [n, 1, 1, padded].
        same_bits: whether the result must have the bits of the token's attention within a prompt. If not, query rows are not padded:
            a group has few heads, and most rows would be padding.
        sinks: [heads], logits in the heads' softmax that no value belongs to.

    Returns:
        [n, heads, value dim].
    """
    n, heads, dim = query.shape
    num_kv = keys.shape[2]
    rows = query.view(n, num_kv, heads // num_kv, dim)
    by_group = None if sinks is None else sinks.view(num_kv, -1)
    out = _attention(rows, keys.transpose(1, 2), values.transpose(1, 2), mask, scale, same_bits, by_group)
    return out.reshape(n, heads, values.shape[3])


def within(group: Group, window: int) -> torch.Tensor:
    """The mask of a group whose new tokens attend to `window` tokens before them."""
    hidden = group.mask.isinf()
    newest = (~hidden).sum(-1, keepdim=True) - 1
    return group.mask.masked_fill(torch.arange(hidden.shape[-1]) < newest - window, float("-inf"))


def attend_prompts(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the new tokens of sequences of one length, whose first tokens, equally many, may have been cached.

    Args:
        query: [n, new, heads, dim].
        keys: [n, length, key heads, dim]; values: [n, length, key heads, value dim]; including the new tokens.
        window: how many tokens before it a token attends to; None: all.
        sinks: as of `attend`.
        chosen: bool [n, new, length], the keys that each token attends to; None: all before it.

    Returns:
        [n, new, heads, value dim].
    """
    by_head = None if sinks is None else sinks[:, None]
    length = keys.shape[1]
    cached = length - query.shape[1]
    width = max(query.shape[3], values.shape[3])
    query, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    parts = []
    for first, end in prompt_blocks(cached, length):
        num_keys = padded_length(end)
        positions = torch.arange(first, first + padded_rows(end - first, width))[:, None]
        hidden = torch.arange(num_keys) > positions
        if window is not None:
            hidden |= torch.arange(num_keys) < positions - window
        if chosen is not None:
            of_block = chosen[:, first - cached : end - cached, :end]
            hidden = hidden | ~pad(of_block, len(positions), num_keys)[:, None]
            hidden[..., end - first :, 0] = False  # rows that are there for alignment attend to something
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        k, v = (pad(x[:, :, :end], num_keys, x.shape[3]) for x in (keys, values))
        rows = query[:, :, first - cached : end - cached]
        parts.append(_attention(rows, k, v, mask, scale, sinks=by_head))
    return torch.cat(parts, 2).transpose(1, 2)


def attend_prompt(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """The same for one sequence: query [new, heads, dim], keys and values [length, ...] -> [new, heads, value dim]."""
    return attend_prompts(query[None], keys[None], values[None], scale)[0]


@dataclass(frozen=True)
class Prefill:
    """Sequences whose new tokens are attended at once.

    Attributes:
        tokens: [n, new], where they are among the batch's tokens.
        slots: [n, length], where the sequences' keys and values lie in the cache.
    """

    tokens: torch.Tensor
    slots: torch.Tensor


def plan_prompts(
    lengths: torch.Tensor,
    new_tokens: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[list[Group], list[Prefill]]:
    """Plan the attention of a prefill batch: sequences with one new token as in decode, others together with those of equal lengths.

    Args:
        lengths, new_tokens: [batch], tokens of each sequence, the new ones included, and of these alone.
        req_to_token, req_pool_indices: as of `make_groups`.

    Returns:
        groups of the first kind, whose `rows` count the batch's tokens, and prefills of at most `TOGETHER` tokens or one sequence each.
    """
    first = new_tokens.cumsum(0) - new_tokens
    single = (new_tokens == 1).nonzero().flatten()
    groups = make_groups(lengths[single], req_to_token, req_pool_indices[single], dtype)
    groups = [replace(group, rows=first[single][group.rows]) for group in groups]
    alike: dict[tuple[int, int], list[int]] = {}
    for row, sizes in enumerate(zip(lengths.tolist(), new_tokens.tolist(), strict=True)):
        if sizes[1] > 1:
            alike.setdefault(sizes, []).append(row)
    prompts = []
    for (length, new), members in alike.items():
        step = max(1, TOGETHER // length)
        for part in range(0, len(members), step):
            rows = torch.tensor(members[part : part + step])
            slots = req_to_token[req_pool_indices[rows], :length].to(torch.int64)
            prompts.append(Prefill(first[rows, None] + torch.arange(new), slots))
    return groups, prompts


def prompt_blocks(cached: int, length: int) -> list[tuple[int, int]]:
    """The positions from `cached` to `length`, cut at `SHORT` and every multiple of `BLOCK`."""
    cuts = [cut for cut in (SHORT, *range(BLOCK, length, BLOCK)) if cached < cut < length]
    return list(zip([cached, *cuts], [*cuts, length], strict=True))


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    same_bits: bool = True,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query: [n, heads, rows, dim]; keys, values: [n, key heads, padded, ...] -> [n, heads, rows, value dim].

    sinks: [heads, rows or 1]. With l the logarithm of the sum of a row's exp(score), its output without a sink is multiplied by
    exp(l) / (exp(l) + exp(sink)).
    """
    rows, dim, value_dim = query.shape[2], query.shape[3], values.shape[3]
    width = max(dim, value_dim)  # latent attention's values are narrower, which torch's kernel does not take
    padded = (
        pad(query, padded_rows(rows, width) if same_bits else rows, width),
        pad(keys, keys.shape[2], width),
        pad(values, values.shape[2], width),
    )
    scale = dim**-0.5 if scale is None else scale
    if sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            *padded, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != keys.shape[1]
        )
        return out[:, :, :rows, :value_dim]
    heads = query.shape[1] // keys.shape[1]
    if heads > 1:
        padded = (padded[0], *(part.repeat_interleave(heads, 1) for part in padded[1:]))
    mask = mask.expand(len(query), query.shape[1], padded[0].shape[2], -1)
    # The kernel that torch's attention is on a CPU; this way it gives the sums, too (torch 2.13.0).
    out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *padded, attn_mask=mask, scale=scale
    )
    share = torch.sigmoid(sums[:, :, :rows].float() - sinks.float())
    return (out[:, :, :rows, :value_dim] * share[..., None]).to(query.dtype)


def pad(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x: [..., n, m] -> [..., rows, columns], padded with zeros at the end."""
    more = (rows - x.shape[-2], columns - x.shape[-1])
    return torch.nn.functional.pad(x, (0, more[1], 0, more[0])) if any(more) else x
