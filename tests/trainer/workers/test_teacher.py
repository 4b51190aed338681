"""A reference from another folder: a teacher of any size, in the actor's processes or its own, compared with Hugging Face's model."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from megarl.algorithms.aggregate import LossAggregation
from megarl.algorithms.kl import FULL_KL, TOP_K
from megarl.algorithms.metrics import reduce_metrics
from megarl.algorithms.policy_loss import PolicyLossOptions
from megarl.cluster.ranks import RankInfo
from megarl.config import LoraConfig, MegatronConfig, OptimConfig
from megarl.data.trajectories import GIVEN
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.dispatch import ModelSpec, PolicyUpdate, merge_columns
from tests.megatron.hf import VOCAB, make_table, save_model
from tests.megatron.test_full_kl import generalized_jsd_loss
from tests.megatron.test_top_tokens import with_others
from tests.ranks import RankPool
from tests.trainer.workers.test_actor import (
    TEMPERATURE,
    hugging_face,
    plan_of,
    with_old_log_probs,
)

COUNT = 7
SHARE = [[0, 3, 5], [6, 1, 2, 4, 7]]
LORA = LoraConfig(rank=4, alpha=8.0)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
}


def save_teacher(folder: Path, vocab_size: int = VOCAB) -> PreTrainedModel:
    """A teacher of another family than the policy: wider, with other heads, fewer layers, and an output head tied to its embedding."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, PreTrainedModel]]:
    """The folder and the model of the policy, then of the teacher."""
    folders = [tmp_path_factory.mktemp(name) for name in ("policy", "teacher")]
    return [(str(folders[0]), save_model(folders[0])), (str(folders[1]), save_teacher(folders[1]))]


def make(
    rank: int, world: int, folders: list[str], megatron: dict[str, Any], lora: LoraConfig
) -> ActorWorker:
    info = RankInfo(rank, world, rank, "localhost", 0, "actor", "", (), "")
    spec = ModelSpec(folders[0], "lm", MegatronConfig(**megatron), OptimConfig(lr=1e-3), 9, 60.0, lora=lora)
    return ActorWorker(info, spec, TEMPERATURE, reference_path=folders[1])


def _judge(
    rank: int, world: int, folders: list[str], megatron: dict[str, Any], lora: LoraConfig, beta: float
) -> tuple:
    """The log-probs of a teacher in the actor's processes, and the metrics of two updates that learn only from it."""
    table = with_old_log_probs(make_table())
    worker = make(rank, world, folders, megatron, lora)
    assert "reference" in worker.parts
    columns = worker.compute_ref_log_probs(table, [SHARE], "ref_log_probs")
    options = PolicyLossOptions(0.2, 0.2, None, kl_coef=0.5, kl_kind=FULL_KL, kl_beta=beta, pg_coef=0.0)
    how = PolicyUpdate(LossAggregation("token-mean"), options, None, None, seed=0)
    (step,) = worker.update_policy(table, *plan_of(SHARE), how)
    # Teacher and policy take turns in memory: another update still works.
    (later,) = worker.update_policy(table, *plan_of(SHARE), how)
    return columns, step, later


def _top(
    rank: int, world: int, folders: list[str], megatron: dict[str, Any], lora: LoraConfig, beta: float
) -> tuple:
    """The teacher's log-probs and the metrics of two updates that learn from the most likely tokens of a teacher in the actor's processes."""
    table = with_old_log_probs(make_table())
    worker = make(rank, world, folders, megatron, lora)
    columns: list[Any] = [None] * world
    dist.all_gather_object(columns, worker.compute_ref_top_tokens(table, [SHARE], COUNT))
    table = merge_columns(table, columns)
    options = PolicyLossOptions(0.2, 0.2, None, kl_coef=0.5, kl_kind=TOP_K, kl_beta=beta, pg_coef=0.0)
    how = PolicyUpdate(LossAggregation("token-mean"), options, None, None, seed=0)
    (step,) = worker.update_policy(table, *plan_of(SHARE), how)
    (later,) = worker.update_policy(table, *plan_of(SHARE), how)
    return table["ref_log_probs"].to_pylist(), step, later


@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", [*LAYOUTS, "cp2"])
def test_a_policy_learns_from_its_most_likely_tokens(
    ranks: RankPool, models, name: str, lora: LoraConfig
) -> None:
    world, megatron = {**LAYOUTS, "cp2": (2, {"context_parallel_size": 2})}[name]
    beta = {"one": 1.0, "tp2": 0.3, "pp2": 0.0, "cp2": 1.0}[name]
    folders = [folder for folder, _ in models]
    wanted = hugging_face(models, with_old_log_probs(make_table()))["ref_log_probs"]
    expected = divergence(models, beta, COUNT)
    assert expected < 0.9 * divergence(models, beta)
    for judged, step, later in ranks.run(_top, folders, megatron, lora, beta, world=world):
        for row, found in enumerate(judged):
            np.testing.assert_allclose(found, wanted[row].numpy(), rtol=1e-4, atol=1e-5)
        assert step["actor/kl_loss"] == pytest.approx(expected, rel=1e-4)
        assert step["actor/loss"] == pytest.approx(0.5 * expected, rel=1e-4)
        assert later["actor/kl_loss"] < step["actor/kl_loss"]


def divergence(models: list[tuple[str, PreTrainedModel]], beta: float, count: int | None = None) -> float:
    """TRL's divergence, the mean over all live tokens; with `count` on the teacher's `count` most likely tokens and the sum of all others."""
    total, tokens = 0.0, 0
    for row in make_table().to_pylist():
        ids, start = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["prompt_ids"]) - 1
        mask = torch.tensor(row["response_mask"])
        tokens += int(mask.sum())
        with torch.no_grad():
            p, q = (model(ids).logits[:, start:-1][:, mask] for _, model in models)
        p, q = ((one[0] / TEMPERATURE).log_softmax(-1) for one in (p, q))
        if count is not None:
            ids = q.topk(count).indices
            p, q = with_others(p, ids), with_others(q, ids)
        total += float(generalized_jsd_loss()(p[None], q[None], beta=beta, reduction="sum"))
    return total / tokens


@pytest.mark.parametrize("lora", [LoraConfig(), LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_policy_learns_from_it_in_its_own_processes(
    ranks: RankPool, models, name: str, lora: LoraConfig
) -> None:
    world, megatron = LAYOUTS[name]
    beta = {"one": 1.0, "tp2": 0.3, "pp2": 0.0}[name]
    folders = [folder for folder, _ in models]
    results = ranks.run(_judge, folders, megatron, lora, beta, world=world)
    wanted = hugging_face(models, with_old_log_probs(make_table()))["ref_log_probs"]
    ((rows, columns),) = [found for found, _, _ in results if found is not None]
    values, offsets = columns["ref_log_probs"]
    for place, row in enumerate(rows):
        found = values[offsets[place] : offsets[place + 1]]
        np.testing.assert_allclose(found, wanted[row].numpy(), rtol=1e-4, atol=1e-5)
    expected = divergence(models, beta)
    for _, step, later in results:
        assert step["actor/kl_loss"] == pytest.approx(expected, rel=1e-4)
        assert step["actor/loss"] == pytest.approx(0.5 * expected, rel=1e-4)
        assert later["actor/kl_loss"] < step["actor/kl_loss"]


GIVEN_ROWS = (1, 2, 6)


def _mixed(rank: int, world: int, folders: list[str], megatron: dict[str, Any]) -> dict[str, float]:
    """The metrics of an update with rewards and a teacher, in which some rows have given responses."""
    worker = make(rank, world, folders, megatron, LoraConfig())
    options = PolicyLossOptions(0.2, 0.2, None, kl_coef=0.5, kl_kind=FULL_KL, kl_beta=0.3, pg_coef=0.7)
    how = PolicyUpdate(LossAggregation("token-mean"), options, None, None, seed=0)
    (step,) = worker.update_policy(mixed_table(), *plan_of(SHARE), how)
    return step


def mixed_table() -> pa.Table:
    table = with_old_log_probs(make_table())
    return table.append_column(GIVEN, pa.array([row in GIVEN_ROWS for row in range(table.num_rows)]))


@pytest.mark.parametrize("name", ["one", "tp2"])
def test_given_responses_are_learnt_from_by_the_divergence_alone(ranks: RankPool, models, name: str) -> None:
    """Loss, metrics and gradient norm equal those of a plain loop with TRL's divergence on all rows and PPO's loss on the policy's rows."""
    world, megatron = LAYOUTS[name]
    policy, teacher = (model for _, model in models)
    total = sum(sum(mask) for mask in make_table()["response_mask"].to_pylist())
    sums = {True: [0.0, 0], False: [0.0, 0]}  # by whether the response is given: divergence, tokens
    policy.zero_grad()
    for number, row in enumerate(mixed_table().to_pylist()):
        ids, start = torch.tensor([row["prompt_ids"] + row["response_ids"]]), len(row["prompt_ids"]) - 1
        mask, labels = torch.tensor(row["response_mask"]), torch.tensor(row["response_ids"])[:, None]
        with torch.no_grad():
            q = teacher(ids).logits[0, start:-1] / TEMPERATURE
        p = policy(ids).logits[0, start:-1] / TEMPERATURE
        kl = generalized_jsd_loss()(p[None, mask], q[None, mask], beta=0.3, reduction="sum")
        loss = 0.5 * kl
        if number not in GIVEN_ROWS:
            old, advantages = (torch.tensor(row[field])[mask] for field in ("old_log_probs", "advantages"))
            ratio = (p.log_softmax(-1).gather(-1, labels)[mask, 0] - old).exp()
            clipped = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
            loss = loss + 0.7 * clipped.sum()
        (loss / total).backward()
        sums[number in GIVEN_ROWS][0] += float(kl.detach())
        sums[number in GIVEN_ROWS][1] += int(mask.sum())
    norm = torch.stack([parameter.grad.norm() for parameter in policy.parameters()]).norm().item()
    policy.zero_grad()
    for step in ranks.run(_mixed, [folder for folder, _ in models], megatron, world=world):
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-3)
        metrics = reduce_metrics(step)
        assert metrics["actor/kl_loss"] == pytest.approx((sums[True][0] + sums[False][0]) / total, rel=1e-4)
        assert metrics["actor/own_kl"] == pytest.approx(sums[False][0] / sums[False][1], rel=1e-4)
        assert metrics["actor/given_kl"] == pytest.approx(sums[True][0] / sums[True][1], rel=1e-4)
        assert step["actor/tokens"] == sums[False][1]


def _alone(rank: int, world: int, folder: str) -> Any:
    """A teacher with processes of its own."""
    table, spec = with_old_log_probs(make_table()), ModelSpec(folder, "lm", MegatronConfig(), None, 0, 60.0)
    info = RankInfo(rank, world, rank, "localhost", 0, "ref", "", (), "")
    return ActorWorker(info, spec, TEMPERATURE).compute_log_probs(table, [SHARE], "ref_log_probs")


def test_more_tokens_of_a_teacher_take_their_share(ranks: RankPool, models, tmp_path: Path) -> None:
    """The teacher's log-probs are normalised over its own, larger vocabulary, both in the actor's processes and in its own."""
    teacher = save_teacher(tmp_path, VOCAB + 9)
    wanted = hugging_face([("", teacher), ("", teacher)], with_old_log_probs(make_table()))["ref_log_probs"]
    folders = [models[0][0], str(tmp_path)]
    (inside,) = ranks.run(_sampled, folders, world=1)
    (alone,) = ranks.run(_alone, folders[1], world=1)
    for rows, columns in (inside, alone):
        values, offsets = columns["ref_log_probs"]
        for place, row in enumerate(rows):
            found = values[offsets[place] : offsets[place + 1]]
            np.testing.assert_allclose(found, wanted[row].numpy(), rtol=1e-4, atol=1e-5)


def _sampled(rank: int, world: int, folders: list[str]) -> Any:
    worker = make(rank, world, folders, {}, LoraConfig())
    return worker.compute_ref_log_probs(with_old_log_probs(make_table()), [SHARE], "ref_log_probs")
