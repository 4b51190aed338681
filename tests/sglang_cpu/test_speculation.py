"""The operators of n-gram drafting in plain torch, against implementations in Python, node by node."""

import random

import pytest
import torch

from megarl.sglang_cpu import speculation


def random_tree(num_nodes: int, generator: random.Random) -> list[int]:
    """The parent of each node; the root's is -1."""
    return [-1] + [generator.randrange(node) for node in range(1, num_nodes)]


def path_of(parents: list[int], node: int) -> list[int]:
    return [] if node < 0 else [*path_of(parents, parents[node]), node]


@pytest.mark.parametrize("seed", range(5))
def test_positions_and_links_of_trees(seed: int) -> None:
    generator, batch, num_nodes = random.Random(seed), 3, 7
    trees = [random_tree(num_nodes, generator) for _ in range(batch)]
    mask = torch.zeros(batch, num_nodes, num_nodes, dtype=torch.bool)
    for tree, parents in enumerate(trees):
        for node in range(num_nodes):
            mask[tree, node, path_of(parents, node)] = True
    lengths = torch.tensor([4, 0, 11])
    positions = torch.full((batch * num_nodes,), -7)
    numbers, children, siblings = torch.full((3, batch, num_nodes), -7).unbind()
    speculation.reconstruct_indices_from_tree_mask(
        mask.flatten(), lengths, positions, numbers, children, siblings, batch, num_nodes
    )
    assert numbers.flatten().tolist() == list(range(batch * num_nodes))
    for tree, parents in enumerate(trees):
        own = positions.view(batch, num_nodes)[tree].tolist()
        assert own == [int(lengths[tree]) + len(path_of(parents, node)) - 1 for node in range(num_nodes)]
        for node in range(num_nodes):
            of_node = [other for other in range(num_nodes) if parents[other] == node]
            assert children[tree, node] == (of_node[0] if of_node else -1)
            later = [other for other in range(node + 1, num_nodes) if parents[other] == parents[node] >= 0]
            assert siblings[tree, node] == (later[0] if later else -1)


def test_slots_of_tokens_and_of_accepted_ones() -> None:
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    found = torch.zeros(5, dtype=torch.int64)
    speculation.assign_extend_cache_locs(
        torch.tensor([2, 0]), table, torch.tensor([1, 4]), torch.tensor([4, 6]), found, 10
    )
    assert found.tolist() == [21, 22, 23, 4, 5]
    accepted = torch.zeros(6, dtype=torch.int64)
    speculation.fill_accept_out_cache_loc(
        torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32),
        torch.tensor([5, 6, 7, 8, 9, 10]),
        accepted,
    )
    assert accepted.tolist() == [5, 7, 8, 0, 0, 0]


def test_slots_are_copied_at_once_in_all_layers() -> None:
    """A slot may be the source of one copy and the target of another."""
    layers = [torch.randn(6, 2, 3), torch.randn(6, 2, 5).bfloat16()]
    before = [layer.clone() for layer in layers]
    speculation.copy_all_layer_kv_cache(
        torch.tensor([layer.data_ptr() for layer in layers]),
        torch.tensor([layer[0].numel() * layer.element_size() for layer in layers]),
        torch.tensor([1, 2, 5]),
        torch.tensor([2, 4, 1]),
    )
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer, old[[0, 2, 4, 3, 4, 1]])
    nothing = torch.zeros(0, dtype=torch.int64)
    speculation.copy_all_layer_kv_cache(nothing, nothing, nothing, nothing)
