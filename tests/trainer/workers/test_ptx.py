"""PPO-ptx: gradients from rewards and texts in one step, equal to a Hugging Face model's; and which texts a step uses."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megarl.algorithms.aggregate import LossAggregation
from megarl.algorithms.policy_loss import PolicyLossOptions
from megarl.cluster.ranks import RankInfo
from megarl.config import MegatronConfig, OptimConfig
from megarl.data.loader import TableLoader
from megarl.data.sft import SFT_SCHEMA
from megarl.data.trajectories import append_column
from megarl.layout.grid import ParallelLayout
from megarl.trainer.loops.driver import epochs
from megarl.trainer.stages.updates import _update_metrics
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.dispatch import MicroBatching, ModelSpec, PolicyUpdate, update_plan
from megarl.trainer.workers.ptx import PtxUpdate, plan_ptx
from megarl.weight_sync.layouts import megatron_layout
from tests.megatron.hf import VOCAB, Rank, check_gradients, make_table, save_model
from tests.ranks import RankPool

COEF, CLIP, TEMPERATURE = 0.7, 0.2, 0.8
# Layout, number of ranks, and the maximum number of tokens of a micro-batch.
LAYOUTS: dict[str, tuple[dict[str, Any], int, int]] = {
    "one": ({}, 1, 1000),
    "micro-batches": ({}, 1, 24),
    "tp2": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2, 60),
    "vpp2": ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, 2, 40),
    "cp2": ({"context_parallel_size": 2}, 2, 40),
    "dp2": ({}, 2, 40),
}
PARALLEL = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "sequence_parallel": "sp",
}


def make_texts(num: int = 8) -> pa.Table:
    """Texts of 2 to 16 tokens, most of which are trained on."""
    generator = np.random.default_rng(4)
    lengths = generator.integers(2, 17, num)
    rows = [
        {
            "uid": f"text:{number}",
            "input_ids": generator.integers(0, VOCAB, length),
            "loss_mask": [*(generator.random(length - 1) < 0.7), True],
        }
        for number, length in enumerate(lengths)
    ]
    return pa.Table.from_pylist(rows, schema=SFT_SCHEMA)


def log_probs(model: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> Tensor:
    """The log-probs of all tokens except the first."""
    tokens = torch.tensor([ids])
    logits = model(tokens).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


def responses(model: PreTrainedModel, row: dict[str, Any]) -> Tensor:
    return log_probs(model, row["prompt_ids"] + row["response_ids"], TEMPERATURE)[
        len(row["prompt_ids"]) - 1 :
    ]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, PreTrainedModel, pa.Table]:
    """A model's folder, the model, and trajectories from an older policy than the model."""
    folder = tmp_path_factory.mktemp("model")
    model, table = save_model(folder), make_table()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        old = [
            (found := responses(model, row)) + 0.3 * torch.randn(found.shape, generator=generator)
            for row in table.to_pylist()
        ]
    bounds = np.cumsum([0, *(len(values) for values in old)]).astype(np.int64)
    return str(folder), model, append_column(table, "old_log_probs", (torch.cat(old).numpy(), bounds))


def by_formula(model: PreTrainedModel, table: pa.Table, texts: pa.Table) -> tuple[float, float]:
    """The two losses, arXiv:1707.06347 eq. 7 and the ptx term of arXiv:2203.02155 eq. 2; the gradient of their weighted sum
    stays in the model."""
    model.zero_grad()
    policy, likelihood = [], []
    for row in table.to_pylist():
        ratio = (responses(model, row) - torch.tensor(row["old_log_probs"])).exp()
        advantages = torch.tensor(row["advantages"])
        objective = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        policy.append(-objective[torch.tensor(row["response_mask"])])
    for row in texts.to_pylist():
        likelihood.append(-log_probs(model, row["input_ids"])[torch.tensor(row["loss_mask"][1:])])
    first, second = torch.cat(policy).mean(), torch.cat(likelihood).mean()
    (first + COEF * second).backward()
    return first.item(), second.item()


def _update(
    rank: int, world: int, sizes: dict[str, Any], folder: str, table: pa.Table, plan: list, counts: list,
    texts: pa.Table, ptx: PtxUpdate,
) -> tuple[dict[str, float], list]:  # fmt: skip
    info = RankInfo(rank, world, rank, "localhost", 0, "actor", "", (), "")
    megatron = MegatronConfig(**sizes, use_distributed_optimizer=False)
    spec = ModelSpec(folder, "lm", megatron, OptimConfig(lr=1e-6, clip_grad=0.0), 10, timeout=60.0)
    worker = ActorWorker(info, spec, temperature=TEMPERATURE)
    options = PolicyLossOptions(CLIP, CLIP, None)
    how = PolicyUpdate(LossAggregation("token-mean"), options, None, None, seed=0)
    (step,) = worker.update_policy(table, plan, counts, how, texts, ptx)
    pieces = megatron_layout(worker.config, worker.layout, "lm").pieces(rank)
    return step, Rank(worker.layout, worker.chunks, pieces).gradients()


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_rewards_and_texts_in_every_layout(ranks: RankPool, case, name: str) -> None:
    (sizes, world, max_tokens), (folder, model, table) = LAYOUTS[name], case
    texts = make_texts()
    layout = ParallelLayout(world=world, **{PARALLEL[key]: value for key, value in sizes.items()})
    cut = MicroBatching(table.num_rows, max_tokens, None)
    plan, counts = update_plan(table, layout, cut, seed=0)
    joined, ptx = plan_ptx([texts], layout, cut, COEF)
    policy, likelihood = by_formula(model, table, texts)
    results = ranks.run(_update, sizes, folder, table, plan, counts, joined, ptx, world=world)
    check_gradients(model, [gradients for _, gradients in results])
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    for step, _ in results:
        assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)
        metrics = _update_metrics("actor", [step])
        assert metrics["actor/pg_loss"] == pytest.approx(policy, rel=1e-4)
        assert metrics["actor/ptx_loss"] == pytest.approx(likelihood, rel=1e-4)
        assert "actor/ptx_tokens" not in metrics


def test_each_mini_batch_has_texts_of_its_own_in_the_loaders_order() -> None:
    layout, cut = ParallelLayout(world=2), MicroBatching(4, 20, None)
    texts = make_texts(12)
    make = lambda: TableLoader(SimpleNamespace(table=texts), 4, shuffle=True, seed=3)  # noqa: E731
    loader = make()
    batches = epochs(loader)
    taken = [next(batches) for _ in range(2)]
    joined, ptx = plan_ptx(taken, layout, cut, COEF)
    assert joined["uid"].to_pylist() == [uid for batch in taken for uid in batch["uid"].to_pylist()]
    for number, shares in enumerate(ptx.plan):
        rows = sorted(row for share in shares for micro in share for row in micro)
        assert rows == list(range(4 * number, 4 * number + 4))
        assert len({len(share) for share in shares}) == 1
        learnt = sum(sum(joined["loss_mask"][row].as_py()[1:]) for row in rows)
        assert ptx.counts[number] == learnt
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert next(epochs(resumed)).equals(next(batches))
