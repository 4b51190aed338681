"""A shadow rank's checkpoint, what it sends the engines, and its parts as they leave the device and come back."""

from megarl.hybrid_engine import SyncPlan
from megarl.rollout.packets import CONVERT, QUANTISE, Slice
from megarl.shadow.tracker import BLOCK
from megarl.shadow.transfers import ENGINE, WHOLE_BUCKETS, _buckets


def test_a_checkpoint_takes_nothing_of_the_device(reports) -> None:
    for report in reports.values():
        for phase in ("save", "load"):
            assert report["phases"][phase]["peak"] == report["phases"][phase]["left"] == 0
