"""Every role of a job as a shadow, against the plan of its memory: several recipes in one process, with a wide model of few layers."""

import json
from pathlib import Path

import pytest

from megarl.plan.inputs import read_planned
from megarl.plan.memory import GIB, plan_of
from megarl.shadow import dry_run
from megarl.shadow.comparison import Comparison, compare
from megarl.shadow.requests import Request

ROOT = Path(__file__).resolve().parents[2]
PPO = """
data: {train_files: none, train_batch_size: 64, max_prompt_length: 512, max_response_length: 512}
actor_rollout_ref:
  model: {path: MODEL}
  actor:
    ppo_mini_batch_size: 16
    ppo_max_token_len_per_gpu: 2048
    use_kl_loss: true
    entropy_coeff: 0.01
    optim: {lr: 1.0e-6}
    megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, recompute_granularity: null}
  ref: {log_prob_max_token_len_per_gpu: 8192, megatron: {tensor_model_parallel_size: 4}}
  rollout: {tensor_model_parallel_size: 2}
critic:
  optim: {lr: 1.0e-6}
reward_model:
  enable: true
  model: {path: MODEL}
  max_token_len_per_gpu: 6144
  megatron: {pipeline_model_parallel_size: 2}
trainer: {total_training_steps: 10, n_gpus_per_node: 8}
"""
TUNING = """
data: {train_files: none, val_files: none, max_length: 1024, train_batch_size: 64}
model: {path: MODEL}
optim: {lr: 1.0e-5}
megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, recompute_granularity: null}
max_token_len_per_gpu: 4096
trainer: {n_gpus_per_node: 8, test_freq: 10}
"""
LORA = ["model.lora.rank=16", "megatron.pipeline_model_parallel_size=1"]
KEPT = (
    "transformer_engine.pytorch.cpp_extensions.gemm:",  # workspaces
    "megatron.core.models.common.embeddings.rotary_pos_embedding:",  # tables of rotary angles
    "megarl.megatron.lora.adapter:",  # which rows of a layer belong to which weight
)
KL, KL_BETA = (f"actor_rollout_ref.actor.kl_loss_{name}" for name in ("type", "beta"))
SHARED = ["actor_rollout_ref.model.lora.rank=16", "critic.model.lora.rank=16", "critic.model.share_base=true"]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Recipe files by name; the model's folder has no weights."""
    folder = tmp_path_factory.mktemp("roles")
    (folder / "model").mkdir()
    source = ROOT / "recipes" / "models" / "qwen2.5-7b" / "config.json"
    fields = json.loads(source.read_text()) | {"num_hidden_layers": 2, "vocab_size": 32000}
    (folder / "model" / "config.json").write_text(json.dumps(fields))
    for name, text in (("ppo", PPO), ("tuning", TUNING)):
        (folder / f"{name}.yaml").write_text(text.replace("MODEL", str(folder / "model")))
    return {name: str(folder / f"{name}.yaml") for name in ("ppo", "tuning")}


CASES = {
    "ppo": ("ppo", None, [], [("ref", 0), ("reward_model", 4)]),
    # Each case has a rank of the last stage, which has the head.
    "top tokens": ("ppo", None, [f"{KL}=top_k"], [("ref", 0), ("actor", 4)]),
    "whole distributions": (
        "ppo",
        None,
        [f"{KL}=full", f"{KL_BETA}=0.5", "actor_rollout_ref.ref.megatron=null"],
        [("actor", 4)],
    ),
    "kept tokens": ("ppo", None, ["actor_rollout_ref.rollout.top_p=0.9"], [("ref", 0), ("actor", 4)]),
    "shared critic": ("ppo", None, SHARED, [("actor", 4)]),
    "sft": ("tuning", "sft", [], [("sft", 0), ("sft", 4)]),
    "rm": ("tuning", "rm", [], [("rm", 4)]),
    "dpo": ("tuning", "dpo", [], [("dpo", 4)]),
    "kto": ("tuning", "dpo", ["dpo.loss_type=kto"], [("dpo", 0)]),
    "dpo with adapters": ("tuning", "dpo", LORA, [("dpo", 0)]),
}


@pytest.fixture(scope="module")
def reports(
    machine: None, recipes: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("reports")
    requests = [
        Request(recipes[recipe], keys, ranks, str(folder / name), command=command)
        for name, (recipe, command, keys, ranks) in CASES.items()
    ]
    process = dry_run.start(requests, folder / "log")
    assert process.wait() == 0, (folder / "log").read_text()
    return {name: list(map(json.loads, (folder / name).read_text().splitlines())) for name in CASES}


def rows_of(name: str, reports: dict[str, list[dict]], recipes: dict[str, str]) -> list[Comparison]:
    recipe, command, keys, _ = CASES[name]
    config, inputs = read_planned(recipes[recipe], keys, command, check=False)
    plan = plan_of(config, inputs, 80 * GIB, 0)
    return [row for report in reports[name] for row in compare(plan, report)]


@pytest.mark.parametrize("name", CASES)
def test_a_role_holds_and_takes_what_is_planned(
    name: str, reports: dict[str, list[dict]], recipes: dict[str, str]
) -> None:
    rows = rows_of(name, reports, recipes)
    assert len({row.rank for row in rows}) == len(CASES[name][3])
    for row in rows:
        if row.phase in ("always", "release"):
            assert row.planned == pytest.approx(row.found, rel=1e-3, abs=2048), row
        elif row.phase.endswith(("evaluate", "update")):
            assert abs(row.difference) < 0.05, row


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_what_libraries_keep_stays_of_a_role(name: str, reports: dict[str, list[dict]]) -> None:
    for report in reports[name]:
        kept = sum(size for (_, _, line), size in report["kept_by"] if line.startswith(KEPT))
        assert report["released"] - kept < 4096, report["kept_by"]


def test_each_role_takes_its_own_steps(reports: dict[str, list[dict]]) -> None:
    steps = {
        report["role"]: {phase for phase in report["phases"] if phase.endswith(("evaluate", "update"))}
        for found in reports.values()
        for report in found
    }
    trained = {"evaluate", "first_update", "update"}
    of_critic = {f"critic_{name}" for name in trained}
    assert steps == {
        **{"ref": {"evaluate"}, "reward_model": {"evaluate"}, "actor": trained | of_critic},
        **{"sft": trained, "rm": trained, "dpo": trained},
    }
