"""Policy losses through Megatron in several layouts, compared with their formulas on a Hugging Face model; and the tokens
that the actor's ranks select from a mini-batch."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megarl.algorithms.aggregate import LossAggregation, loss_counts, token_weights
from megarl.algorithms.metrics import rollout_difference
from megarl.algorithms.policy_loss import (
    ClipCov,
    KLCov,
    PolicyLossOptions,
    PolicyTokens,
    actor_loss,
    token_covariance,
)
from megarl.cluster.ranks import RankInfo
from megarl.config import MegatronConfig, OptimConfig
from megarl.data.trajectories import append_column, ragged, take
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import PackedBatch
from megarl.megatron.parallel import coords
from megarl.megatron.sequences import sequence_ids
from megarl.megatron.step import train_step
from megarl.trainer.workers.actor import ActorWorker, trajectories_of, with_selection
from megarl.trainer.workers.dispatch import ModelSpec, PolicyUpdate, merge_columns
from tests.megatron.hf import VOCAB, check_gradients, make_table, optimizer_settings, place_model, save_model

LOW, HIGH = 0.2, 0.3
FIELDS = ("old_log_probs", "advantages", "loss_weights")
# Layout, ranks, and the rows of each micro-batch of each data parallel rank.
LAYOUTS = {
    "one": ({}, 1, [[[0, 1, 2, 3, 4, 5], [6, 7]]]),
    "cp2": ({"cp": 2}, 2, [[[7, 2], [4, 0, 6], [1, 3, 5]]]),
    "tp2-cp2-sp": ({"tp": 2, "cp": 2, "sp": True}, 4, [[[0, 1, 2, 3, 4, 5, 6, 7]]]),
}


def response_log_probs(model: PreTrainedModel, row: dict) -> Tensor:
    ids = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(row["response_ids"])[:, None])[:, 0]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel, pa.Table]:
    """A model's folder, the model, and trajectories with one advantage each, from an older policy than the model."""
    folder: Path = tmp_path_factory.mktemp("model")
    model, table = save_model(folder), make_table()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        old = [
            (found := response_log_probs(model, row)) + 0.4 * torch.randn(found.shape, generator=generator)
            for row in table.to_pylist()
        ]
    advantages = torch.randn(table.num_rows, generator=generator).tolist()
    lengths = [len(values) for values in old]
    table = table.drop_columns(["advantages"])
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    table = append_column(table, "old_log_probs", (torch.cat(old).numpy(), bounds))
    table = append_column(table, "advantages", (np.repeat(advantages, lengths), bounds))
    mask, offsets = (torch.from_numpy(np.array(part)) for part in ragged(table, "response_mask"))
    weights = token_weights(LossAggregation("seq-mean-token-mean"), mask, offsets, loss_counts(mask, offsets))
    return str(folder), model, append_column(table, "loss_weights", (weights.numpy(), bounds))


def by_formula(mode: str, model: PreTrainedModel, table: pa.Table) -> float:
    """The loss by the papers' formulas, one trajectory at a time; its gradients stay in the model.

    GSPO, arXiv:2507.18071 eq. 5 (not its token form), GMPO, arXiv:2507.20673, and TOPR, arXiv:2503.14286.
    """
    model.zero_grad()
    losses = []
    for row in table.to_pylist():
        live = torch.tensor(row["response_mask"])
        if not live.any():
            continue
        advantage = row["advantages"][0]
        log_probs = response_log_probs(model, row)
        log_ratio = (log_probs - torch.tensor(row["old_log_probs"]))[live]
        if mode == "gspo":
            ratio = log_ratio.mean().exp()
            objective = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
        elif mode == "topr":
            taper = log_ratio.detach().sum().clamp(max=0.0).exp() if advantage < 0 else 1.0
            objective = taper * advantage * log_probs[live].mean()
        else:
            sign = math.copysign(1.0, advantage)
            kept = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-LOW, HIGH))
            objective = advantage * kept.mean().exp()
        losses.append(-objective)
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item()


def _train(rank: int, world: int, layout: dict, folder: str, table: pa.Table, mode: str, plan: list) -> tuple:
    place = place_model(rank, world, layout, folder)
    optimizer, scheduler = build_optimizer(place.chunks, optimizer_settings())
    options = PolicyLossOptions(LOW, HIGH, None, loss_mode=mode)
    batches = [place.pack(table, rows, FIELDS) for rows in plan[coords().dp]]

    def loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = PolicyTokens(
            mask=batch.mask,
            weights=batch.fields["loss_weights"],
            old_log_probs=batch.fields["old_log_probs"],
            advantages=batch.fields["advantages"],
            sequences=trajectories_of(batch),
        )
        return actor_loss(output.view(batch.num_tokens, -1)[:, 0], None, tokens, options)

    head = lm_head(vocab_size=VOCAB, temperature=1.0, chunk_tokens=16)
    result = train_step(place.chunks, optimizer, scheduler, batches, head, loss)
    return result.stats["actor/loss"], place.gradients()


@pytest.mark.parametrize("mode", ["gspo", "gmpo", "topr"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "tp2-cp2-sp" else name for name in LAYOUTS]
)
def test_losses_of_whole_trajectories_are_the_papers_in_every_layout(
    ranks, case, name: str, mode: str
) -> None:
    (layout, world, plan), (folder, model, table) = LAYOUTS[name], case
    expected = by_formula(mode, model, table)
    results = ranks.run(_train, layout, folder, table, mode, plan, world=world)
    assert [loss for loss, _ in results] == pytest.approx([expected] * world, rel=1e-5)
    check_gradients(model, [gradients for _, gradients in results])


def _ids(rank: int, world: int, layout: dict, folder: str, table: pa.Table) -> list[list[int]]:
    place = place_model(rank, world, layout, folder)
    batch = place.pack(table, [0, 2, 4])
    ids = sequence_ids(batch)
    assert ids.shape == (batch.num_tokens,)
    return [batch.input_ids[0][ids == number].tolist() for number in range(3)]


def test_every_token_knows_its_trajectory(ranks, case) -> None:
    folder, _, table = case
    shares = ranks.run(_ids, {"tp": 2, "cp": 2, "sp": True}, folder, table, world=4)
    for number, row in enumerate([0, 2, 4]):
        tokens = table["prompt_ids"][row].as_py() + table["response_ids"][row].as_py()
        # Every two neighbours are tensor parallel ranks with the same tokens.
        found = sorted(token for share in shares[::2] for token in share[number])
        padding = len(found) - len(tokens)
        assert 0 <= padding < 8 and found == sorted(tokens + [0] * padding)


@pytest.mark.parametrize("rule", [KLCov(0.2), ClipCov(0.2, -0.2, 0.5)])
def test_tokens_are_selected_over_the_mini_batch_however_it_is_shared(case, rule: ClipCov | KLCov) -> None:
    _, _, table = case
    rows = [6, 2, 4, 0]
    found = with_selection(table, rows, rule, seed=7)
    assert found.drop_columns(["selected"]).equals(table)
    shuffled = with_selection(table, rows[::-1], rule, seed=7)
    assert shuffled.equals(found)
    mini = take(found, sorted(rows))
    selected, mask, old, advantages = (
        torch.from_numpy(np.array(ragged(mini, name)[0]))
        for name in ("selected", "response_mask", "old_log_probs", "advantages")
    )
    assert float(selected.sum()) == max(int(0.2 * int(mask.sum())), 1) > 1
    assert sum(float(part.sum()) for part in [selected]) == float(ragged(found, "selected")[0].sum())
    covariance = token_covariance(old, advantages, mask)
    if isinstance(rule, KLCov):
        assert covariance[selected > 0].min() >= covariance[mask & (selected == 0)].max()
    else:
        assert ((covariance[selected > 0] > -0.2) & (covariance[selected > 0] < 0.5)).all()


def test_a_selection_copies_no_column_that_it_does_not_read(case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank selects over the whole mini-batch, whose experts may be many GiB."""
    taken: list[str] = []

    def recording(table: pa.Table, rows: np.ndarray) -> pa.Table:
        taken.extend(table.column_names)
        return take(table, rows)

    monkeypatch.setattr("megarl.trainer.workers.actor.take", recording)
    assert "prompt_ids" in case[2].column_names
    with_selection(case[2], [6, 2, 4, 0], KLCov(0.2), seed=7)
    assert sorted(taken) == ["advantages", "old_log_probs", "response_mask"]


def _update(
    rank: int, world: int, megarl_layout: dict, folder: str, table: pa.Table, plan: list, how: PolicyUpdate
) -> list[dict[str, float]]:
    info = RankInfo(rank, world, rank, "localhost", 0, "actor", "", (), "")
    spec = ModelSpec(folder, "lm", MegatronConfig(**megarl_layout), OptimConfig(lr=1e-6), 10, timeout=60.0)
    counts = []
    for shares in plan:
        rows = [row for share in shares for micro in share for row in micro]
        mask, offsets = ragged(take(table, rows), "response_mask")
        counts.append(loss_counts(torch.tensor(mask), torch.from_numpy(np.array(offsets))))
    return ActorWorker(info, spec, temperature=1.0).update_policy(table, plan, counts, how)


# Rows by mini-batch, data parallel rank and micro-batch. The second mini-batch's rows have no live token in `masked`.
PLANS = {
    "one": ({}, 1, [[[[0, 2], [4, 6]]], [[[1, 3]]], [[[5], [7]]]]),
    "dp2": ({}, 2, [[[[6, 0]], [[4, 2]]], [[[1]], [[3]]], [[[7]], [[5]]]]),
    "cp2": ({"context_parallel_size": 2}, 2, [[[[0, 2, 4, 6]]], [[[3], [1]]], [[[5, 7]]]]),
}


@pytest.fixture(scope="module")
def masked(case) -> pa.Table:
    """The case's trajectories, without live tokens in rows 1 and 3."""
    _, _, table = case
    masks = [
        [flag and row not in (1, 3) for flag in mask]
        for row, mask in enumerate(table["response_mask"].to_pylist())
    ]
    table = table.drop_columns(["response_mask", "loss_weights"])
    return table.append_column("response_mask", pa.array(masks, pa.list_(pa.bool_())))


def how(mode: str, select: ClipCov | KLCov | None, target_kl: float | None) -> PolicyUpdate:
    options = PolicyLossOptions(LOW, HIGH, 3.0, loss_mode=mode)
    return PolicyUpdate(LossAggregation("token-mean"), options, select, target_kl, seed=3)


@pytest.mark.parametrize("mode", ["clip_cov", "kl_cov"])
def test_ranks_and_micro_batches_change_no_update(ranks, case, masked, mode: str) -> None:
    """Two updates with tokens selected from their complete mini-batches; the mini-batch without live tokens is skipped."""
    rule = ClipCov(0.3, -0.5, 0.5) if mode == "clip_cov" else KLCov(0.3)
    found = {}
    for name, (layout, world, plan) in PLANS.items():
        results = ranks.run(_update, layout, case[0], masked, plan, how(mode, rule, None), world=world)
        assert results == [results[0]] * world and len(results[0]) == 2
        found[name] = results[0]
    for name in ("dp2", "cp2"):
        for step, expected in zip(found[name], found["one"], strict=True):
            assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert [step["actor/cov_selected"] for step in found["one"]] == [8, 1]


def test_updates_end_once_the_policy_has_moved_too_far(ranks, case, masked) -> None:
    far = with_column(masked, "old_log_probs", 0.5)  # the policy's log-probs are about -6: ppo_kl about 6
    for limit, steps, stopped in ((1.0, 1, 1.0), (100.0, 2, 0.0)):
        layout, world, plan = PLANS["dp2"]
        results = ranks.run(_update, layout, case[0], far, plan, how("vanilla", None, limit), world=world)
        assert results == [results[0]] * world
        assert len(results[0]) == steps and results[0][-1]["stopped_early"] == stopped


def with_column(table: pa.Table, name: str, value: float) -> pa.Table:
    """The table with one value at every response token."""
    flat, offsets = ragged(table, name)
    return append_column(table.drop_columns([name]), name, (np.full(len(flat), value), offsets))


SINGLE = {
    "dp2": ({}, 2, [[[6, 0], [1]], [[4, 2, 3], [7, 5]]]),
    "tp2-cp2": ({"tensor_model_parallel_size": 2, "context_parallel_size": 2}, 4, [[[0, 2, 4, 6], [1, 3, 5, 7]]]),
}  # fmt: skip


def _single_update(
    rank: int,
    world: int,
    megarl_layout: dict,
    folder: str,
    table: pa.Table,
    shares: list,
    old_ones_first: bool,
) -> tuple[dict[str, float], dict[str, float], list[float]]:
    """The step's sums, `rollout_difference` of the old log-probs (if these are computed first), and the policy's weights after the step."""
    info = RankInfo(rank, world, rank, "localhost", 0, "actor", "", (), "")
    spec = ModelSpec(folder, "lm", MegatronConfig(**megarl_layout), OptimConfig(lr=1e-3), 10, timeout=60.0)
    worker, expected = ActorWorker(info, spec, temperature=0.7), {}
    if old_ones_first:
        results = [None] * world
        torch.distributed.all_gather_object(results, worker.compute_log_probs(table, shares, "old_log_probs"))
        table = merge_columns(table, results)
        old, rollout = (torch.tensor(ragged(table, f"{name}_log_probs")[0]) for name in ("old", "rollout"))
        expected = rollout_difference(old, rollout, torch.tensor(ragged(table, "response_mask")[0]))
    mask, offsets = ragged(table, "response_mask")
    counts = [loss_counts(torch.tensor(mask), torch.from_numpy(np.array(offsets)))]
    (found,) = worker.update_policy(table, [shares], counts, how("vanilla", None, None))
    change = [float(value.detach().double().sum()) for value in worker.own_tensors().values()]
    return found, expected, change


@pytest.mark.parametrize("layout", SINGLE)
def test_a_single_update_is_the_same_without_a_forward_pass_for_its_old_log_probs(
    ranks, case, layout: str
) -> None:
    """The weights are the same bit for bit, and the update reports the same differences from the engine's log-probs."""
    megarl_layout, world, shares = SINGLE[layout]
    folder, _, table = case
    noise = np.random.default_rng(3).normal(-6.0, 0.5, len(ragged(table, "advantages")[0]))
    table = table.drop_columns(["old_log_probs", "loss_weights"])
    table = append_column(table, "rollout_log_probs", (noise, ragged(table, "advantages")[1]))
    arguments = (megarl_layout, folder, table, shares)
    first = ranks.run(_single_update, *arguments, True, world=world)
    alone = ranks.run(_single_update, *arguments, False, world=world)
    for (with_old, expected, weights), (without, _, same) in zip(first, alone, strict=True):
        assert weights == same
        told = {name: without.pop(name) for name in expected}
        assert told == pytest.approx(expected, rel=1e-6)
        assert {name: value for name, value in without.items() if not name.startswith("rollout/")} == with_old
        assert without["actor/ratio"] == without["actor/tokens"] and without["actor/ppo_kl"] == 0.0
