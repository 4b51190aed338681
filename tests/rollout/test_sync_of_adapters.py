"""A real engine serves a model with adapters, next to the weights or merged into them, as PEFT computes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoints.hf.load import load_hf_weights
from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, local_parameters
from megarl.megatron.lora.lora import attach_adapters, rank_pieces
from megarl.megatron.lora.merged import MergedParameters
from megarl.megatron.parallel import coords, init_parallel
from megarl.models import read_model_config
from megarl.models.lora import adapted_weights, adapter_pieces, logical_adapters
from megarl.plan.memory import SLOTS
from megarl.rollout.engine import EngineConfig, NoValidWeightsError, WeightSyncError
from megarl.weight_sync.served_model import AdapterSlot, buffers_of
from megarl.weight_sync.sync_plan import P2P
from tests.ranks import RankPool
from tests.rollout.adapter_trainer import BUCKET, AdapterTrainer, adapters_of, engine_adapters, peft_model
from tests.rollout.conftest import TP, Model
from tests.rollout.manager import Manager
from tests.rollout.planned import assert_as_planned
from tests.rollout.runner import EngineProcess
from tests.rollout.sglang.test_engine import GREEDY, PROMPTS, UIDS, hf_greedy, hf_log_probs
from tests.rollout.sglang.test_families import make_model

LORA = LoraConfig(rank=4, alpha=6)
STAGES = ParallelLayout(world=2, pp=2)


@dataclass
class Served:
    """An engine with adapters, and trainer ranks that are connected to it."""

    engine: EngineProcess
    trainer: AdapterTrainer
    folder: Path

    def sync(self, version: int, complete: bool, seed: int | None = None) -> Any:
        """Give the engine the adapters of `seed`; returns PEFT's model."""
        model = peft_model(self.folder, LORA, seed=version if seed is None else seed)
        self.trainer.put(adapters_of(model))
        report = self.trainer.run(self.engine, version, complete)
        assert list(report.bytes_written) == self.trainer.sync.bytes_received(complete)
        return model


def assert_serves(engine: EngineProcess, model: Any, version: int) -> None:
    """Greedy answers, token for token, and their log-probs equal those of PEFT's model."""
    wrapped = Model(Path(), model)
    for prompt, answer in zip(PROMPTS, engine.call("generate", PROMPTS, UIDS, GREEDY), strict=True):
        assert list(answer.response_ids) == hf_greedy(wrapped, prompt, 16)
        expected = hf_log_probs(wrapped, prompt, answer.response_ids)
        assert answer.log_probs == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert answer.weight_version == version


@pytest.fixture(scope="module")
def adapted(model_a: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    config = EngineConfig(
        str(model_a.path),
        tensor_parallel_size=TP,
        max_num_seqs=8,
        max_total_tokens=1024,
        enable_memory_saver=True,
        adapters=engine_adapters(model_a.path, LORA),
    )
    engine = EngineProcess(config, folder / "engine.log").start()
    trainer = AdapterTrainer(model_a.path, LORA, STAGES, TP, folder / "inboxes")
    yield Served(engine, trainer, model_a.path)
    trainer.close()
    engine.close()


@pytest.fixture
def served(adapted: Served) -> Served:
    """The engine, connected to new trainer ranks and with a complete version 1."""
    adapted.trainer.close()
    adapted.trainer = AdapterTrainer(adapted.folder, LORA, STAGES, TP, adapted.trainer.inboxes[0].parent)
    adapted.engine.call("connect", adapted.trainer.inboxes)
    adapted.sync(1, complete=True)
    return adapted


def test_every_version_is_served_as_peft_computes_it(served: Served) -> None:
    """After the first version only adapters are sent: greedy answers, also to prompts whose prefixes were cached before."""
    sync = served.trainer.sync
    assert 0 < sum(sync.bytes_received(complete=False)) < 0.5 * sum(sync.bytes_received())
    for version in (2, 3):
        model = served.sync(version, complete=False)
        assert (
            sum(one.bytes_sent for one in served.trainer.sent) == sync.account(complete=False)["bytes_total"]
        )
        assert_serves(served.engine, model, version)
        adapted = [hf_greedy(Model(Path(), model), prompt, 16) for prompt in PROMPTS]
        with model.disable_adapter():
            assert adapted != [hf_greedy(Model(Path(), model), prompt, 16) for prompt in PROMPTS]


def test_memory_with_adapters_is_as_planned(served: Served) -> None:
    assert_as_planned(served.engine, LORA)


def test_the_last_of_a_hundred_versions_is_served(served: Served) -> None:
    for version in range(2, 101):
        for tensors in served.trainer.ranks:
            for name, tensor in tensors.items():
                tensor.add_(0.003 if ".lora." in name else 0.0)
        served.trainer.run(served.engine, version, complete=False)
    assert_serves(served.engine, served.sync(101, complete=False), 101)


def test_point_to_point_also_begins_with_the_adapters(served: Served, tmp_path: Path) -> None:
    trainer = AdapterTrainer(served.folder, LORA, ParallelLayout(world=2, tp=2), TP, tmp_path, transport=P2P)
    served.engine.call("connect", trainer.inboxes)
    model = peft_model(served.folder, LORA, seed=7)
    trainer.put(adapters_of(model))
    trainer.run(served.engine, 2, complete=True)
    for rank in served.engine.call("memory"):
        assert BUCKET < rank["sync_buffers"] < 1.1 * SLOTS * BUCKET  # the packets' headers are added
    trainer.put({name: torch.zeros_like(tensor) for name, tensor in adapters_of(model).items()})
    trainer.run(served.engine, 3, complete=False)
    trainer.put(adapters_of(model))
    trainer.run(served.engine, 4, complete=False)
    assert_serves(served.engine, model, 4)
    trainer.close()


def test_what_did_not_arrive_as_it_was_sent_is_never_served(served: Served) -> None:
    """After an error the engine takes only a complete version."""
    trainer, engine = served.trainer, served.engine

    def flip(token, packet):
        packet.data[packet.body] ^= 0x10

    trainer.tamper(flip)
    with pytest.raises(
        WeightSyncError, match=r"weights of version 2 refused: model.layers.* in model.layers.*lora_[AB]"
    ):
        trainer.run(engine, 2, complete=False)
    with pytest.raises(NoValidWeightsError):
        engine.call("generate", PROMPTS, UIDS, GREEDY)
    trainer.tamper(lambda token, packet: None)
    with pytest.raises(WeightSyncError, match="without the weights that training leaves alone"):
        engine.call("begin_update", 3)
        engine.call("receive_weights", False)
    assert_serves(engine, served.sync(4, complete=True), 4)


def test_weights_whose_memory_was_away_come_again(served: Served) -> None:
    engine, adapters = served.engine, 0
    for tensor, shape in logical_adapters(read_model_config(str(served.folder)), LORA).items():
        cut = any(part in tensor for part in ("o_proj", "down_proj")) == tensor.endswith("lora_A.weight")
        adapters += 4 * torch.Size(shape).numel() // (TP if cut else 1)
    engine.call("release_memory", ["kv_cache", "weights"])
    assert [rank["weights"] for rank in engine.call("memory")] == [adapters] * TP  # the adapters stay
    engine.call("resume_memory", ["weights"])
    assert engine.call("begin_update", 2) is None
    with pytest.raises(WeightSyncError, match="without the weights that training leaves alone"):
        engine.call("receive_weights", False)
    model = served.sync(3, complete=True)
    engine.call("resume_memory", ["kv_cache"])
    assert_serves(engine, model, 3)


def test_what_the_engine_was_not_started_for_is_refused(
    served: Served, engine: EngineProcess, tmp_path: Path
) -> None:
    def refused(by: EngineProcess, lora: LoraConfig | None, message: str) -> None:
        trainer = AdapterTrainer(served.folder, lora, STAGES, TP, tmp_path)
        by.call("connect", trainer.inboxes)
        with pytest.raises(WeightSyncError, match=message):
            trainer.run(by, 2)
        trainer.close()

    refused(served.engine, None, "started with adapters, weights come without them")
    refused(engine, LORA, "started without adapters, weights come with them")
    refused(served.engine, LoraConfig(rank=4, alpha=8), "scales adapters by 1.5, the trainer by 2")
    refused(served.engine, LoraConfig(rank=3, alpha=4.5), r"lora_A: \d+ of \d+ elements missing")
    refused(
        served.engine, LoraConfig(rank=4, alpha=6, target_modules=("q_proj",)), r"gate_up_proj.lora_A: \d+ of"
    )


def test_adapters_that_left_their_slot_are_noticed() -> None:
    manager = Manager(torch.nn.Linear(1, 1))
    slot = AdapterSlot(manager.base_model)
    assert {name: tuple(tensor.shape) for name, tensor in slot.tensors.items()} == {
        "0.qkv.lora_A": (6, 4), "0.qkv.lora_B": (8, 2), "1.o.lora_A": (2, 4), "1.o.lora_B": (4, 2)
    }  # fmt: skip
    slot.tensors["1.o.lora_B"].zero_()
    assert manager.lora_modules[1]["1.o"].B_buffer.sum() == 0
    assert slot.problem(1.5) is None
    assert slot.problem(1.0) == "the engine scales adapters by 1.5, the trainer by 1"
    manager.fetch_new_loras({None})
    assert slot.problem(1.5) == "SGLang took the adapters out of their slot"
    assert buffers_of(torch.nn.Linear(1, 1)) == {}


def _merged(
    rank: int, world: int, folder: Path, lora: LoraConfig, adapters: list[dict[str, torch.Tensor]], tp: int
) -> list[dict[str, torch.Tensor]]:
    """The rank's tensors with each of `adapters` merged into them."""
    layout = ParallelLayout(world=world, tp=tp)
    init_parallel(layout, rank, world)
    config = read_model_config(str(folder))
    chunks = build_model(config, layout, dtype=torch.float32)
    load_hf_weights(str(folder), config, layout, rank, local_parameters(chunks))
    attach_adapters(chunks, config, layout, lora)
    pieces = adapter_pieces(rank_pieces(config, layout, coords()), adapted_weights(config, lora), lora)
    found = []
    for values in adapters:
        local = local_parameters(chunks)
        for tensor, box, name, place in pieces:
            local[name][place.slices].copy_(values[tensor][box.slices])
        merged = MergedParameters(chunks)
        found.append({name: merged[name].detach().clone() for name in merged})
    return found


@pytest.mark.parametrize(
    "lora", [LORA, LoraConfig(rank=4, alpha=6, use_dora=True, target_modules=("q_proj", "down_proj"))]
)
def test_merged_weights_are_served_as_peft_computes_them(
    ranks: RankPool, engine: EngineProcess, model_a: Model, tmp_path: Path, lora: LoraConfig
) -> None:
    """Frozen weights are not sent again where unchanged tensors are left out."""
    models = [peft_model(model_a.path, lora, seed) for seed in (1, 2)]
    results = ranks.run(_merged, model_a.path, lora, [adapters_of(model) for model in models], 2, world=2)
    first, second = zip(*results, strict=True)
    trainer = AdapterTrainer(
        model_a.path, None, ParallelLayout(world=2, tp=2), TP, tmp_path, first, skip_unchanged=True
    )
    engine.call("connect", trainer.inboxes)
    trainer.run(engine, 1, held=dict.fromkeys(range(TP)))
    assert_serves(engine, models[0], 1)
    trainer.ranks = list(second)
    report = trainer.run(engine, 2, held=dict.fromkeys(range(TP), 1))
    assert_serves(engine, models[1], 2)
    adapted, kept = adapted_weights(read_model_config(str(model_a.path)), lora), [0] * TP
    for copy in trainer.sync.plan.copies:
        kept[copy.target_rank] += 0 if copy.tensor in adapted else trainer.sync.plan.bytes_of(copy)
    assert list(report.bytes_kept) == kept
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", family, seed=1)
    config = EngineConfig(
        str(folder),
        tensor_parallel_size=TP,
        max_num_seqs=8,
        max_total_tokens=1024,
        adapters=engine_adapters(folder, LORA),
    )
    engine = EngineProcess(config, tmp_path / "engine.log").start()
    trainer = AdapterTrainer(folder, LORA, ParallelLayout(world=2, tp=2), TP, tmp_path / "inboxes")
    engine.call("connect", trainer.inboxes)
    for version in (1, 2):
        model = peft_model(folder, LORA, seed=version)
        trainer.put(adapters_of(model))
        trainer.run(engine, version, complete=version == 1)
        assert_serves(engine, model, version)
    trainer.close()
    engine.close()
