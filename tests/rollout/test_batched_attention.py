"""Batched decode attention against attention of one sequence at a time."""

import pytest
import torch

from megarl.rollout.batched_attention import attend, group_by_length, make_groups


def one_at_a_time(query, k_cache, v_cache, slots_of, scale):
    """softmax(q k^T * scale) v for each sequence and head, in float64."""
    heads, num_kv = query.shape[1], k_cache.shape[1]
    rows = []
    for row, slots in enumerate(slots_of):
        keys, values = k_cache[slots].double(), v_cache[slots].double()
        per_head = []
        for head in range(heads):
            kv = head // (heads // num_kv)
            weights = torch.softmax(keys[:, kv] @ query[row, head].double() * scale, 0)
            per_head.append(weights @ values[:, kv])
        rows.append(torch.stack(per_head))
    return torch.stack(rows)


@pytest.mark.parametrize(("heads", "num_kv"), [(4, 4), (4, 2), (6, 1)])
def test_equals_attention_of_each_sequence(heads, num_kv):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 40, 3, 17, 39, 8, 2])
    batch, dim, num_slots, context = len(lengths), 16, 300, 64
    slots = torch.randperm(num_slots - 1, generator=generator) + 1  # slot 0 is padding
    req_to_token = torch.full((20, context), 299, dtype=torch.int32)
    req_pool_indices = torch.tensor([3, 19, 0, 7, 8, 11, 5])
    slots_of, at = [], 0
    for row, length in zip(req_pool_indices.tolist(), lengths.tolist(), strict=True):
        slots_of.append(slots[at : at + length])
        req_to_token[row, :length] = slots_of[-1].int()
        at += length
    k_cache = torch.randn(num_slots, num_kv, dim, generator=generator)
    v_cache = torch.randn(num_slots, num_kv, 24, generator=generator)
    k_cache[0] = v_cache[0] = 0.0
    query = torch.randn(batch, heads, dim, generator=generator)

    output = torch.full((batch, heads, 24), float("nan"))
    groups = make_groups(lengths, req_to_token, req_pool_indices, torch.float32)
    for group in groups:
        output[group.rows] = attend(
            query[group.rows], k_cache[group.slots], v_cache[group.slots], group.mask, 0.25
        )
    expected = one_at_a_time(query, k_cache, v_cache, slots_of, 0.25)
    assert len(groups) == 5  # {40, 39}, {17}, {8}, {3, 2}, {1}
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_groups_waste_less_than_half():
    lengths = [1, 1000, 3, 501, 500, 2, 7, 7]
    groups = group_by_length(lengths)
    assert sorted(row for group in groups for row in group) == list(range(8))
    assert [sorted(lengths[row] for row in group) for group in groups] == [
        [501, 1000],
        [500],
        [7, 7],
        [2, 3],
        [1],
    ]
    for group in groups:
        assert sum(lengths[row] for row in group) > 0.5 * len(group) * max(lengths[row] for row in group)
