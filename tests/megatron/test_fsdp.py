"""Megatron-FSDP: sharding over data parallel ranks changes neither a gradient nor an update, checkpoints fit all layouts, and
the shards have the right sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.tiny_model import make_tiny_model
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import local_parameters, runnable, wrap_for_training
from megarl.megatron.fsdp import LEVELS, gather, gathered_bytes, release, shards_of, wrap_sharded
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.offload import weights_of
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.step import forward_only
from tests.megatron.checkpoint import test_checkpoint
from tests.megatron.parity import VOCAB, Case, batches, check, load_model, take_steps
from tests.megatron.states import Setting
from tests.megatron.test_parity import make_case
from tests.ranks import RankPool

FULL = "optim_grads_params"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_trains_as_hugging_face_does(ranks: RankPool, untied: Case, level: str) -> None:
    check(ranks, untied, 2, {}, fsdp=level)


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2_sp_dp2": (4, {"tp": 2, "sp": True}, {}),
    "cp2": (2, {"cp": 2}, {}),
    "recomputed": (2, {}, {"recompute_granularity": "full"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_other_layouts_too(ranks: RankPool, tied: Case, name: str) -> None:
    """With tied embeddings, whose gradient has two parts."""
    world, sizes, options = LAYOUTS[name]
    check(ranks, tied, world, sizes, fsdp=FULL, **options)


def test_bfloat16_comes_close(ranks: RankPool, untied: Case) -> None:
    check(ranks, untied, 2, {}, tolerance=2e-2, dtype=torch.bfloat16, fsdp=FULL)


def _evaluate(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Compare log-probs of a model that is not trained: unsharded, and sharded before and after its weights were on the host."""
    layout = ParallelLayout(world=world)
    _, chunks = load_model(rank, folder, layout, trainable=False)
    head, micro_batches = lm_head(vocab_size=VOCAB, chunk_tokens=16), batches(layout)
    whole = sum(tensor.nbytes for tensor in local_parameters(chunks).values())
    loaded = {name: tensor.clone() for name, tensor in local_parameters(chunks).items()}
    expected = forward_only(chunks, micro_batches, head)
    chunks = [wrap_sharded(chunks[0], FULL)]
    part = weights_of(chunks, constant=True)
    shared = part.device_bytes()
    found = [forward_only(runnable(chunks), micro_batches, head)]
    after = part.device_bytes()
    gather(chunks)
    gathered = gathered_bytes(chunks[0])
    same = all(torch.equal(tensor, loaded[name]) for name, tensor in local_parameters(chunks).items())
    part.offload()
    away = part.device_bytes()
    part.reload()
    found.append(forward_only(runnable(chunks), micro_batches, head))
    equal = all(
        torch.equal(output, wanted)
        for outputs in found
        for output, wanted in zip(outputs, expected, strict=True)
    )
    return {
        "equal": equal,
        "same": same,
        "bytes": (whole, shared, after, gathered, away, part.device_bytes()),
    }


def test_a_model_that_is_not_trained_has_a_share_of_its_weights(ranks: RankPool, untied: Case) -> None:
    """Its outputs equal the unsharded model's to the bit; between passes it has no more bytes than its shard."""
    for found in ranks.run(_evaluate, untied.folder, world=2):
        assert found["equal"] and found["same"]
        whole, shared, after, gathered, away, back = found["bytes"]
        assert whole / 2 <= shared < 0.52 * whole  # with padding
        assert shared == after == back and gathered >= whole and away == 0


def _shards(
    rank: int, world: int, case: Case
) -> tuple[list[tuple[str, int, torch.Tensor]], dict[str, torch.Tensor]]:
    layout = ParallelLayout(world=world)
    _, chunks = load_model(rank, case.folder, layout)
    chunks = wrap_for_training(chunks, fsdp=FULL)
    optimizer, scheduler = build_optimizer(chunks, case.optim)
    take_steps(chunks, optimizer, scheduler, layout)
    assert gathered_bytes(chunks[0]) == 0
    held = [(shard.name, shard.start, shard.values.clone()) for shard in shards_of(chunks[0])]
    gather(chunks)
    weights = {name: tensor.clone() for name, tensor in local_parameters(chunks).items()}
    release(chunks)
    return held, weights


def test_shards_are_ranges_that_together_are_the_weights(ranks: RankPool, untied: Case) -> None:
    results = ranks.run(_shards, untied, world=2)
    weights = results[0][1]
    seen = {name: torch.zeros(tensor.numel()) for name, tensor in weights.items()}
    for held, _ in results:
        for name, start, values in held:
            whole = weights[f"0:{name}"].view(-1)
            assert torch.equal(whole[start : start + values.numel()], values), name
            seen[f"0:{name}"][start : start + values.numel()] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


MIXED = [Setting(1, {}), Setting(4, {"tp": 2, "pp": 2})]


@pytest.mark.parametrize("level", ["optim_grads", FULL])
def test_checkpoints_go_to_every_layout(ranks: RankPool, tmp_path: Path, tied: Case, level: str) -> None:
    test_checkpoint.check(ranks, tmp_path, tied.folder, Setting(2, {}, fsdp=level), MIXED)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts(ranks: RankPool, tmp_path: Path, family: str) -> None:
    """A checkpoint of data parallel ranks with shards of all experts is loaded by ranks that have some of the experts each."""
    sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": VOCAB}
    model = make_tiny_model(tmp_path / "model", ["two words"], family=family, **sizes)
    test_checkpoint.check(ranks, tmp_path, str(model), Setting(2, {}, fsdp=FULL), [Setting(2, {"ep": 2})])


def test_checkpoints_come_from_another_layout(ranks: RankPool, tmp_path: Path, tied: Case) -> None:
    others = [
        Setting(2, {}, dtype=torch.bfloat16, fsdp=FULL),
        Setting(4, {"tp": 2, "sp": True}, dtype=torch.bfloat16, fsdp=FULL),
    ]
    test_checkpoint.check(ranks, tmp_path, tied.folder, Setting(2, {"pp": 2}, dtype=torch.bfloat16), others)
