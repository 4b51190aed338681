"""Loads of experts equal those of Hugging Face's routers in every layout, and biases move against the loads."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from megarl.layout.grid import ParallelLayout, layers_of
from megarl.megatron.build import local_parameters, unwrap, wrap_for_training
from megarl.megatron.expert_load import ExpertLoads, violations
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.parallel import coords
from megarl.megatron.step import forward_only, train_step
from megarl.models import read_model_config
from megarl.models.layers import is_mixture
from tests.megatron.parity import VOCAB, load_model, loss_of, sequences
from tests.megatron.test_families import FAMILIES, STEADY, hugging_face, make_family
from tests.megatron.test_router_replay import GRID, batches_of, recomputation
from tests.ranks import RankPool
from tests.routing import experts_of

RATE = 0.125  # exact in float32, like its multiples


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, pa.Table, np.ndarray]]:
    """By family: a model's folder, trajectories, and the loads of its experts [layers, experts] over all predicted tokens."""

    @cache
    def make(family: str) -> tuple[str, pa.Table, np.ndarray]:
        folder = tmp_path_factory.mktemp("routed")
        make_family(folder, FAMILIES[family])
        config = read_model_config(str(folder))
        model = hugging_face(str(folder), FAMILIES[family])
        experts = np.concatenate([experts_of(model, ids)[:-1] for ids in sequences()])
        loads = np.zeros((config.num_layers, config.moe.num_experts), np.int64)
        mixtures = [layer for layer in range(config.num_layers) if is_mixture(config, layer)]
        for index, layer in enumerate(mixtures):
            loads[layer] = np.bincount(experts[:, index].ravel(), minlength=config.moe.num_experts)
        tokens = sequences()
        columns = {
            "prompt_ids": pa.array([ids[:1] for ids in tokens], pa.list_(pa.int32())),
            "response_ids": pa.array([ids[1:] for ids in tokens], pa.list_(pa.int32())),
            "response_mask": [[True] * (len(ids) - 1) for ids in tokens],
        }
        return str(folder), pa.table(columns), loads

    return make


def _train(
    rank: int, world: int, folder: str, table: pa.Table, sizes: dict[str, Any], options: dict[str, Any]
) -> tuple[np.ndarray, dict[int, np.ndarray], dict[int, np.ndarray]]:
    """The loads of a step, and this rank's biases by layer before and after their update."""
    layout = ParallelLayout(world=world, **sizes)
    config, chunks = load_model(rank, folder, layout, **options)
    loads = ExpertLoads(chunks, config.num_layers, config.moe.num_experts)
    head = lm_head(vocab_size=VOCAB, chunk_tokens=16)
    batches = batches_of(table, layout, None)
    forward_only(unwrap(chunks), batches, head)  # evaluation is not counted
    chunks = wrap_for_training(chunks)
    optimizer, scheduler = build_optimizer(chunks, STEADY)

    def biases() -> dict[int, np.ndarray]:
        own = [layer for chunk in layers_of(layout, config.num_layers, coords().pp) for layer in chunk]
        mixtures = [layer for layer in own if is_mixture(config, layer)]
        found = [tensor for name, tensor in local_parameters(chunks).items() if "expert_bias" in name]
        return {layer: tensor.numpy().copy() for layer, tensor in zip(mixtures, found, strict=bool(found))}

    train_step(chunks, optimizer, scheduler, batches, head, loss_of)
    taken, before = loads.take(), biases()
    assert not loads.take().any()
    if before:
        loads.balance(taken, RATE)
    return taken.numpy(), before, biases()


@pytest.mark.parametrize(
    ("family", "name", "recompute"),
    [
        ("deepseek_v3", "one", None),
        ("deepseek_v3", "tp2_sp_cp2_ep2", "full"),
        ("glm4_moe", "pp2_ep2", None),
        ("qwen3_moe", "pp2_vpp2", "full"),
        ("qwen3_moe", "tp2_sp_etp2", "selective"),
        ("glm4_moe", "pp2_ep2", "moe"),
        ("gpt_oss", "pp2_ep2", None),
    ],
)
def test_loads_are_hugging_faces_and_biases_move_against_them(
    ranks: RankPool, routed: Callable[[str], Any], family: str, name: str, recompute: str | None
) -> None:
    (folder, table, expected), (world, sizes) = routed(family), GRID[name]
    seen = set()
    for loads, before, after in ranks.run(
        _train, folder, table, sizes, recomputation(recompute), world=world
    ):
        assert np.array_equal(loads, expected)
        for layer, bias in before.items():
            load = expected[layer]
            moved = RATE * np.sign(load.mean() - load)
            assert np.any(moved > 0) and np.any(moved < 0)
            np.testing.assert_allclose(after[layer], bias + moved, atol=1e-6)
            seen.add(layer)
    has_bias = family not in ("qwen3_moe", "gpt_oss")
    assert seen == ({layer for layer in range(len(expected)) if expected[layer].any()} if has_bias else set())


def test_the_violation_is_the_largest_loads_part_above_the_mean() -> None:
    loads = torch.tensor([[0, 0, 0, 0], [2, 2, 2, 2], [8, 0, 0, 0], [5, 1, 1, 1]])
    assert violations(loads) == {1: 0.0, 2: 3.0, 3: 1.5}
