"""Engines get the devices that already hold most of their weights; with the best devices, bytes are the HybridFlow paper's.

Paper: G. Sheng et al., "HybridFlow: A Flexible and Efficient RLHF Framework", arXiv 2409.19256, section 5.4: from training
groups p-t-d to generation groups p_g-t_g-d_g-d each device receives (t p - t_g p_g) / (t_g p_g t p) of the
model's M bytes.
"""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.layout import Box, Layout, Piece, RankPlace, make_plan
from megarl.layout.placement import assign, place_engines

LAYERS, ROWS = 8, 16
M = LAYERS * ROWS  # bytes: every tensor is [ROWS], a byte each


def cut_layout(name, num_ranks, pp, tp, order, places=None):
    """A model with all tensors sharded: layers over `pp`, rows over `tp`; `order(rank)` is (stage, tp rank)."""

    def pieces(rank):
        stage, shard = order(rank)
        rows, layers = ROWS // tp, LAYERS // pp
        box = Box((shard * rows,), (rows,))
        numbers = range(stage * layers, (stage + 1) * layers)
        return [Piece(f"layer{layer}", box, f"local{layer}", Box((0,), (rows,))) for layer in numbers]

    return Layout.by_rank(name, num_ranks, pieces, places)


def nodes(count, size):
    return tuple(RankPlace(f"node{index // size}", str(index % size)) for index in range(count))


def training(p, t, d, places):
    """Megatron's order: tp fastest, then dp, then pp."""
    return cut_layout("training", p * t * d, p, t, lambda rank: (rank // (t * d), rank % t), places)


def generation(p_g, t_g, world, places=None):
    engine = p_g * t_g
    return cut_layout("generation", world, p_g, t_g, lambda rank: (rank % engine // t_g, rank % t_g), places)


def account(source, target, devices, order):
    return make_plan(source, replace(target, places=tuple(devices[index] for index in order))).account()


@pytest.mark.parametrize(
    ("train", "generate"),
    [
        ((1, 4, 2), (1, 2)),  # the paper's example, 1-4-2 -> 1-2-2-2
        ((1, 8, 1), (1, 2)),
        ((1, 8, 2), (1, 4)),
        ((2, 4, 1), (1, 4)),
        ((2, 2, 2), (1, 2)),
        ((4, 2, 1), (1, 1)),
        ((4, 2, 2), (2, 1)),
        ((4, 4, 1), (2, 2)),
        ((2, 4, 2), (2, 4)),
        ((1, 1, 8), (1, 1)),
    ],
)
def test_nested_layouts_receive_what_the_paper_says(train, generate):
    (p, t, d), (p_g, t_g) = train, generate
    devices = nodes(p * t * d, p * t * d)
    source, target = training(p, t, d, devices), generation(p_g, t_g, p * t * d)
    order = place_engines(source, target, devices, p_g * t_g)
    expected = M * Fraction(t * p - t_g * p_g, t_g * p_g * t * p)
    if (train, generate) == ((1, 4, 2), (1, 2)):
        assert expected == M / 4
    result = account(source, target, devices, order)
    assert set(result.received_from_others) == {expected}
    assert {sum(received.values()) for received in result.received} == {M // (t_g * p_g)}
    assert max(result.sent) == min(result.sent) == expected


sizes = st.sampled_from([1, 2, 4])


@given(sizes, sizes, st.sampled_from([1, 2]), sizes, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=60)
def test_the_best_of_all_orders_within_nodes(p, t, d, t_g, p_g, node_size):
    """Compared with every possible order, where these are few enough to list; never worse than the pool's own order."""
    world, engine = p * t * d, p_g * t_g
    if world % engine or world % min(node_size, world) or (engine > node_size and engine % node_size):
        return
    devices = nodes(world, node_size)
    source, target = training(p, t, d, devices), generation(p_g, t_g, world)
    order = place_engines(source, target, devices, engine)
    assert sorted(order) == list(range(world))
    assert all(devices[a].node == devices[b].node for a, b in _same_process(world, engine, node_size, order))

    def merit(candidate):
        links = account(source, target, devices, candidate).by_link
        return links["local"], links["intra_node"]

    assert merit(order) >= merit(range(world))
    if world <= 4:
        assert merit(order) == max(
            merit(other)
            for other in itertools.permutations(range(world))
            if all(
                devices[a].node == devices[b].node for a, b in _same_process(world, engine, node_size, other)
            )
            and all(_allowed(rank, index, engine, node_size) for rank, index in enumerate(other))
        )


def _same_process(world, engine, node_size, order):
    """Pairs of devices that belong to the same process of an engine: they must be on one node."""
    per_process = min(engine, node_size)
    for first in range(0, world, per_process):
        yield from itertools.pairwise(order[first : first + per_process])


def _allowed(rank, device, engine, node_size):
    """An engine that fits a node stays in its node; a larger one keeps its own nodes."""
    return rank // max(engine, node_size) == device // max(engine, node_size)


def test_nothing_moves_where_nothing_is_gained():
    devices = nodes(8, 4)
    source = training(1, 2, 4, devices)
    assert place_engines(source, generation(1, 2, 8), devices, 2) == tuple(range(8))
    elsewhere = tuple(RankPlace(f"other{index}", "0") for index in range(8))
    assert place_engines(source, generation(1, 2, 8), elsewhere, 2) == tuple(range(8))


def test_parts_of_a_large_engine_are_exchanged_between_its_nodes():
    """The trainer's stages are on the nodes in reverse order: the engine's halves swap nodes, and ranks swap within each half."""
    devices = nodes(4, 2)
    source = cut_layout("training", 4, 2, 2, lambda rank: (1 - rank // 2, 1 - rank % 2), devices)
    assert place_engines(source, generation(2, 2, 4), devices, 4) == (3, 2, 1, 0)


def test_parts_of_a_large_engine_go_to_the_node_that_has_most_where_devices_have_nothing():
    devices = nodes(4, 2)
    beside = (RankPlace("node0", "other"), RankPlace("node1", "other"))
    source = cut_layout("training", 2, 2, 1, lambda rank: (1 - rank, 0), beside)
    assert place_engines(source, generation(2, 2, 4), devices, 4) == (2, 3, 0, 1)


def test_fewer_ranks_than_devices():
    devices = nodes(8, 4)
    source = training(1, 8, 1, devices)
    target = generation(1, 2, 2)
    assert place_engines(source, target, devices, 2) == (
        0,
        1,
    )  # no device of that node holds any of the second half
    source = training(1, 4, 2, devices)
    assert place_engines(source, target, devices, 2) == (0, 2)


@given(st.integers(1, 5), st.integers(0, 2), st.integers(1, 100), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_assignment_is_the_best_of_all(rows, spare, largest, random):
    columns = rows + spare
    values = [[random.randint(0, largest) for _ in range(columns)] for _ in range(rows)]
    chosen = assign(values)
    assert len(set(chosen)) == rows
    best = max(
        sum(row[at] for row, at in zip(values, order, strict=True))
        for order in itertools.permutations(range(columns), rows)
    )
    assert sum(row[at] for row, at in zip(values, chosen, strict=True)) == best
