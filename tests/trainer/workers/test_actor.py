"""The actor's ranks, called as by the controller: the exact KL to the reference, and updates in float16."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megarl.algorithms.aggregate import LossAggregation, LossCounts
from megarl.algorithms.kl import FULL_KL
from megarl.algorithms.policy_loss import PolicyLossOptions
from megarl.cluster.ranks import RankInfo
from megarl.config import MegatronConfig, OptimConfig
from megarl.data.trajectories import ragged
from megarl.megatron import host_adam
from megarl.megatron.build import local_parameters
from megarl.megatron.offload import Offloadable
from megarl.trainer.stages.updates import _update_metrics
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.dispatch import ModelSpec, PolicyUpdate
from tests.megatron.hf import make_table, save_model
from tests.ranks import RankPool

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, PreTrainedModel]]:
    """The folder and the model of the policy, then of the reference."""
    found = []
    for shift in (0.0, 0.03):
        folder: Path = tmp_path_factory.mktemp("model")
        model = save_model(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(shift * torch.randn_like(parameter))
        model.save_pretrained(folder)
        found.append((str(folder), model))
    return found


def actor(
    rank: int, world: int, folders: list[str], megatron: MegatronConfig, optim: OptimConfig
) -> ActorWorker:
    info = RankInfo(rank, world, rank, "localhost", 0, "actor", "", (), "")
    spec = ModelSpec(folders[0], "lm", megatron, optim, num_updates=10, timeout=60.0)
    return ActorWorker(info, spec, TEMPERATURE, reference_path=folders[1])


def with_old_log_probs(table: pa.Table) -> pa.Table:
    return table.append_column("old_log_probs", table["advantages"])


def plan_of(*mini_batches: list[list[int]]) -> tuple[list, list[LossCounts]]:
    """A plan with one data parallel rank's micro-batches, and the loss counts of each mini-batch."""
    masks = make_table()["response_mask"].to_pylist()
    counts = []
    for micros in mini_batches:
        live = [sum(masks[row]) for micro in micros for row in micro]
        counts.append(LossCounts(sum(live), sum(number > 0 for number in live)))
    return [[micros] for micros in mini_batches], counts


def hugging_face(models: list[tuple[str, PreTrainedModel]], table: pa.Table) -> dict[str, list[Tensor]]:
    """The expected values of each column at each row's response tokens; 0 on masked tokens."""
    columns: dict[str, list[Tensor]] = {"old_log_probs": [], "full_kl": [], "ref_log_probs": []}
    for row in table.to_pylist():
        ids, mask = (
            torch.tensor([row["prompt_ids"] + row["response_ids"]]),
            torch.tensor(row["response_mask"]),
        )
        labels = torch.tensor(row["response_ids"])[:, None]
        with torch.no_grad():
            log_p, log_q = (
                (model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / TEMPERATURE).log_softmax(-1)
                for _, model in models
            )
        columns["old_log_probs"].append(log_p.gather(1, labels)[:, 0] * mask)
        columns["ref_log_probs"].append(log_q.gather(1, labels)[:, 0] * mask)
        columns["full_kl"].append((log_p.exp() * (log_p - log_q)).sum(-1) * mask)
    return columns


def _compare(rank: int, world: int, folders: list[str], sizes: dict[str, Any], table: pa.Table) -> tuple:
    worker = actor(rank, world, folders, MegatronConfig(**sizes), OptimConfig(lr=1e-3, clip_grad=0.0))
    found = worker.compute_full_kl(table, [[[0, 3, 5], [6, 1, 2, 4, 7]]], "old_log_probs")
    options = PolicyLossOptions(0.2, 0.2, None, kl_coef=0.5, kl_kind=FULL_KL)
    how = PolicyUpdate(LossAggregation("token-mean"), options, None, None, seed=0)
    (step,) = worker.update_policy(table, *plan_of([[0, 3, 5], [6, 1, 2, 4, 7]]), how)
    return found, step


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
    ],
    ids=["tp2", "pp2"],
)
def test_the_exact_kl_to_the_reference(ranks: RankPool, models, sizes: dict[str, Any]) -> None:
    table = with_old_log_probs(make_table())
    expected = hugging_face(models, table)
    results = ranks.run(_compare, [folder for folder, _ in models], sizes, table, world=2)
    (((rows, columns), step),) = [(found, step) for found, step in results if found is not None]
    assert sorted(columns) == sorted(expected)
    for name, (values, offsets) in columns.items():
        for place, row in enumerate(rows):
            found = values[offsets[place] : offsets[place + 1]]
            np.testing.assert_allclose(found, expected[name][row].numpy(), rtol=1e-4, atol=1e-5)
    mask, _ = ragged(table, "response_mask")
    mean = float(torch.cat(expected["full_kl"]).sum()) / mask.sum()
    assert mean > 0.001
    for _, step in results:
        assert step["actor/kl_loss"] == pytest.approx(mean, rel=1e-4)
        assert step["actor/loss"] == pytest.approx(step["actor/pg_loss"] + 0.5 * mean, rel=1e-4)


def _overflow(rank: int, world: int, folders: list[str], table: pa.Table) -> tuple:
    optim = OptimConfig(lr=1e-3, initial_loss_scale=2.0**40, min_loss_scale=2.0**38, hysteresis=1)
    worker = actor(rank, world, folders, MegatronConfig(dtype="float16"), optim)
    before = {name: tensor.clone() for name, tensor in local_parameters(worker.chunks).items()}
    how = PolicyUpdate(LossAggregation("token-mean"), PolicyLossOptions(0.2, 0.2, None), None, None, seed=0)
    reserved: list[str] = []
    worker.reserved = [SimpleNamespace(reserve=lambda: reserved.append("optimizer"))]
    steps = worker.update_policy(table, *plan_of([[0, 3], [5]], [[6, 1, 2]]), how)
    assert not reserved and worker.reserved, "there are no states of the optimizer yet"
    with pytest.raises(FloatingPointError) as caught:
        worker.update_policy(table, *plan_of([[0, 3], [5]]), how)
    same = all(torch.equal(tensor, before[name]) for name, tensor in local_parameters(worker.chunks).items())
    return steps, str(caught.value), same


def test_overflows_are_counted_and_at_the_least_scale_end_the_run(ranks: RankPool, models) -> None:
    table = with_old_log_probs(make_table())
    ((steps, message, same),) = ranks.run(_overflow, [folder for folder, _ in models], table, world=1)
    assert [(step["loss_scale"], step["skipped"]) for step in steps] == [(2.0**40, 1.0), (2.0**39, 1.0)]
    assert same, "weights have changed"
    assert "optim.min_loss_scale=2.74878e+11: float16 cannot hold it" in message
    metrics = _update_metrics("actor", steps)
    assert metrics["actor/skipped_steps"] == 2.0 and metrics["actor/loss_scale"] == 2.0**39
    assert "actor/grad_norm" not in metrics and math.isfinite(metrics["actor/loss"])


def _moving(rank: int, world: int, folders: list[str], table: pa.Table, moves: bool) -> tuple:
    """Two updates, each followed by the reference's log-probs; with `moves` memory moves between phases as on a GPU, without page-locking."""
    worker = actor(rank, world, folders, MegatronConfig(), OptimConfig(lr=1e-2))
    how = PolicyUpdate(LossAggregation("token-mean"), PolicyLossOptions(0.2, 0.2, None), None, None, seed=0)
    others, found = ["weights", "gradients", "optimizer"], []
    with pytest.MonkeyPatch.context() as patch:
        if moves:
            for name in ("_lock", "_unlock"):
                patch.setattr(host_adam, name, lambda *args: None)
            for part in worker.parts.values():
                if isinstance(part, Offloadable):
                    part.keeps = True
            worker.reserve_memory([*others, "reference"])
        for _ in range(2):
            if moves:
                worker.release_memory(["reference"])
            (step,) = worker.update_policy(table, *plan_of([[0, 3, 5], [6, 1, 2, 4, 7]]), how)
            if moves:
                worker.release_memory(others)  # while engines generate
                worker.resume_memory(["reference"])
            columns = worker.compute_ref_log_probs(table, [[[0, 3, 5], [6, 1, 2, 4, 7]]], "ref_log_probs")
            found.append((step["grad_norm"], columns[1]["ref_log_probs"][0].tolist()))
            if moves:
                worker.resume_memory(others)
        worker.parts.clear()  # frees their host memory while `_unlock` is replaced
    weights = {name: tensor.clone() for name, tensor in local_parameters(worker.chunks).items()}
    return found, weights


def test_memory_that_moves_as_on_a_gpu_changes_nothing(ranks: RankPool, models) -> None:
    """The reference is on the host while the first step creates the optimizer's states, for which host memory is reserved again."""
    table, folders = with_old_log_probs(make_table()), [folder for folder, _ in models]
    (expected,), (found,) = (ranks.run(_moving, folders, table, moves, world=1) for moves in (False, True))
    assert found[0] == expected[0]
    assert expected[0][0][1] == expected[0][1][1], "the reference has changed"
    for name, weight in expected[1].items():
        assert torch.equal(found[1][name], weight), name
