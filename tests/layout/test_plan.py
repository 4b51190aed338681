"""The planner's guarantees, over random shardings; buckets are bounded at both ends, and few."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.layout import Box, Layout, Piece, RankPlace, Shard, make_plan
from megarl.layout.plan import even_pace, fill_buckets, most_in_flight


def row_layout(name, cuts, length, replicas=1, places=None, columns=3):
    """Tensor "w" [length, columns] cut at rows `cuts`; each shard on `replicas` ranks, shifted by rank."""
    bounds = [0, *sorted(cuts), length]
    parts = [(a, b) for a, b in itertools.pairwise(bounds) if b > a]

    def pieces(rank):
        first, last = parts[rank % len(parts)]
        shape = (length, columns)
        local = Box((rank, 0), (last - first, columns))
        return [Piece("w", Box.rows(first, last - first, shape), "local", local)]

    return Layout.by_rank(name, len(parts) * replicas, pieces, places)


layouts = st.tuples(
    st.integers(1, 40),
    st.lists(st.integers(0, 40), max_size=5),
    st.lists(st.integers(0, 40), max_size=5),
    st.integers(1, 3),
)


@given(layouts)
@settings(max_examples=100)
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
@settings(max_examples=50)
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


def test_nearest_then_evenly():
    places = (RankPlace("b", "0"), RankPlace("a", "1"), RankPlace("a", "0"), RankPlace("a", "2"))
    source = row_layout("source", [], 8, replicas=4, places=places)
    here = row_layout("target", [4], 8, places=(RankPlace("a", "0"), RankPlace("c", "9")))
    first, second = make_plan(source, here).copies
    assert first.source_rank == 2  # the same device
    assert second.source_rank in range(4)  # all sources are on other nodes
    near = row_layout("target", [2, 4, 6], 8, places=(RankPlace("a", "9"),) * 4)
    senders = [copy.source_rank for copy in make_plan(source, near).copies]
    assert set(senders) == {1, 2, 3}  # the sources on the targets' node, in turns
    split = make_plan(source, row_layout("target", [], 8), max_copy_bytes=6)
    assert split.account().sent == (6, 6, 6, 6)


def test_one_ranks_part_is_that_of_the_whole():
    source = row_layout("source", [3, 5], 8, replicas=3)
    plan = make_plan(source, row_layout("target", [2, 6, 7], 8), max_copy_bytes=4)
    for rank in range(source.num_ranks):
        alone = make_plan(plan.source, plan.target, max_copy_bytes=4).deliveries_from(rank)
        assert alone == [found for found in plan.deliveries if found.source_rank == rank]
    sent = [sum(found.box.numel for found in plan.deliveries_from(rank)) for rank in range(source.num_ranks)]
    assert tuple(sent) == plan.account().sent  # each delivery has one target


def replicas(count: int, names: list[str], places: list[RankPlace] | None = None) -> Layout:
    """`count` ranks that hold the same tensors of 6 elements."""
    pieces = [Piece(name, Box((0,), (6,)), name, Box((0,), (6,))) for name in names]
    shard = Shard(range(count), lambda: pieces)
    return Layout("replicas", count, (shard,), tuple(places) if places is not None else None)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=100)
def test_few_senders(num_sources, num_targets, num_tensors, most):
    """Deliveries are the plan's copies, with a slice once for all targets of a sender; a target has `most` senders at most."""
    names = [f"w{index}" for index in range(num_tensors)]
    plan = make_plan(replicas(num_sources, names), replicas(num_targets, names), most_senders=most)
    pairs = [
        (found.tensor, found.source_rank, rank) for found in plan.deliveries for rank in found.target_ranks
    ]
    assert sorted(pairs) == sorted((copy.tensor, copy.source_rank, copy.target_rank) for copy in plan.copies)
    for target in range(num_targets):
        assert len({source for _, source, rank in pairs if rank == target}) <= min(most, num_sources)
    # Each sender reads a slice once for all its targets.
    if num_targets % num_sources == 0:
        assert len(plan.deliveries) == num_sources * num_tensors


@pytest.mark.parametrize("length", [1, 4, 16])
def test_sent_once_to_a_chain(length):
    names = ["a", "b", "c"]
    places = [RankPlace(f"node{rank // 2}", str(rank)) for rank in range(length)]
    previous = {rank: rank - 1 for rank in range(1, length)}
    plan = make_plan(replicas(2, names), replicas(length, names, places), previous=previous)
    account = plan.account()
    assert sum(account.sent) == 18  # however long the chain is
    assert plan.bytes_received() == [18] * length
    assert [sum(by_link.values()) for by_link in account.passed_on] == [18] * (length - 1) + [0]
    assert account.by_link["intra_node"] == 18 * (length // 2)  # between two neighbours on a node
    assert [found.target_ranks for found in plan.deliveries] == [tuple(range(length))] * 3
    copies = [(copy.tensor, copy.source_rank, copy.target_rank) for copy in plan.copies]
    expected = [(found.tensor, found.source_rank) for found in plan.deliveries]
    assert sorted(copies) == sorted((*pair, rank) for pair in expected for rank in range(length))
    assert len(plan.buckets(6)) == 3  # as many as for a single engine


def test_bytes_are_counted_by_link():
    places = (RankPlace("a", "0"), RankPlace("b", "0"))
    source = row_layout("source", [4], 8, places=places)
    target = row_layout("target", [4], 8, places=(RankPlace("a", "0"), RankPlace("a", "1")))
    plan = make_plan(source, target, itemsize=lambda tensor: 4)
    assert plan.account().by_link == {"local": 48, "intra_node": 0, "inter_node": 48}
    assert plan.bytes_received() == [48, 48]


def test_a_source_that_lacks_a_part_is_refused():
    source = row_layout("source", [], 8)
    target = row_layout("target", [], 9)
    with pytest.raises(ValueError, match=r"target rank 0 needs 27 elements of w .* source holds 24"):
        _ = make_plan(source, target).copies


@pytest.mark.parametrize("length", [8, 9])  # 9: as many elements are missing as are duplicated
def test_a_source_that_holds_a_part_twice_is_refused(length):
    shape = (length, 3)
    pieces = [
        [Piece("w", Box.rows(0, 5, shape), "local", Box.rows(0, 5, shape))],
        [Piece("w", Box.rows(4, 4, shape), "local", Box.rows(0, 4, shape))],
    ]
    with pytest.raises(ValueError, match=r"holds a part of w twice: the boxes .* overlap"):
        make_plan(
            Layout.by_rank("source", 2, lambda rank: pieces[rank]), row_layout("target", [], length)
        ).account()


@given(layouts, st.integers(1, 200))
@settings(max_examples=100)
def test_buckets_hold_all_and_are_bounded(case, limit):
    length, source_cuts, target_cuts, replicas = case
    plan = make_plan(
        row_layout("source", [c for c in source_cuts if c < length], length, replicas),
        row_layout("target", [c for c in target_cuts if c < length], length),
    )
    buckets = plan.buckets(limit)
    assert sorted(found for bucket in buckets for found in bucket) == sorted(plan.deliveries)
    for bucket in buckets:
        by_end: dict[tuple[str, int], list[int]] = {}
        for found in bucket:
            for end in (("source", found.source_rank), *(("target", rank) for rank in found.target_ranks)):
                by_end.setdefault(end, []).append(found.box.numel)
        assert all(len(sizes) == 1 or sum(sizes) <= limit for sizes in by_end.values())


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 70))
@settings(max_examples=100)
def test_a_split_box_is_whole(shape, max_numel):
    written = np.zeros(shape, dtype=int)
    for part in Box.whole(tuple(shape)).split(max_numel):
        assert part.numel <= max_numel
        written[part.slices] += 1
    assert (written == 1).all()


some_targets = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)
copies = st.lists(st.tuples(st.integers(0, 4), some_targets, st.integers(1, 30)), max_size=60)


@given(copies, st.integers(1, 40))
@settings(max_examples=100)
def test_each_delivery_is_in_the_first_bucket_with_room_at_all_ends(cases, limit):
    sources, targets, sizes = ([case[part] for case in cases] for part in range(3))
    rooms = [Counter(), Counter()]  # the plain algorithm tries one bucket after the other
    for source, ranks, size, bucket in zip(
        sources, targets, sizes, fill_buckets(sources, targets, sizes, limit), strict=True
    ):
        size = min(size, limit)
        first = 0
        while rooms[0][source, first] + size > limit or any(
            rooms[1][target, first] + size > limit for target in ranks
        ):
            first += 1
        assert bucket == first
        rooms[0][source, first] += size
        for target in ranks:
            rooms[1][target, first] += size


@given(copies)
@settings(max_examples=100)
def test_at_an_even_pace_every_source_keeps_its_order(cases):
    sources, sizes = [case[0] for case in cases], [case[2] for case in cases]
    order = even_pace(sources, sizes)
    assert sorted(order) == list(range(len(cases)))
    for source in set(sources):
        mine = [at for at in order if sources[at] == source]
        assert mine == sorted(mine)


def test_even_pace_goes_by_bytes():
    # Source 0 sends 4 x 1 byte and source 1 2 x 100 bytes: both have sent half of their bytes at the same time.
    assert even_pace([0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 100, 100]) == [0, 4, 1, 2, 5, 3]


def test_a_full_exchange_needs_as_many_buckets_as_bytes_ask_for():
    """8 sources with 16 copies for each of 8 targets: 128 copies at each end, 4 in a bucket: 32 buckets would be perfect."""
    ends = [(source, target) for target in range(8) for source in range(8) for _ in range(16)]
    sources = [source for source, _ in ends]
    order = even_pace(sources, [10] * len(ends))
    targets = [(ends[at][1],) for at in order]
    buckets = fill_buckets([sources[at] for at in order], targets, [10] * len(ends), 40)
    assert 32 <= max(buckets) + 1 <= 40


def test_most_in_flight_is_two_buckets_in_a_row():
    buckets = [[(0, 5), (0, 2), (1, 1)], [(1, 4)], [(0, 6), (1, 3)], []]
    assert most_in_flight(buckets) == 7
    assert most_in_flight([[(0, 5)], [(0, 4)], [(1, 8)]]) == 9
    assert most_in_flight([]) == 0
