"""The router z-loss equals the paper's formula on Hugging Face's layers, in every layout."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import wrap_for_training
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.router_z_loss import RouterZLoss
from megarl.megatron.step import train_step
from tests.megatron.parity import (
    NUM_TARGETS,
    TOLERANCE,
    VOCAB,
    Case,
    batches,
    load_model,
    loss_of,
    sequences,
    train_hugging_face,
)
from tests.megatron.test_families import FAMILIES, STEADY, hugging_face, make_family
from tests.megatron.test_router_replay import GRID, recomputation
from tests.ranks import RankPool

COEF = 0.5  # large enough to change the gradient's norm by more than a tenth


def hugging_faces(model: PreTrainedModel, values: list[float]) -> float:
    """Like `loss_and_gradients`, but gradients include the z-loss's, and its mean over layers and targets is appended to `values`."""
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    found: list[torch.Tensor] = []

    def add(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        states = inputs[0].reshape(-1, inputs[0].shape[-1])[:-1]  # the last token has no loss
        found.append(torch.log(torch.exp(states @ router.weight.T).sum(-1)) ** 2)

    hooks = [router.register_forward_hook(add) for router in routers]
    total = squares = 0.0
    for tokens in sequences():
        ids = torch.tensor([tokens])
        logits = model(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / NUM_TARGETS
        added = torch.stack(found).sum()
        (loss + COEF * added / NUM_TARGETS).backward()
        total, squares = total + loss.item(), squares + added.item()
        found.clear()
    for hook in hooks:
        hook.remove()
    values.append(squares / NUM_TARGETS / len(routers))
    return total


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Case, list[float]]]:
    @cache
    def make(family: str) -> tuple[Case, list[float]]:
        folder, values = tmp_path_factory.mktemp("z_loss"), []
        make_family(folder, FAMILIES[family])
        model = hugging_face(str(folder), FAMILIES[family])
        history = train_hugging_face(model, STEADY, lambda model: hugging_faces(model, values))
        plain = train_hugging_face(hugging_face(str(folder), FAMILIES[family]), STEADY)
        assert abs(plain[0][1] / history[0][1] - 1) > 0.1
        return Case(str(folder), history, STEADY), values

    return make


def _train(
    rank: int, world: int, folder: str, sizes: dict[str, Any], options: dict[str, Any]
) -> tuple[list[tuple[float, float]], list[float]]:
    """(Global loss, gradient norm) of two steps, and the z-loss of each."""
    layout = ParallelLayout(world=world, **sizes)
    _, chunks = load_model(rank, folder, layout, **options)
    added = RouterZLoss(chunks)
    chunks = wrap_for_training(chunks)
    optimizer, scheduler = build_optimizer(chunks, STEADY)
    head, history, values = lm_head(vocab_size=VOCAB, chunk_tokens=16), [], []
    for _ in range(2):
        added.begin(COEF / NUM_TARGETS)
        result = train_step(chunks, optimizer, scheduler, batches(layout), head, loss_of)
        history.append((result.stats["loss"], result.grad_norm))
        values.append(added.mean())
    return history, values


@pytest.mark.parametrize(
    ("family", "name", "recompute"),
    [
        ("qwen3_moe", "one", None),
        ("qwen3_moe", "tp2_sp_cp2_ep2", "full"),
        ("deepseek_v3", "pp2_ep2", "moe"),
        ("glm4_moe", "tp2_sp_etp2", None),
        ("qwen3_moe", "pp2_vpp2", "selective"),
    ],
)
def test_loss_and_gradients_are_those_of_the_formula(
    ranks: RankPool,
    case_of: Callable[[str], tuple[Case, list[float]]],
    family: str,
    name: str,
    recompute: str | None,
) -> None:
    (case, expected), (world, sizes) = case_of(family), GRID[name]
    options = recomputation(recompute)
    for history, values in ranks.run(_train, case.folder, sizes, options, world=world):
        assert values == pytest.approx(expected, rel=1e-4)
        for (loss, norm), (expected_loss, expected_norm) in zip(history, case.expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
