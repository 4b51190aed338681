"""Routers that choose given experts: loss and gradients equal those of Hugging Face's model with the same experts, in every layout."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from megarl.data.routing import ROUTED_EXPERTS, RoutingShape, routing_column
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import unwrap, wrap_for_training
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import PackedBatch, Routing, arrange_trajectories
from megarl.megatron.parallel import coords
from megarl.megatron.router_replay import (
    layers_of_stages,
    replay_routings,
    routing_shape,
    start_recording,
    take_counts,
    take_recorded,
)
from megarl.megatron.step import forward_only, train_step
from megarl.models import ModelConfig, read_model_config
from tests.megatron.parity import TOLERANCE, VOCAB, load_model, loss_of, sequences, train_hugging_face
from tests.megatron.test_families import FAMILIES, STEADY, hugging_face, make_family
from tests.ranks import RankPool
from tests.routing import experts_of


@dataclass(frozen=True)
class Forced:
    """A model's folder, trajectories with experts, and Hugging Face's results for them."""

    folder: str
    table: pa.Table
    expected: list[tuple[float, float]]  # (loss, gradient norm) of two steps
    own: list[np.ndarray]  # the experts that the model itself chooses, by trajectory, in ascending order


def routing_on_rank(config: ModelConfig, layout: ParallelLayout) -> Routing:
    return Routing(routing_shape(config), layers_of_stages(config, layout)[coords().pp])


def draw_experts(shape: RoutingShape) -> list[np.ndarray]:
    """Random experts for each token except each sequence's last."""
    generator = np.random.default_rng(7)
    found = []
    for ids in sequences():
        order = generator.random((len(ids) - 1, shape.layers, shape.num_experts)).argsort(-1)
        found.append(order[..., : shape.top_k].astype(shape.dtype))
    return found


def table_of(experts: list[np.ndarray], shape: RoutingShape) -> pa.Table:
    tokens = sequences()
    columns = {
        "prompt_ids": pa.array([ids[:1] for ids in tokens], pa.list_(pa.int32())),
        "response_ids": pa.array([ids[1:] for ids in tokens], pa.list_(pa.int32())),
        "response_mask": [[True] * (len(ids) - 1) for ids in tokens],
        ROUTED_EXPERTS: routing_column(experts, shape),
    }
    return pa.table(columns)


def force(model: PreTrainedModel, experts: list[np.ndarray]) -> None:
    """Have Hugging Face's routers choose these experts, for one sequence after the other, starting again after the last."""
    layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    number = {"of": 0}

    def chosen(index: int, own: torch.Tensor) -> torch.Tensor:
        given = torch.from_numpy(experts[number["of"] % len(experts)][:, index].astype(np.int64))
        return torch.cat([given, own[-1:]])

    def softmax(index: int, gate: Any, arguments: object, outputs: Any) -> Any:
        logits, _, own = outputs
        indices = chosen(index, own)
        weights = torch.softmax(logits, -1, dtype=torch.float).gather(1, indices)
        if getattr(gate, "norm_topk_prob", True):  # gpt-oss's softmax is over the chosen experts
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), indices

    def sigmoid(index: int, moe: Any, original: Callable, logits: torch.Tensor) -> Any:
        own, _ = original(logits)
        indices = chosen(index, own)
        weights = logits.sigmoid().gather(1, indices)
        if moe.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return indices, weights * moe.routed_scaling_factor

    for index, moe in enumerate(layers):
        if hasattr(moe, "route_tokens_to_experts"):
            moe.route_tokens_to_experts = partial(sigmoid, index, moe, moe.route_tokens_to_experts)
        else:
            gate = moe.router if hasattr(moe, "router") else moe.gate
            gate.register_forward_hook(partial(softmax, index))
    model.register_forward_hook(lambda *_: number.update(of=number["of"] + 1))


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Forced]:
    @cache
    def make(name: str) -> Forced:
        folder = tmp_path_factory.mktemp("forced")
        make_family(folder, FAMILIES[name])
        shape = routing_shape(read_model_config(str(folder)))
        experts = draw_experts(shape)
        model = hugging_face(str(folder), FAMILIES[name])
        own = [experts_of(model, ids)[:-1] for ids in sequences()]
        force(model, experts)
        return Forced(str(folder), table_of(experts, shape), train_hugging_face(model, STEADY), own)

    return make


def batches_of(table: pa.Table, layout: ParallelLayout, routing: Any, micro: int = 2) -> list[PackedBatch]:
    place = coords()
    rows = list(range(place.dp, table.num_rows, layout.dp))
    return [
        arrange_trajectories(
            table,
            rows[start : start + micro],
            routing=routing,
            tp=layout.tp,
            cp=layout.cp,
            cp_rank=place.cp,
            sequence_parallel=layout.sp,
        ).on_device()
        for start in range(0, len(rows), micro)
    ]


def recomputation(kind: str | None) -> dict[str, Any]:
    """Options to build a model with. `kind`: a granularity, or "moe": only MoE layers are recomputed."""
    if kind == "moe":
        return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return {"recompute_granularity": kind}


def _train(
    rank: int, world: int, folder: str, table: pa.Table, sizes: dict[str, Any], options: dict[str, Any]
) -> tuple[list[tuple[float, float]], list[float]]:
    """(Global loss, gradient norm) of two steps, and this rank's counts of choices."""
    layout = ParallelLayout(world=world, **sizes)
    config, chunks = load_model(rank, folder, layout, **options)
    replays, routing = replay_routings(chunks), routing_on_rank(config, layout)
    chunks = wrap_for_training(chunks)
    optimizer, scheduler = build_optimizer(chunks, STEADY)
    head, history = lm_head(vocab_size=VOCAB, chunk_tokens=16), []
    for _ in range(2):
        batches = batches_of(table, layout, routing)
        result = train_step(chunks, optimizer, scheduler, batches, head, loss_of)
        history.append((result.stats["loss"], result.grad_norm))
    return history, take_counts(replays).tolist()


GRID = {
    "one": (1, {}),
    "tp2_sp_ep2": (2, {"tp": 2, "sp": True, "ep": 2}),
    "ep2": (2, {"ep": 2}),
    "pp2": (2, {"pp": 2}),
    "pp2_vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2_sp_cp2_ep2": (4, {"tp": 2, "sp": True, "cp": 2, "ep": 2}),
    "pp2_ep2": (4, {"pp": 2, "ep": 2}),
    "tp2_sp_etp2": (2, {"tp": 2, "sp": True, "etp": 2}),
}
CASES = [
    *[("qwen3_moe", name, None) for name in GRID],
    ("qwen3_moe with plain scores", "tp2_sp_ep2", None),
    ("deepseek_v3", "pp2_ep2", None),
    ("deepseek_v3", "tp2_sp_ep2", "full"),
    ("glm4_moe", "ep2", "full"),
    ("gpt_oss", "tp2_sp_ep2", None),
    ("gpt_oss", "pp2_ep2", "moe"),
    ("qwen3_moe", "pp2_vpp2", "full"),
    ("qwen3_moe", "pp2_ep2", "selective"),
    ("qwen3_moe", "pp2_ep2", "moe"),
    ("deepseek_v3", "pp2_vpp2", "moe"),
]


@pytest.mark.parametrize(("family", "name", "recompute"), CASES)
def test_trains_as_hugging_face_with_the_same_experts(
    ranks: RankPool, forced: Callable[[str], Forced], family: str, name: str, recompute: str | None
) -> None:
    case, (world, sizes) = forced(family), GRID[name]
    options = recomputation(recompute)
    for history, _ in ranks.run(_train, case.folder, case.table, sizes, options, world=world):
        for (loss, norm), (expected_loss, expected_norm) in zip(history, case.expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=TOLERANCE)


def _count(
    rank: int, world: int, folder: str, table: pa.Table, sizes: dict[str, Any]
) -> tuple[list[float], list[Any], list[Any]]:
    layout = ParallelLayout(world=world, **sizes)
    config, chunks = load_model(rank, folder, layout, trainable=False)
    replays, routing = replay_routings(chunks), routing_on_rank(config, layout)
    head = lm_head(vocab_size=VOCAB, chunk_tokens=16)
    replayed = forward_only(unwrap(chunks), batches_of(table, layout, routing), head)
    counts = take_counts(replays).tolist()
    own = forward_only(unwrap(chunks), batches_of(table, layout, None), head)
    assert take_counts(replays).tolist() == [0, 0]
    return counts, replayed, own


def test_choices_that_differ_are_counted(ranks: RankPool, forced: Callable[[str], Forced]) -> None:
    """With the model's own experts no choice differs and the log-probs are its own; with random ones at least as many differ as numpy counts in
    the first layer."""
    case = forced("deepseek_v3")
    shape = routing_shape(read_model_config(case.folder))
    total = sum(len(experts) for experts in case.own) * shape.layers
    own = table_of([experts.astype(shape.dtype) for experts in case.own], shape)
    results = ranks.run(_count, case.folder, own, {"ep": 2}, world=2)
    assert [sum(column) for column in zip(*(counts for counts, _, _ in results), strict=True)] == [0, total]
    for _, replayed, plain in results:
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(replayed, plain, strict=True))
    found = ranks.run(_count, case.folder, case.table, {}, world=1)[0]
    drawn = [np.sort(experts, -1) for experts in draw_experts(shape)]
    first = sum((a[:, 0] != b[:, 0]).any(-1).sum() for a, b in zip(drawn, case.own, strict=True))
    assert found[0][1] == total and found[0][0] >= first > 0
    assert not all(torch.allclose(a, b, atol=1e-3) for a, b in zip(found[1], found[2], strict=True))


def with_twins(source: Path, target: Path, seed: int) -> Path:
    """A copy of a model in which every second expert's router weights equal the previous expert's, except for noise of 1e-6."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        weight = tensors[name].clone()
        weight[1::2] = weight[::2] + 1e-6 * torch.randn(weight[::2].shape, generator=generator)
        tensors[name] = weight
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@torch.no_grad()
def test_where_experts_are_nearly_equal_only_replay_keeps_the_log_probs(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Hugging Face's model stands for the engine. The trainer's weights differ by 1e-6, which stands for the rounding of different kernels."""
    make_family(tmp_path / "drawn", FAMILIES["qwen3_moe"])
    engine, trainer = (
        with_twins(tmp_path / "drawn", tmp_path / name, seed) for seed, name in enumerate("ab")
    )
    model = hugging_face(str(engine), FAMILIES["qwen3_moe"])
    shape = routing_shape(read_model_config(str(engine)))
    experts = [experts_of(model, ids)[:-1].astype(shape.dtype) for ids in sequences()]
    counts, replayed, own = ranks.run(_count, str(trainer), table_of(experts, shape), {}, world=1)[0]
    assert counts[0] > 0.1 * counts[1], "choices are others"
    expected = []
    for ids in sequences():
        log_probs = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
        expected.append(log_probs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    differences = []
    for outputs in (replayed, own):
        found = torch.cat([output[:, 0] for output in outputs])
        live = torch.cat([torch.arange(len(ids)) < len(ids) - 1 for ids in sequences()])
        differences.append((found[live] - torch.cat(expected)).abs().max().item())
    assert differences[0] < 1e-4 and differences[1] > 1e-2, differences


def _record(
    rank: int, world: int, folder: str, table: pa.Table, sizes: dict[str, Any]
) -> tuple[int, list[np.ndarray] | None]:
    layout = ParallelLayout(world=world, **sizes)
    config, chunks = load_model(rank, folder, layout, trainable=False)
    replays = replay_routings(chunks)
    batches = batches_of(table, layout, None)
    start_recording(replays)
    forward_only(unwrap(chunks), batches, lm_head(vocab_size=VOCAB, chunk_tokens=16))
    of_stages = layers_of_stages(config, layout)
    return coords().dp, take_recorded(replays, batches, of_stages, routing_shape(config), layout)


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_moe", "tp2_sp_cp2_ep2"), ("qwen3_moe", "pp2_vpp2"), ("deepseek_v3", "pp2_ep2")],
)
def test_recorded_choices_are_those_of_hugging_face(
    ranks: RankPool, forced: Callable[[str], Forced], family: str, name: str
) -> None:
    """Every rank of the last stage has the choices for its data parallel rank's sequences."""
    case, (world, sizes) = forced(family), GRID[name]
    dp = ParallelLayout(world=world, **sizes).dp
    results = ranks.run(_record, case.folder, case.table, sizes, world=world)
    assert sum(found is not None for _, found in results) == world // sizes.get("pp", 1)
    for data_rank, found in results:
        if found is not None:
            own = case.own[data_rank::dp]
            assert len(found) == len(own)
            for experts, expected in zip(found, own, strict=True):
                assert np.array_equal(np.sort(experts, -1), expected)
