"""The planner's guarantees, over random shardings."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.layout import Box, Layout, Piece, RankPlace, make_plan


def row_layout(name, cuts, length, replicas=1, places=None, columns=3):
    """Tensor "w" [length, columns] cut at rows `cuts`; each shard on `replicas` ranks, shifted by rank."""
    bounds = [0, *sorted(cuts), length]
    parts = [(a, b) for a, b in itertools.pairwise(bounds) if b > a]

    def pieces(rank):
        first, last = parts[rank % len(parts)]
        shape = (length, columns)
        local = Box((rank, 0), (last - first, columns))
        return [Piece("w", Box.rows(first, last - first, shape), "local", local)]

    return Layout(name, len(parts) * replicas, pieces, places)


layouts = st.tuples(
    st.integers(1, 40),
    st.lists(st.integers(0, 40), max_size=5),
    st.lists(st.integers(0, 40), max_size=5),
    st.integers(1, 3),
)


@given(layouts)
@settings(max_examples=200, deadline=None)
def test_exactly_once_and_right_source(case):
    length, source_cuts, target_cuts, replicas = case
    source = row_layout("source", [c for c in source_cuts if c < length], length, replicas)
    target = row_layout("target", [c for c in target_cuts if c < length], length)
    weight = np.arange(length * 3).reshape(length, 3)
    shards = []
    for rank in range(source.num_ranks):
        (piece,) = source.pieces(rank)
        shard = np.full((length + rank, 3), -1)
        shard[piece.local_box.slices] = weight[piece.box.slices]
        shards.append(shard)

    plan = make_plan(source, target)

    for rank in range(target.num_ranks):
        (piece,) = target.pieces(rank)
        written = np.zeros((length + rank, 3), dtype=int)
        local = np.full((length + rank, 3), -1)
        for copy in plan.copies:
            if copy.target_rank == rank:
                written[copy.target_box.slices] += 1
                local[copy.target_box.slices] = shards[copy.source_rank][copy.source_box.slices]
        assert (written[piece.local_box.slices] == 1).all() and written.sum() == piece.box.numel
        assert (local[piece.local_box.slices] == weight[piece.box.slices]).all()


@given(layouts)
@settings(max_examples=50, deadline=None)
def test_deterministic(case):
    length, source_cuts, target_cuts, replicas = case
    plans = [
        make_plan(
            row_layout("source", [c for c in source_cuts if c < length], length, replicas),
            row_layout("target", [c for c in target_cuts if c < length], length),
        ).copies
        for _ in range(2)
    ]
    assert plans[0] == plans[1]


def test_nearest_then_least_loaded():
    places = (RankPlace("b", "0"), RankPlace("a", "1"), RankPlace("a", "0"), RankPlace("a", "2"))
    source = row_layout("source", [], 8, replicas=4, places=places)
    here = row_layout("target", [4], 8, places=(RankPlace("a", "0"), RankPlace("c", "9")))
    first, second = make_plan(source, here).copies
    assert first.source_rank == 2  # the same device
    assert second.source_rank == 0  # all on other nodes: the lowest of those that have sent nothing
    near = row_layout("target", [2, 4, 6], 8, places=(RankPlace("a", "9"),) * 4)
    assert [c.source_rank for c in make_plan(source, near).copies] == [1, 2, 3, 1]


def test_bytes_are_counted_by_link():
    places = (RankPlace("a", "0"), RankPlace("b", "0"))
    source = row_layout("source", [4], 8, places=places)
    target = row_layout("target", [4], 8, places=(RankPlace("a", "0"), RankPlace("a", "1")))
    plan = make_plan(source, target)
    assert plan.bytes_by_link(lambda c: c.box.numel * 4) == {"local": 48, "intra_node": 0, "inter_node": 48}
    assert plan.bytes_received(lambda c: c.box.numel * 4) == [48, 48]


def test_a_source_that_lacks_a_part_is_refused():
    source = row_layout("source", [], 8)
    target = row_layout("target", [], 9)
    with pytest.raises(ValueError, match=r"target rank 0 needs 27 elements of w .* source holds 24"):
        make_plan(source, target)


def test_a_source_that_holds_a_part_twice_is_refused():
    shape = (8, 3)
    pieces = [
        [Piece("w", Box.rows(0, 5, shape), "local", Box.rows(0, 5, shape))],
        [Piece("w", Box.rows(4, 4, shape), "local", Box.rows(0, 4, shape))],
    ]
    with pytest.raises(ValueError, match="holds 27"):
        make_plan(Layout("source", 2, lambda rank: pieces[rank]), row_layout("target", [], 8))


@given(layouts, st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_buckets_keep_order_and_bound(case, limit):
    length, source_cuts, target_cuts, replicas = case
    plan = make_plan(
        row_layout("source", [c for c in source_cuts if c < length], length, replicas),
        row_layout("target", [c for c in target_cuts if c < length], length),
    )
    buckets = plan.buckets(lambda c: c.box.numel, limit)
    for rank in range(plan.target.num_ranks):
        mine = [[c for c in bucket if c.target_rank == rank] for bucket in buckets]
        assert [c for bucket in mine for c in bucket] == [c for c in plan.copies if c.target_rank == rank]
        for bucket in mine:
            assert len(bucket) <= 1 or sum(c.box.numel for c in bucket) <= limit
