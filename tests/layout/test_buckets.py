"""Buckets: bounded at both ends, and few."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.layout.account import most_in_flight
from megarl.layout.buckets import even_pace, fill_buckets

copies = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 30)), max_size=60)


@given(copies, st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_each_copy_is_in_the_first_bucket_with_room_at_both_ends(cases, limit):
    sources, targets, sizes = ([case[part] for case in cases] for part in range(3))
    rooms = [Counter(), Counter()]  # the obvious way, by trying one bucket after the other
    for source, target, size, bucket in zip(
        sources, targets, sizes, fill_buckets(sources, targets, sizes, limit), strict=True
    ):
        size = min(size, limit)
        first = 0
        while rooms[0][source, first] + size > limit or rooms[1][target, first] + size > limit:
            first += 1
        assert bucket == first
        rooms[0][source, first] += size
        rooms[1][target, first] += size


@given(copies)
@settings(max_examples=100, deadline=None)
def test_at_an_even_pace_every_source_keeps_its_order(cases):
    sources, sizes = [case[0] for case in cases], [case[2] for case in cases]
    order = even_pace(sources, sizes)
    assert sorted(order) == list(range(len(cases)))
    for source in set(sources):
        mine = [at for at in order if sources[at] == source]
        assert mine == sorted(mine)


def test_even_pace_goes_by_bytes():
    # Source 0 sends 4 x 1 byte, source 1 2 x 100 bytes: half of each first.
    assert even_pace([0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 100, 100]) == [0, 4, 1, 2, 5, 3]


def test_a_full_exchange_needs_as_many_buckets_as_bytes_ask_for():
    """8 sources with 16 copies for each of 8 targets: 128 copies at each end, 4 in a bucket: 32 would be perfect."""
    ends = [(source, target) for target in range(8) for source in range(8) for _ in range(16)]
    sources = [source for source, _ in ends]
    order = even_pace(sources, [10] * len(ends))
    buckets = fill_buckets([sources[at] for at in order], [ends[at][1] for at in order], [10] * len(ends), 40)
    assert 32 <= max(buckets) + 1 <= 40


def test_most_in_flight_is_two_buckets_in_a_row():
    buckets = [[(0, 5), (0, 2), (1, 1)], [(1, 4)], [(0, 6), (1, 3)], []]
    assert most_in_flight(buckets) == 7
    assert most_in_flight([[(0, 5)], [(0, 4)], [(1, 8)]]) == 9
    assert most_in_flight([]) == 0
