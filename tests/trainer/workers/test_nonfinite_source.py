"""Gradients that are not finite on real ranks: no weight changes, and all ranks report the same trajectory."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from megarl.algorithms.aggregate import LossAggregation, loss_counts
from megarl.algorithms.policy_loss import PolicyLossOptions
from megarl.cluster.ranks import RankInfo
from megarl.config import MegatronConfig, OptimConfig
from megarl.data.trajectories import append_column, ragged, take
from megarl.megatron.build import local_parameters
from megarl.trainer.stages.nonfinite import COMPUTED, NotFinite, require_finite
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.dispatch import ModelSpec, PolicyUpdate, merge_columns
from tests.megatron.hf import make_table, save_model
from tests.ranks import RankPool

DP2_PP2 = {"pipeline_model_parallel_size": 2}
PLAN = [[[[6, 0], [2]], [[4, 2], [5, 7]]], [[[3]], [[1]]]]  # two mini-batches of two data parallel ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return str(path)


def trajectories(wrong_row: int | None) -> pa.Table:
    """Trajectories in which the advantages of one row are NaN."""
    table = make_table()
    flat, offsets = ragged(table, "advantages")
    advantages = np.array(flat)
    if wrong_row is not None:
        advantages[offsets[wrong_row] : offsets[wrong_row + 1]] = np.nan
    table = append_column(table.drop_columns(["advantages"]), "advantages", (advantages, offsets))
    table = append_column(table, "old_log_probs", (np.full(len(flat), -5.0), offsets))
    return table.append_column("uid", pa.array([f"t/{row}" for row in range(table.num_rows)]))


def actor(rank: int, world: int, folder: str) -> ActorWorker:
    info = RankInfo(rank, world, rank, "localhost", 0, "actor", "", (), "")
    spec = ModelSpec(folder, "lm", MegatronConfig(**DP2_PP2), OptimConfig(lr=1e-3), 10, timeout=60.0)
    return ActorWorker(info, spec, temperature=1.0)


def _update(rank: int, world: int, folder: str, table: pa.Table, poison: bool) -> tuple[str, bool]:
    worker = actor(rank, world, folder)
    tensors = local_parameters(worker.chunks)
    if poison and rank == 1:  # in the first stage of one data parallel rank; the other's weights are finite
        next(iter(tensors.values())).data.view(-1)[:] = torch.nan
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    counts = []
    for shares in PLAN:
        mask, offsets = ragged(
            take(table, [row for dp in shares for micro in dp for row in micro]), "response_mask"
        )
        counts.append(loss_counts(torch.tensor(mask), torch.from_numpy(np.array(offsets))))
    how = PolicyUpdate(LossAggregation("token-mean"), PolicyLossOptions(0.2, 0.2, 3.0), None, None, seed=3)
    with pytest.raises(FloatingPointError) as caught:
        worker.update_policy(table, PLAN, counts, how)
    same = all(
        torch.equal(tensor.nan_to_num(7), before[name].nan_to_num(7)) for name, tensor in tensors.items()
    )
    scheduled = worker.scheduler.num_steps
    return str(caught.value), same and scheduled == 0


def test_a_loss_of_one_rank(ranks: RankPool, folder: str) -> None:
    """Row 5 is in the second micro-batch of the second data parallel rank, whose last stage is rank 3."""
    results = ranks.run(_update, folder, trajectories(5), False, world=4)
    expected = "the gradient's norm is nan; the update was not made: the loss of trajectory t/5, t/7 (micro-batch 1), on rank 3"
    assert results == [(expected, True)] * 4


def test_a_poisoned_weight_of_one_rank(ranks: RankPool, folder: str) -> None:
    results = ranks.run(_update, folder, trajectories(None), True, world=4)
    texts = {text for text, _ in results}
    assert len(texts) == 1 and all(same for _, same in results)
    assert "the model's outputs for trajectory t/4 (micro-batch 0), on rank 3" in texts.pop()


def _log_probs(rank: int, world: int, folder: str, table: pa.Table) -> object:
    worker = actor(rank, world, folder)
    if rank == 1:
        next(iter(local_parameters(worker.chunks).values())).data.view(-1)[:] = torch.nan
    return worker.compute_log_probs(table, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], "old_log_probs")


def test_a_poisoned_weight_in_the_log_probs(ranks: RankPool, folder: str) -> None:
    table = trajectories(None).drop_columns(["old_log_probs"])
    results = ranks.run(_log_probs, folder, table, world=4)
    with pytest.raises(
        NotFinite, match=r"old_log_probs of trajectory t/[45] is nan, computed by actor rank 3; "
    ):
        require_finite(merge_columns(table, results), COMPUTED, [("actor", results)])
