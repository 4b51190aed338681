"""An engine that is killed and started anew, while the trainer lives on."""

import time
from pathlib import Path

import psutil
import pytest

from megarl.rollout.engine import EngineConfig, NoValidWeightsError, WeightSyncError
from megarl.rollout.links import LinkError
from tests.rollout.conftest import Model
from tests.rollout.manifests import rank_slices
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import Sender
from tests.rollout.test_sglang_engine import GREEDY, PROMPTS, UIDS, assert_serves

LINK_TIMEOUT, FEW_SECONDS = 120.0, 10


def kill(engine: EngineProcess) -> None:
    """SIGKILL for the engine's owner and all of SGLang's processes at once."""
    owner = psutil.Process(engine.process.pid)
    everything = [owner, *owner.children(recursive=True)]
    for process in everything:
        process.kill()
    engine.process.join(FEW_SECONDS)
    psutil.wait_procs(everything, timeout=FEW_SECONDS)


def connect(engine: EngineProcess, model: Model, folder: Path) -> Sender:
    """A trainer rank with `model`'s weights and links of its own, as after `megarl.trainer.sync.connect`."""
    sender = Sender(folder, [rank_slices(model.state, model.hf.config, 1, 0)], timeout=LINK_TIMEOUT)
    engine.call("connect", sender.inboxes)
    return sender


def sync(engine: EngineProcess, sender: Sender, version: int):
    """Sync with what has not changed left out; returns the version held before, what was sent, and the report."""
    held = engine.call("begin_update", version)
    sending = sender.send(version, {0: held})
    engine.call("receive_weights")
    return held, sending.result(), engine.call("finish_update")


def test_a_restarted_engine_serves_nothing_until_all_was_sent_again(model_a, model_b, tmp_path):
    config = EngineConfig(str(model_a.path), max_num_seqs=8, max_total_tokens=1024)
    engine = EngineProcess(config, tmp_path / "first.log")
    try:
        engine.start()
        old = connect(engine, model_a, tmp_path / "old")
        _, first, _ = sync(engine, old, 1)
        held, second, _ = sync(engine, old, 2)
        assert (held, second.bytes_sent, second.bytes_unchanged) == (1, 0, first.bytes_sent)
        assert engine.call("weight_version") == 2
        kill(engine)

        engine = EngineProcess(config, tmp_path / "second.log").start()
        assert engine.call("weight_version") is None
        with pytest.raises(NoValidWeightsError, match="before a sync"):
            engine.call("generate", PROMPTS, UIDS, GREEDY)

        # The trainer does not know, and sends over the links that it has.
        assert engine.call("begin_update", 3) is None
        begun = time.monotonic()
        with pytest.raises(LinkError, match=r"engine rank 0 .*died"):
            old.send(3, {0: 2}).result(LINK_TIMEOUT)
        assert time.monotonic() - begun < FEW_SECONDS
        with pytest.raises(WeightSyncError, match="no trainer is connected"):
            engine.call("receive_weights")
        with pytest.raises(LinkError, match="have to be connected anew"):
            old.send(3, {0: None}).result(LINK_TIMEOUT)

        # Connected anew, it is sent version 3 whole: of what the first engine held nothing is left out.
        new = connect(engine, model_b, tmp_path / "new")
        held, sent, report = sync(engine, new, 3)
        assert held is None
        assert (sent.bytes_sent, sent.bytes_unchanged) == (first.bytes_sent, 0)
        assert (report.bytes_written, report.bytes_kept) == ((first.bytes_sent,), (0,))
        assert_serves(engine, model_b, 3)
        held, sent, _ = sync(engine, new, 4)
        assert (held, sent.bytes_sent, sent.bytes_unchanged) == (3, 0, first.bytes_sent)
        for sender in (old, new):
            sender.close()
    finally:
        engine.process.kill()
