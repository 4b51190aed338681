"""An engine that is killed and started anew, while the trainer lives on."""

import time
from pathlib import Path

import psutil
import pytest

from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.rollout.engine import EngineConfig, NoValidWeightsError, WeightSyncError
from megarl.weight_sync.links import LinkError
from tests.rollout.adapter_trainer import AdapterTrainer, adapters_of, engine_adapters, peft_model
from tests.rollout.conftest import Model
from tests.rollout.manifests import rank_slices
from tests.rollout.planned import assert_as_planned
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import Sender
from tests.rollout.sglang.test_engine import GREEDY, PROMPTS, UIDS, assert_serves
from tests.rollout.test_sync_of_adapters import assert_serves as assert_serves_adapters

LINK_TIMEOUT, FEW_SECONDS = 120.0, 40


def kill(engine: EngineProcess) -> None:
    """Send SIGKILL to the engine's owner and all of SGLang's processes at once."""
    owner = psutil.Process(engine.process.pid)
    everything = [owner, *owner.children(recursive=True)]
    for process in everything:
        process.kill()
    engine.process.join(FEW_SECONDS)
    psutil.wait_procs(everything, timeout=FEW_SECONDS)


def connect(engine: EngineProcess, model: Model, folder: Path) -> Sender:
    """A trainer rank with `model`'s weights and links of its own, as after `megarl.trainer.roles.weight_sync.connect`."""
    slices = [rank_slices(model.state, model.hf.config, 1, 0)]
    sender = Sender(folder, slices, timeout=LINK_TIMEOUT, skip_unchanged=True)
    engine.call("connect", sender.inboxes)
    return sender


def sync(engine: EngineProcess, sender: Sender, version: int):
    """Sync without the unchanged tensors; returns the version that the engine held before, what was sent, and the report."""
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

        # The trainer does not know of the restart, and sends over the links that it has.
        assert engine.call("begin_update", 3) is None
        begun = time.monotonic()
        with pytest.raises(LinkError, match=r"engine rank 0 .*died"):
            old.send(3, {0: 2}).result(LINK_TIMEOUT)
        assert time.monotonic() - begun < FEW_SECONDS
        with pytest.raises(WeightSyncError, match="no trainer is connected"):
            engine.call("receive_weights")
        with pytest.raises(LinkError, match="have to be connected anew"):
            old.send(3, {0: None}).result(LINK_TIMEOUT)

        # Connected anew, the engine is sent the complete version 3: no tensor that the first engine held is left out.
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


@pytest.mark.slow
def test_a_restarted_engine_gets_the_weights_before_adapters_alone(model_a, tmp_path):
    """One rank, adapters on some projections of fused layers."""
    lora = LoraConfig(rank=4, alpha=3, use_rslora=True, target_modules=("q_proj", "v_proj", "down_proj"))
    config = EngineConfig(
        str(model_a.path),
        max_num_seqs=8,
        max_total_tokens=1024,
        adapters=engine_adapters(model_a.path, lora),
    )

    def connect_adapters(folder: Path) -> AdapterTrainer:
        trainer = AdapterTrainer(model_a.path, lora, ParallelLayout(world=2, tp=2), 1, folder)
        engine.call("connect", trainer.inboxes)
        return trainer

    engine = EngineProcess(config, tmp_path / "first.log")
    models = [peft_model(model_a.path, lora, seed) for seed in (1, 2)]
    try:
        engine.start()
        old = connect_adapters(tmp_path / "old")
        for version, model in enumerate(models, start=1):
            old.put(adapters_of(model))
            old.run(engine, version, complete=version == 1)
            assert_serves_adapters(engine, model, version)
        assert_as_planned(engine, lora)
        kill(engine)

        engine = EngineProcess(config, tmp_path / "second.log").start()
        # The trainer does not know of the restart, and sends only adapters over the links that it has.
        assert engine.call("begin_update", 3) is None
        with pytest.raises(WeightSyncError, match="no trainer is connected"):
            engine.call("receive_weights", False)
        with pytest.raises(LinkError, match=r"engine rank 0 .*died"):
            old.outboxes[0].send(3, old.ranks[0], complete=False)
        new = connect_adapters(tmp_path / "new")
        assert engine.call("begin_update", 3) is None
        with pytest.raises(WeightSyncError, match="the engine holds none"):
            engine.call("receive_weights", False)
        with pytest.raises(NoValidWeightsError):
            engine.call("generate", PROMPTS, UIDS, GREEDY)
        new.put(adapters_of(models[1]))
        report = new.run(engine, 3)
        assert list(report.bytes_written) == new.sync.bytes_received()
        assert_serves_adapters(engine, models[1], 3)
        new.put(adapters_of(models[0]))
        new.run(engine, 4, complete=False)
        assert_serves_adapters(engine, models[0], 4)
        for trainer in (old, new):
            trainer.close()
    finally:
        engine.process.kill()
