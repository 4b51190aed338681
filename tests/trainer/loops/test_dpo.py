"""DPO on ranks: in every layout, one step's loss and gradient equal those of a plain Hugging Face loop."""

import math
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from megarl.cluster.ranks import RankInfo
from megarl.config import DPOLossConfig, MegatronConfig, OptimConfig
from megarl.data.labels import LABELLED_SCHEMA, mismatched
from megarl.data.preferences import PREFERENCE_CHAT_SCHEMA, ranking_lengths, texts_of
from megarl.data.trajectories import list_lengths
from megarl.layout.grid import ParallelLayout
from megarl.trainer.loops.dpo import (
    baseline_of,
    labelled_with_reference,
    validate,
    validate_labelled,
    with_reference,
    without_reference,
)
from megarl.trainer.loops.supervised import Ranks
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.workers.dispatch import MicroBatching, ModelSpec, RowColumns, plan_rows
from megarl.trainer.workers.supervised import DPOWorker
from megarl.weight_sync.layouts import megatron_layout
from tests.megatron.hf import VOCAB, Rank, check_gradients, save_model
from tests.ranks import RankPool

LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one": ({}, 1),
    "tp2": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
    "pp2": ({"pipeline_model_parallel_size": 2}, 2),
    "cp2": ({"context_parallel_size": 2}, 2),
    "dp2": ({}, 2),
}
BASELINE = 0.7  # KTO's baseline, in nats
PARALLEL = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "sequence_parallel": "sp",
}
HOW = DPOLossConfig(beta=0.3, label_smoothing=0.1)
SIMPO = DPOLossConfig(beta=2.0, loss_type="simpo", gamma=0.5)
ORPO = DPOLossConfig(beta=0.3, loss_type="orpo")
KTO = DPOLossConfig(beta=0.3, loss_type="kto", desirable_weight=1.5, undesirable_weight=0.8)
CASES = [*((name, HOW) for name in LAYOUTS), ("cp2", SIMPO), ("dp2", SIMPO), ("pp2", ORPO), ("cp2", ORPO)]


def make_rankings() -> pa.Table:
    """Three pairs and a ranking of four responses with one tie; the reference's log-probs are arbitrary."""
    generator = np.random.default_rng(8)
    rows = []
    for number, scores in enumerate(([1.0, 0.0], [0.0, 1.0], [2.0, 0.5], [3.0, 1.0, 1.0, 2.0])):
        prompt = generator.integers(0, VOCAB, int(generator.integers(2, 6))).tolist()
        answers = [generator.integers(0, VOCAB, int(generator.integers(1, 8))).tolist() for _ in scores]
        rows.append(
            {
                "uid": f"rows:{number}",
                "input_ids": [prompt + answer for answer in answers],
                "loss_mask": [[False] * len(prompt) + [True] * len(answer) for answer in answers],
                "scores": scores,
            }
        )
    table = pa.Table.from_pylist(rows, schema=PREFERENCE_CHAT_SCHEMA)
    reference = [(-6.0 * np.array([sum(mask) for mask in row["loss_mask"]])).tolist() for row in rows]
    return table.append_column("ref_log_probs", pa.array(reference, pa.list_(pa.float32())))


def make_examples() -> pa.Table:
    """The rankings' chats as separate examples, every third one undesirable; the reference's log-probs are arbitrary."""
    chats = texts_of(make_rankings())
    tokens = [sum(mask) for mask in chats["loss_mask"].to_pylist()]
    labels = [row % 3 != 0 for row in range(chats.num_rows)]
    columns = {"uid": list(map(str, labels)), **{name: chats[name] for name in chats.column_names}}
    table = pa.table({**columns, "desirable": labels}).cast(LABELLED_SCHEMA)
    return table.append_column("ref_log_prob", pa.array([-6.0 * count for count in tokens], pa.float32()))


def pair_loss(better: torch.Tensor, worse: torch.Tensor, how: DPOLossConfig) -> torch.Tensor:
    """DPO by arXiv:2305.18290 eq. 7 with smoothed labels, or SimPO or ORPO on mean log-probs."""
    if how.loss_type == "simpo":
        return -torch.sigmoid(how.beta * (better - worse) - how.gamma).log()
    if how.loss_type == "orpo":
        odds = [mean - (1 - mean.exp()).log() for mean in (better, worse)]
        return -better - how.beta * torch.sigmoid(odds[0] - odds[1]).log()
    h = how.beta * (better - worse)
    return -0.9 * torch.sigmoid(h).log() - 0.1 * torch.sigmoid(-h).log()


def by_formula(model: PreTrainedModel, table: pa.Table, how: DPOLossConfig) -> float:
    """The loss, computed one ranking at a time; its gradient stays in the model."""
    model.zero_grad()
    losses = []
    for row in table.to_pylist():
        ratios = []
        for ids, mask, reference in zip(
            row["input_ids"], row["loss_mask"], row["ref_log_probs"], strict=True
        ):
            logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            found = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            learnt = found[torch.tensor(mask[1:])]
            ratios.append(learnt.sum() - reference if how is HOW else learnt.mean())
        own = []
        for a, b in combinations(range(len(ratios)), 2):
            if row["scores"][a] != row["scores"][b]:
                better, worse = (a, b) if row["scores"][a] > row["scores"][b] else (b, a)
                own.append(pair_loss(ratios[better], ratios[worse], how))
        losses.append(torch.stack(own).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item()


def log_ratio(model: PreTrainedModel, ids: list[int], mask: list[bool], reference: float) -> torch.Tensor:
    logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0][torch.tensor(mask[1:])].sum() - reference


def kto_by_formula(model: PreTrainedModel, table: pa.Table) -> float:
    """KTO's loss (arXiv:2402.01306), computed one example at a time; its gradient stays in the model."""
    model.zero_grad()
    losses = []
    for row in table.to_pylist():
        ratio = log_ratio(model, row["input_ids"], row["loss_mask"], row["ref_log_prob"])
        if row["desirable"]:
            losses.append(1.5 * (1 - torch.sigmoid(0.3 * (ratio - BASELINE))))
        else:
            losses.append(0.8 * (1 - torch.sigmoid(0.3 * (BASELINE - ratio))))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item()


def _train(
    rank: int,
    world: int,
    sizes: dict[str, Any],
    folder: str,
    table: pa.Table,
    shares: list,
    how: DPOLossConfig,
) -> tuple:
    info = RankInfo(rank, world, rank, "localhost", 0, "dpo", "", (), "")
    megatron = MegatronConfig(**sizes, use_distributed_optimizer=False)
    spec = ModelSpec(folder, "lm", megatron, OptimConfig(lr=1e-6, clip_grad=0.0), 10, timeout=60.0)
    worker = DPOWorker(info, spec)
    if how.loss_type == "kto":
        metrics = worker.train_labelled(table, shares, how, BASELINE)
    else:
        metrics = worker.train_preferences(table, shares, how)
    pieces = megatron_layout(worker.config, worker.layout, "lm").pieces(rank)
    return metrics, Rank(worker.layout, worker.chunks, pieces).gradients()


def _log_probs(rank: int, world: int, folder: str, table: pa.Table, shares: list) -> RowColumns | None:
    info = RankInfo(rank, world, rank, "localhost", 0, "dpo", "", (), "")
    worker = DPOWorker(info, ModelSpec(folder, "lm", MegatronConfig(), None, 0, timeout=60.0))
    return worker.token_log_probs(table, shares)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return str(folder), save_model(folder)


@pytest.mark.parametrize(("name", "how"), CASES, ids=[f"{name}-{how.loss_type}" for name, how in CASES])
def test_loss_and_gradient_are_the_papers_in_every_layout(
    ranks: RankPool, saved, name: str, how: DPOLossConfig
) -> None:
    (sizes, world), (folder, model) = LAYOUTS[name], saved
    table = make_rankings()
    if how is not HOW:
        table = without_reference(table.drop_columns(["ref_log_probs"]))
    layout = ParallelLayout(world=world, **{PARALLEL[key]: value for key, value in sizes.items()})
    shares = plan_rows(ranking_lengths(table), layout, max_tokens=50)
    loss = by_formula(model, table, how)
    results = ranks.run(_train, sizes, folder, table, shares, how, world=world)
    check_gradients(model, [gradients for _, gradients in results])
    for metrics, _ in results:
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", ["dp2", "pp2", "cp2"])
def test_ktos_loss_and_gradient_are_the_papers_in_every_layout(ranks: RankPool, saved, name: str) -> None:
    (sizes, world), (folder, model) = LAYOUTS[name], saved
    table = make_examples()
    layout = ParallelLayout(world=world, **{PARALLEL[key]: value for key, value in sizes.items()})
    shares = plan_rows(list_lengths(table, "input_ids"), layout, max_tokens=30)
    loss = kto_by_formula(model, table)
    results = ranks.run(_train, sizes, folder, table, shares, KTO, world=world)
    check_gradients(model, [gradients for _, gradients in results])
    for metrics, _ in results:
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["train/kl_baseline"] == BASELINE


def ranks_of_three(ranks: RankPool, folder: str) -> Ranks:
    """Three data parallel ranks with the saved model."""
    call = lambda name, table, shares: ranks.run(_log_probs, folder, table, shares, world=3)  # noqa: E731
    run = SimpleNamespace(put=lambda table: table, wait=lambda results: results)
    role = Role(SimpleNamespace(call=call), ParallelLayout(world=3), MicroBatching(1, 50, None))
    return Ranks(None, run, role, 1)


def test_the_reference_is_the_policy_as_it_begins(ranks: RankPool, saved) -> None:
    """Ten chats on three data parallel ranks, padded to twelve; while the policy equals the reference, the loss is log 2."""
    folder, model = saved
    ours = ranks_of_three(ranks, folder)
    table = with_reference(ours, make_rankings().drop_columns(["ref_log_probs"]))
    for row in table.to_pylist():
        for ids, mask, found in zip(row["input_ids"], row["loss_mask"], row["ref_log_probs"], strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            expected = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0][torch.tensor(mask[1:])].sum()
            assert found == pytest.approx(expected.item(), rel=1e-5)
    metrics = validate(ours, HOW, table)
    assert metrics["val/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["val/margin"] == pytest.approx(0.0, abs=1e-5)


def test_the_baseline_is_of_responses_to_other_prompts(ranks: RankPool, saved) -> None:
    """While the policy equals the reference, the baseline is 0 and the loss is half of the weights' mean; otherwise the baseline is the mean of
    the model's log-ratios, or 0 if that is negative."""
    folder, model = saved
    ours = ranks_of_three(ranks, folder)
    examples = mismatched(make_examples().drop_columns(["ref_log_prob"]), 99)
    table = labelled_with_reference(ours, examples)
    metrics = validate_labelled(ours, KTO, table)
    desirable = examples["desirable"].to_pylist()
    weights = [KTO.desirable_weight if label else KTO.undesirable_weight for label in desirable]
    assert metrics["val/loss"] == pytest.approx(np.mean(weights) / 2, abs=1e-5)
    assert metrics["val/kl_baseline"] == pytest.approx(0.0, abs=1e-5)
    shift = np.arange(table.num_rows) - 3.0
    for sign in (1, -1):
        own = table.set_column(
            table.column_names.index("ref_kl_log_prob"),
            "ref_kl_log_prob",
            pa.array(table["ref_kl_log_prob"].to_numpy() - sign * shift, pa.float32()),
        )
        with torch.no_grad():
            ratios = [
                log_ratio(model, row["kl_input_ids"], row["kl_loss_mask"], row["ref_kl_log_prob"]).item()
                for row in own.to_pylist()
            ]
        assert baseline_of(ours, own) == pytest.approx(max(0.0, np.mean(ratios)), abs=1e-4)
        assert validate_labelled(ours, KTO, own)["val/kl_baseline"] == pytest.approx(
            max(0.0, sign * shift.mean()), abs=1e-4
        )
