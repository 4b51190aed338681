"""A shadow rank's checkpoint, its sends to the engines, and its parts when they leave the device and come back."""

import pytest

from megarl.layout import Box
from megarl.shadow.transfers import WHOLE_BUCKETS, _buckets
from megarl.weight_sync.packets import Slice


def test_a_checkpoint_has_what_the_rank_holds_and_takes_nothing_of_the_device(reports) -> None:
    for report in reports.values():
        for phase in ("save", "load"):
            assert report["phases"][phase]["peak"] == report["phases"][phase]["left"] == 0
        # Buffers end with padding, which is not saved.
        held = report["parts"]["weights"] + report["parts"]["optimizer"]
        assert report["saved"] == pytest.approx(held, rel=0.02)


def test_the_engines_are_sent_each_weight_once(reports) -> None:
    for (role, _), report in reports.items():
        weights = report["parts"]["weights"] if role == "actor" else 0
        assert report["sent"] == pytest.approx(weights, rel=0.02)
        if role == "actor":  # slots for sends and for receives, checksums, and tables of slices
            assert 2 * weights < report["phases"]["sync"]["peak"] < 3 * weights
            assert report["phases"]["sync"]["left"] == 0


def test_a_bucket_is_packed_by_a_few_launches_whatever_is_in_it_and_nothing_is_waited_for(reports) -> None:
    for (role, _), report in reports.items():
        assert (report["sent_buckets"] == []) == (role != "actor")
        for slices, launches in report["sent_buckets"]:
            assert slices > 10 >= launches > 0
        assert report["waits"].get("sync", {}) == {}


def test_each_part_frees_what_it_has_and_takes_it_back(reports) -> None:
    for report in reports.values():
        for part, moved in report["moved"].items():
            held = report["parts"][part]
            # The gradients' release also frees what Transformer Engine keeps for their shapes after an update.
            kept = report["phases"]["first_update"]["kept"] if part == "gradients" else 0
            # A reference's tensors are not in one buffer, and the allocator rounds each of them up.
            assert held <= moved["freed"] - kept == moved["back"] < held + (16 << 10), part


def test_what_is_alike_is_sent_a_few_times_only() -> None:
    """Layers have slices of the same kinds, and a real rank has thousands of slices."""

    def slice_of(number: int, rows: int) -> Slice:
        return Slice(f"layers.{number}.weight", f"0:{number}", Box.whole((rows, 64)), "bfloat16")

    each = slice_of(0, 4).nbytes
    slices = [*(slice_of(number, 4) for number in range(100)), slice_of(100, 8)]
    buckets = _buckets(slices, 2 * each)
    sent = [[item.local for item in parcel.slices] for (parcel,) in buckets]
    assert sent == [["0:0", "0:1"], ["0:2", "0:3"], ["0:4", "0:5"], ["0:6"], ["0:100"]]
    assert len(sent) == WHOLE_BUCKETS + 2
