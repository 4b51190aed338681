"""The time at which an engine last computed something, in a file that its owner reads."""

import time

from megarl.rollout.sglang.heartbeat import Heartbeat


def test_a_time_that_another_process_reads(tmp_path):
    writer = Heartbeat.make(tmp_path / "heartbeat")
    reader = Heartbeat(tmp_path / "heartbeat")
    assert reader.last() == 0.0
    begun = time.monotonic()
    writer.beat()
    assert begun <= reader.last() <= time.monotonic()
