"""How sends are shared out among holders that are equally near."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.layout import Box, Layout, Piece, RankPlace, Shard, make_plan
from megarl.layout.flows import share_out


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 7))
@settings(max_examples=100)
def test_nobody_sends_more_than_an_equal_share_and_the_largest_transfer(sizes, num_senders):
    share = share_out(sizes, num_senders)
    loads = [0] * num_senders
    for size, sender in zip(sizes, share.sender_of, strict=True):
        loads[sender] += size
    assert loads == share.loads and sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / num_senders + max(sizes)


def test_the_largest_goes_first():
    assert share_out([1, 1, 2], num_senders=2).loads == [2, 2]


def test_a_full_round_of_targets_is_exactly_equal():
    """10 tensors do not divide evenly among 4 holders, but the 8 targets of each tensor take turns."""
    pieces = [Piece(f"w{index}", Box((0,), (30,)), "local", Box((30 * index,), (30,))) for index in range(10)]
    source = Layout.by_rank("source", 4, lambda rank: pieces)
    target = Layout("target", 8, (Shard(range(8), lambda: pieces),))
    assert make_plan(source, target).account().sent == (600, 600, 600, 600)


def test_replicas_of_a_stage_send_alike_whatever_node_is_served():
    """16 replicas on 4 nodes; 3 targets on each of these nodes and 5 on another node take 10 tensors each."""
    tensors = [f"w{index}" for index in range(10)]
    pieces = [Piece(name, Box((0,), (30,)), name, Box((0,), (30,))) for name in tensors]
    near = [RankPlace(f"node{node}", f"other{index}") for node in range(4) for index in range(3)]
    away = [RankPlace("far", str(index)) for index in range(5)]
    source = Layout.by_rank(
        "source",
        16,
        lambda rank: pieces,
        tuple(RankPlace(f"node{rank // 4}", str(rank % 4)) for rank in range(16)),
    )
    target = Layout.by_rank("target", 17, lambda rank: pieces, tuple(near + away))
    account = make_plan(source, target).account()
    intra = [sent["intra_node"] for sent in account.sent_by_link]
    inter = [sent["inter_node"] for sent in account.sent_by_link]
    # Each node's four holders serve its three targets: 3 x 300 / 4 = 225 on average; all serve the other targets: 5 x 300 / 16 = 94.
    assert sum(intra[:4]) == 900 and max(intra) <= 225 + 3 * 30
    assert sum(inter) == 1500 and max(inter) <= 94 + 5 * 30
