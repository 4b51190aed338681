"""Training in float16: the results of float32 up to rounding, and overflows that only cost their own update."""

import math
from typing import Any

import pytest
import torch

from examples.tiny_model import make_tiny_model
from megarl.config.schema.commands import OptimConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import local_parameters, wrap_for_training
from megarl.megatron.checkpoint.states import scaler_state, set_scaler_state
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.optimizer import build_optimizer, loss_scale, optimizer_step, zero_gradients
from megarl.megatron.step import StepResult, train_step
from tests.megatron.parity import VOCAB, Case, batches, check, load_model, loss_of
from tests.megatron.test_parity import make_case
from tests.ranks import RankPool

TOLERANCE = 2e-3  # 11 bits of mantissa: 2**-11 per rounding, some twenty roundings; bfloat16 needs 2e-2


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("float16"), tie_word_embeddings=False)


@pytest.mark.parametrize(
    ("world", "sizes", "distributed"),
    [(2, {"tp": 2, "sp": True}, True), (2, {"pp": 2}, False), (4, {"pp": 2, "cp": 2}, True)],
)
def test_float16_trains_as_float32_does(
    ranks: RankPool, case: Case, world: int, sizes: dict[str, Any], distributed: bool
) -> None:
    check(ranks, case, world, sizes, TOLERANCE, dtype=torch.float16, distributed=distributed)


Weights = dict[str, torch.Tensor]


def _steps(
    rank: int, world: int, case: Case, sizes: dict[str, Any], optim: OptimConfig, count: int
) -> list[tuple[StepResult, Weights]]:
    """Each step's result, and this rank's weights after it."""
    layout = ParallelLayout(world=world, **sizes)
    _, chunks = load_model(rank, case.folder, layout, dtype=torch.float16)
    chunks = wrap_for_training(chunks)
    optimizer, scheduler = build_optimizer(chunks, optim)
    head = lm_head(vocab_size=VOCAB, chunk_tokens=16)
    history = []
    for _ in range(count):
        result = train_step(chunks, optimizer, scheduler, batches(layout), head, loss_of)
        history.append((result, {name: t.clone() for name, t in local_parameters(chunks).items()}))
    return history


@pytest.mark.parametrize(("world", "sizes"), [(2, {}), (2, {"pp": 2})])
def test_an_overflow_skips_its_update_and_lowers_the_scale(
    ranks: RankPool, case: Case, world: int, sizes: dict[str, Any]
) -> None:
    """From a scale at which gradients exceed float16's 65504 down to a scale at which they do not."""
    first = 2.0**25
    optim = OptimConfig(
        lr=1e-3,
        lr_warmup_steps=4,
        weight_decay=0.1,
        clip_grad=0.5,
        initial_loss_scale=first,
        loss_scale_window=2,
        hysteresis=1,
    )
    for history in ranks.run(_steps, case, sizes, optim, 10, world=world):
        taken = [index for index, (result, _) in enumerate(history) if result.ok]
        skipped = taken[0]
        assert skipped >= 3, "the scale was meant to be too large at first"
        for index in range(skipped):
            result, weights = history[index]
            assert result.loss_scale == first / 2**index
            assert math.isnan(result.grad_norm) and result.lr == history[0][0].lr
            for name, tensor in weights.items():
                assert torch.equal(tensor, history[0][1][name]), name
        result, weights = history[skipped]
        assert result.loss_scale == first / 2**skipped
        # The update uses the unscaled gradient, and the schedule moves on.
        assert result.grad_norm == pytest.approx(case.expected[0][1], rel=TOLERANCE)
        assert not torch.equal(
            weights["0:decoder.layers.0.mlp.linear_fc2.weight"],
            history[0][1]["0:decoder.layers.0.mlp.linear_fc2.weight"],
        )
        assert history[skipped + 1][0].lr == pytest.approx(2 * result.lr)
        # Two steps without an overflow double the scale, which may make it too large again.
        assert history[skipped + 1][0].ok
        assert history[skipped + 2][0].loss_scale == 2 * result.loss_scale


def test_the_scale_does_not_fall_below_its_least(ranks: RankPool, case: Case) -> None:
    least = 2.0**32
    optim = OptimConfig(lr=1e-3, initial_loss_scale=2 * least, min_loss_scale=least, hysteresis=1)
    (history,) = ranks.run(_steps, case, {}, optim, 4, world=1)
    assert [result.loss_scale for result, _ in history] == [2 * least, least, least, least]
    assert not any(result.ok for result, _ in history)


def _poisoned_expert(rank: int, world: int, folder: str) -> list[tuple[float, bool, list[float], bool]]:
    """Three steps with zero gradients, except for an overflow in an expert of rank 0 in the second step.

    Returns: per step (scale before it, whether its update was taken, the scales of dense and expert weights after it, whether
    any weight has changed).
    """
    layout = ParallelLayout(world=world, ep=2)
    _, chunks = load_model(rank, folder, layout, dtype=torch.float16)
    chunks = wrap_for_training(chunks)
    optim = OptimConfig(lr=0.1, weight_decay=0.5, initial_loss_scale=64.0, hysteresis=1)
    optimizer, scheduler = build_optimizer(chunks, optim)
    history = []
    for step in range(3):
        before = {name: tensor.clone() for name, tensor in local_parameters(chunks).items()}
        scale = loss_scale(optimizer)
        zero_gradients(chunks, optimizer)
        if step == 1 and rank == 0:
            expert = next(p for name, p in chunks[0].named_parameters() if ".experts." in name)
            expert.main_grad.view(-1)[0] = math.inf
        for chunk in chunks:
            chunk.finish_grad_sync()
        _, taken, _ = optimizer_step(optimizer, scheduler)
        after = [float(part.get_loss_scale()) for part in optimizer.chained_optimizers]
        changed = any(
            not torch.equal(tensor, before[name]) for name, tensor in local_parameters(chunks).items()
        )
        history.append((scale, taken, after, changed))
    return history


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with experts."""
    folder = tmp_path_factory.mktemp("experts")
    make_tiny_model(
        folder,
        ["two words"],
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_hidden_size=96,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        family="qwen3_moe",
    )
    return str(folder)


def test_an_overflow_of_one_expert_is_an_overflow_of_all(ranks: RankPool, of_experts: str) -> None:
    for history in ranks.run(_poisoned_expert, of_experts, world=2):
        assert history == [
            (64.0, True, [64.0, 64.0], True),
            (64.0, False, [32.0, 32.0], False),
            (32.0, True, [32.0, 32.0], True),
        ]


def _resumed(rank: int, world: int, folder: str) -> tuple[float | None, list[float]]:
    """Where experts alone are trained, the scale of the loss and those by which parts' gradients are divided, after a scale of 8 was loaded."""
    _, chunks = load_model(rank, folder, ParallelLayout(world=world, ep=2), dtype=torch.float16)
    for name, parameter in chunks[0].named_parameters():
        parameter.requires_grad_(".experts." in name)
    optimizer, _ = build_optimizer(wrap_for_training(chunks), OptimConfig(lr=0.1, initial_loss_scale=64.0))
    saved = scaler_state(optimizer)
    assert saved is not None and saved["scale"] == 64.0
    set_scaler_state(optimizer, saved | {"scale": 8.0})
    return loss_scale(optimizer), [float(part.get_loss_scale()) for part in optimizer.chained_optimizers]


def test_a_loaded_scale_is_that_of_parts_without_weights_too(ranks: RankPool, of_experts: str) -> None:
    """The loss is scaled by the first part's, that of dense weights, though all of them are frozen."""
    for found in ranks.run(_resumed, of_experts, world=2):
        assert found == (8.0, [8.0, 8.0])
