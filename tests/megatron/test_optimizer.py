"""Adam, its schedule, and steps that are not taken."""

import math
from typing import Any

import pytest
import torch

from megarl.config.schema.commands import OptimConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, local_parameters, wrap_for_training
from megarl.megatron.cpu.adam import FusedAdam
from megarl.megatron.optimizer import build_optimizer, optimizer_step, zero_gradients
from megarl.megatron.parallel import init_parallel
from tests.megatron.test_build import CONFIG
from tests.ranks import RankPool


@pytest.mark.parametrize(("adam_w_mode", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_fused_adam_is_torchs_adam(adam_w_mode: bool, reference: type) -> None:
    torch.manual_seed(0)
    start = [torch.randn(7, 3), torch.randn(5)]
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    optimizer = FusedAdam(ours, adam_w_mode=adam_w_mode, **settings)
    expected = reference(theirs, **settings)
    for step in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            gradient = torch.randn_like(mine) if step != 2 else torch.zeros_like(mine)
            mine.grad, other.grad = gradient.clone(), gradient
        optimizer.step()
        expected.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        state = expected.state[other]
        torch.testing.assert_close(optimizer.state[mine]["exp_avg_sq"], state["exp_avg_sq"])
    assert optimizer.param_groups[0]["step"] == 4


def _train(
    rank: int, world: int, optim: OptimConfig, options: dict[str, Any], poison: list[bool]
) -> list[Any]:
    """Steps with zero gradients; where `poison` is true, rank 0's first gradient is NaN.

    Returns: per step (norm, whether it was taken, learning rate, this rank's parameters after it).
    """
    layout = ParallelLayout(world=world, tp=options.get("tp", 1))
    init_parallel(layout, rank, world)
    chunks = build_model(CONFIG, layout, dtype=options.get("dtype", torch.float32))
    with torch.no_grad():
        for tensor in local_parameters(chunks).values():
            tensor.fill_(1.0)
    chunks = wrap_for_training(chunks, use_distributed_optimizer=options.get("distributed", True))
    optimizer, scheduler = build_optimizer(chunks, optim, num_steps=options.get("num_steps"))
    history = []
    for broken in poison:
        zero_gradients(chunks, optimizer)
        if broken and rank == 0:
            next(chunks[0].parameters()).main_grad.view(-1)[0] = math.nan
        for chunk in chunks:
            chunk.finish_grad_sync()
        step = optimizer_step(optimizer, scheduler)
        history.append((*step, {name: tensor.clone() for name, tensor in local_parameters(chunks).items()}))
    return history


@pytest.mark.parametrize("options", [{}, {"distributed": False}, {"tp": 2}, {"dtype": torch.bfloat16}])
def test_only_matrices_decay(ranks: RankPool, options: dict[str, Any]) -> None:
    """With zero gradients Adam's update is only the decay: w - lr * weight_decay * w."""
    optim = OptimConfig(lr=0.5, weight_decay=0.25)
    for history in ranks.run(_train, optim, options, [False, False], world=2):
        for name, tensor in history[-1][-1].items():
            expected = 1.0 if tensor.dim() == 1 else (1 - 0.5 * 0.25) ** 2
            torch.testing.assert_close(
                tensor, torch.full_like(tensor, expected), msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("options", [{}, {"distributed": False}, {"tp": 2}])
def test_a_gradient_that_is_not_finite_changes_nothing(ranks: RankPool, options: dict[str, Any]) -> None:
    optim = OptimConfig(lr=0.5, lr_warmup_steps=4, weight_decay=0.25)
    for first, second, third in ranks.run(_train, optim, options, [False, True, False], world=2):
        assert (first[0], first[1]) == (0.0, True)
        assert math.isnan(second[0])
        assert not second[1]
        for name, tensor in second[3].items():
            assert torch.equal(tensor, first[3][name]), name
        assert third[1]
        assert third[2] == second[2] != first[2]  # the schedule did not move on
        assert third[3]["0:output_layer.weight"].ravel()[0] < second[3]["0:output_layer.weight"].ravel()[0]


@pytest.mark.parametrize(
    ("optim", "num_steps", "expected"),
    [
        (OptimConfig(lr=0.8), None, [0.8, 0.8, 0.8]),
        (OptimConfig(lr=0.8, lr_warmup_steps=3), None, [0.2, 0.4, 0.6, 0.8, 0.8]),
        (OptimConfig(lr=0.8, min_lr=0.4, lr_decay_style="linear"), 4, [0.8, 0.7, 0.6, 0.5, 0.4, 0.4]),
        (OptimConfig(lr=0.8, lr_decay_style="linear", lr_decay_steps=2), 9, [0.8, 0.4, 0.0, 0.0]),
        (OptimConfig(lr=0.8, lr_decay_style="linear", lr_warmup_steps=1), 3, [0.4, 0.8, 0.4, 0.0]),
        (
            OptimConfig(lr=0.8, lr_decay_style="cosine"),
            4,
            [0.8, 0.4 * (1 + math.sqrt(0.5)), 0.4, 0.4 * (1 - math.sqrt(0.5)), 0.0],
        ),
    ],
)
def test_learning_rates(
    ranks: RankPool, optim: OptimConfig, num_steps: int | None, expected: list[float]
) -> None:
    poison = [False] * len(expected)
    history = ranks.run(_train, optim, {"num_steps": num_steps}, poison, world=1)[0]
    assert [step[2] for step in history] == pytest.approx(expected, abs=1e-9)
