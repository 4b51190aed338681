"""Dropout in adapters: equal on ranks with the same values, off in evaluation, and repeated when layers are recomputed."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.tiny_model import make_tiny_model
from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import local_parameters, wrap_for_training
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.lora.adapter import EXPERT, OWN, TENSOR, GroupedLinear, _normed, drop, start_streams
from megarl.megatron.lora.lora import attach_adapters
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.parallel import init_parallel
from megarl.megatron.step import forward_only, train_step
from tests.megatron.lora.test_lora import STEADY
from tests.megatron.parity import VOCAB, batches, load_model, loss_of
from tests.ranks import RankPool

# Weights that tensor parallel ranks shard by rows: every rank sees complete tokens, so their number changes nothing.
ROWS = LoraConfig(rank=4, target_modules=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), dropout=0.3)
EVERY = LoraConfig(rank=4, dropout=0.3)


def _masks(rank: int, world: int, sizes: dict[str, Any]) -> dict[str, list[float]]:
    init_parallel(ParallelLayout(world=world, **sizes), rank, world)
    start_streams(7)
    start_streams(7)  # a second set of adapters uses the same streams
    untouched = torch.get_rng_state()
    found = {name: drop(torch.ones(64), 0.25, name).tolist() for name in (TENSOR, EXPERT, OWN)}
    again = drop(torch.ones(64), 0.25, OWN).tolist()
    assert again != found[OWN] and torch.equal(torch.get_rng_state(), untouched)
    return found


def test_ranks_that_hold_the_same_drop_the_same(ranks: RankPool) -> None:
    """TP 2 and DP 2 over ranks 0 to 3; experts are on tensor parallel pairs, too."""
    found = ranks.run(_masks, {"tp": 2, "sp": True, "etp": 2}, world=4)
    for stream in (TENSOR, EXPERT):
        assert found[0][stream] == found[1][stream] and found[2][stream] == found[3][stream]
        assert found[0][stream] != found[2][stream]
    assert len({tuple(rank[OWN]) for rank in found}) == 4
    values = torch.tensor([value for rank in found for value in rank[OWN]])
    assert values.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (values == 0).float().mean() == pytest.approx(0.25, abs=0.1)


def make_model(folder: Path, family: str, **fields: Any) -> str:
    make_tiny_model(
        folder,
        ["two words"],
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_hidden_size=96,
        num_layers=2,
        family=family,
        fields={"initializer_range": 0.1, **fields},
    )
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("experts"), "qwen3_moe", num_experts_per_tok=3)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("dense"), "qwen2")


def _start(folder: str, layout: ParallelLayout, rank: int, lora: LoraConfig, **options: Any) -> list:
    config, chunks = load_model(rank, folder, layout, **options)
    attach_adapters(chunks, config, layout, lora, seed=5)
    for name, tensor in local_parameters(chunks).items():
        if ".lora.b" in name:
            tensor.fill_(0.01)
    return chunks


def _train(
    rank: int, world: int, folder: str, lora: LoraConfig, sizes: dict[str, Any], options: dict[str, Any]
) -> list[tuple[float, float]]:
    layout = ParallelLayout(world=world, **sizes)
    chunks = wrap_for_training(_start(folder, layout, rank, lora, **options))
    optimizer, scheduler = build_optimizer(chunks, STEADY)
    head = lm_head(vocab_size=VOCAB, chunk_tokens=16)
    history = []
    for _ in range(2):
        result = train_step(chunks, optimizer, scheduler, batches(layout), head, loss_of)
        history.append((result.stats["loss"], result.grad_norm))
    return history


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "sp": True, "etp": 2}], ids=str)
def test_layers_that_are_computed_again_drop_the_same(
    ranks: RankPool, folder: str, sizes: dict[str, Any]
) -> None:
    world = sizes.get("tp", 1)
    once, again, none = (
        ranks.run(_train, folder, lora, sizes, options, world=world)[0]
        for lora, options in (
            (EVERY, {}),
            (EVERY, {"recompute_granularity": "full"}),
            (replace(EVERY, dropout=0.0), {}),
        )
    )
    for found, expected in zip(again, once, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)
    assert once[0][0] != pytest.approx(none[0][0], rel=1e-5)


def test_tensor_parallel_ranks_drop_what_one_rank_drops(ranks: RankPool, dense: str) -> None:
    one, two = (ranks.run(_train, dense, ROWS, {"tp": tp}, {}, world=tp) for tp in (1, 2))
    for found in two:
        for numbers, expected in zip(found, one[0], strict=True):
            assert numbers == pytest.approx(expected, rel=1e-5)


def _outputs(rank: int, world: int, folder: str, lora: LoraConfig) -> torch.Tensor:
    layout = ParallelLayout(world=world)
    chunks = _start(folder, layout, rank, lora)
    outputs = forward_only(chunks, batches(layout), lm_head(vocab_size=VOCAB, chunk_tokens=16))
    assert chunks[0].training, "as it was before"
    return torch.cat(outputs)


def test_evaluation_drops_nothing(ranks: RankPool, folder: str) -> None:
    dropping, plain = (
        ranks.run(_outputs, folder, lora, world=1)[0] for lora in (EVERY, replace(EVERY, dropout=0.0))
    )
    assert torch.equal(dropping, plain)


@pytest.mark.parametrize(("inner", "outer", "grouped"), [(24, 40, True), (12, 40, False)])
def test_grouped_weights_are_one_product_or_one_each(
    inner: int, outer: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16; rows of 12 numbers are not aligned to 16 bytes. Some groups are empty."""
    counts, launches = [3, 0, 5, 1, 0], []
    generator = torch.Generator().manual_seed(3)
    x, weight, gradient = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((9, inner), (5, outer, inner), (9, outer))
    )
    multiply = torch.nn.functional.grouped_mm

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        launches.append(given)
        return multiply(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    found = GroupedLinear(counts, x.device)(x, weight)
    grads = torch.autograd.grad(found, (x, weight), gradient)
    assert len(launches) == grouped and all(len(given[1]) == 3 for given in launches)
    each = [part.float() @ own.float().T for part, own in zip(x.split(counts), weight, strict=True)]
    expected = torch.cat(each)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-2)
    right = torch.autograd.grad(expected, (x, weight), gradient.float())
    for one, other in zip(grads, right, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2**-6, atol=3e-2)
    assert not grads[1][1].any() and not grads[1][4].any()
    nothing = GroupedLinear([0] * 5, x.device)(x[:0], weight)
    assert nothing.shape == (0, outer)


def test_norms_around_zero_add_one_in_float32() -> None:
    """As in Transformer Engine, whose layers have these norms: in bfloat16 1 + weight would lose 8 bits."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.01 * torch.randn(64, generator=generator)).bfloat16()
    layer = SimpleNamespace(layer_norm_weight=weight, zero_centered_gamma=True, eps=1e-6)
    x = torch.randn(32, 1, 64, generator=generator).bfloat16().requires_grad_()
    normed = _normed(layer, x)
    wide = x.detach().double().requires_grad_()
    expected = wide * (wide.square().mean(-1, keepdim=True) + layer.eps).rsqrt() * (1 + weight.double())
    assert normed.dtype == torch.bfloat16 and torch.equal(normed, expected.bfloat16())
    normed.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(x.grad, wide.grad.bfloat16(), rtol=2**-8, atol=1e-6)
