"""Complete runs of every family: after the last update the engines give the same answers as transformers with the
exported model.

A run takes about a minute. Two always run; `pytest --slow` runs the others, too.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.data.routing import ROUTED_EXPERTS
from megarl.data.trajectories import read_trajectories
from megarl.models.config import QWEN_HYBRIDS
from tests.fixtures.indexers import CHOOSING, choose_alike
from tests.fixtures.runs import PPO, on, steps, succeed

ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
RATE = 0.01
REPLAY, RECORDED = (f"actor_rollout_ref.actor.router_replay={mode}" for mode in ("rollout", "trainer"))
MTP = "actor_rollout_ref.model.mtp=train"
INDEXER = "actor_rollout_ref.model.indexer=train"
GRPO = [
    "critic=null",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.use_kl_loss=true",
    f"{ROLLOUT}.n=2",
]
# A random model's answers are never right; this reward gives them different scores, which advantages need.
REWARD = "def compute_score(solution_str, **rest):\n    return sum(map(ord, solution_str)) % 7 / 7\n"


@dataclass(frozen=True)
class Case:
    """A family, and the devices, layouts and sync settings of its run."""

    family: str
    layers: int
    overrides: tuple[str, ...]
    num_mtp_layers: int = 0
    vision: bool = False
    fields: dict[str, Any] = field(default_factory=dict)


CASES = [
    # a critic with experts sharded over data parallel ranks, unequal pipeline stages, point-to-point weight sync, a kept MTP layer,
    # replayed routing, router biases that balance the load, a router z-loss
    Case(
        "deepseek_v3", 3,
        (
            "trainer.n_gpus_per_node=4", f"{ACTOR}.expert_model_parallel_size=2",
            f"{ACTOR}.num_layers_in_first_pipeline_stage=2", "critic.megatron.expert_model_parallel_size=2",
            "critic.megatron.num_layers_in_last_pipeline_stage=2", f"{ROLLOUT}.expert_parallel_size=2",
            f"{ROLLOUT}.sync_transport=p2p", "actor_rollout_ref.model.mtp=keep", REPLAY,
            f"actor_rollout_ref.actor.expert_bias_update_rate={RATE}", "actor_rollout_ref.actor.router_z_loss_coef=0.001",
        ),
        num_mtp_layers=1,
    ),
    # a trained MTP layer; weights, gradients, optimizer states and caches offloaded while not in use; data parallel attention in the engine
    Case(
        "glm4_moe", 2,
        (
            *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.pipeline_model_parallel_size=1",
            f"{ACTOR}.expert_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2",
            f"{ROLLOUT}.attention_data_parallel_size=2", f"{ROLLOUT}.data_parallel_lm_head=true",
            f"{ROLLOUT}.free_cache_engine=true", f"{ACTOR}.param_offload=true", f"{ACTOR}.grad_offload=true",
            f"{ACTOR}.optimizer_offload=true", "algorithm.rollout_correction.rollout_is=token",
            RECORDED, MTP,
        ),
        num_mtp_layers=1,
    ),
    # experts sharded over data parallel ranks, two engines
    Case(
        "qwen3_moe", 2,
        (
            *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.tensor_model_parallel_size=1",
            f"{ACTOR}.pipeline_model_parallel_size=1", f"{ACTOR}.expert_model_parallel_size=2",
            f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.num_engines=2",
        ),
    ),
    # norms across the heads of all tensor parallel ranks, replayed routing
    Case(
        "minimax_m2", 2,
        (
            *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.pipeline_model_parallel_size=1",
            f"{ACTOR}.expert_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2", REPLAY,
        ),
    ),
    # gated delta nets sharded over tensor parallel ranks, a trained MTP layer, replayed routing
    Case(
        "qwen3_next", 4,
        (
            *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.pipeline_model_parallel_size=1",
            f"{ACTOR}.expert_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2", REPLAY, MTP,
        ),
        num_mtp_layers=1,
    ),
    # gated delta nets and gated attention without experts, over pipeline stages, in a model with a vision tower
    Case(
        "qwen3_5", 4,
        (
            *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.tensor_model_parallel_size=1",
            f"{ACTOR}.pipeline_model_parallel_size=2", MTP,
        ),
        num_mtp_layers=1, vision=True,
    ),
    Case(
        "qwen3_5_moe", 4,
        (
            *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.pipeline_model_parallel_size=1",
            f"{ACTOR}.expert_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2", REPLAY,
        ),
    ),
    # attention sinks and sliding windows with heads sharded over tensor parallel ranks, experts with biases, replayed routing
    Case(
        "gpt_oss", 2,
        (
            *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.pipeline_model_parallel_size=1",
            f"{ACTOR}.expert_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2", REPLAY,
        ),
    ),
    # latent attention over pipeline stages
    Case(
        "glm4_moe_lite", 2,
        (
            *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.tensor_model_parallel_size=1",
            f"{ACTOR}.pipeline_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2",
        ),
    ),
    # sparse attention with trained indexers over pipeline stages and in the trained MTP layer; indexers are offloaded with the weights
    Case(
        "deepseek_v32", 3,
        (
            *GRPO, "trainer.n_gpus_per_node=2", f"{ACTOR}.tensor_model_parallel_size=1",
            f"{ACTOR}.pipeline_model_parallel_size=2", f"{ACTOR}.num_layers_in_first_pipeline_stage=2",
            f"{ROLLOUT}.expert_parallel_size=2", f"{ROLLOUT}.free_cache_engine=true", f"{ACTOR}.param_offload=true", MTP,
            INDEXER,
        ),
        num_mtp_layers=1, fields=CHOOSING,
    ),
    # the second of three layers reuses the keys that the first layer's indexer chose; a critic
    Case(
        "glm_moe_dsa", 3,
        (
            "trainer.n_gpus_per_node=2", f"{ACTOR}.pipeline_model_parallel_size=1", f"{ACTOR}.expert_model_parallel_size=2",
            "critic.megatron.pipeline_model_parallel_size=1", f"{ROLLOUT}.expert_parallel_size=2",
            "actor_rollout_ref.model.mtp=keep", REPLAY,
        ),
        num_mtp_layers=1, fields=CHOOSING,
    ),
    # a critic with weights sharded over data parallel ranks (FSDP)
    Case(
        "qwen3", 2,
        (
            "trainer.n_gpus_per_node=2", f"{ACTOR}.tensor_model_parallel_size=1",
            "critic.megatron.pipeline_model_parallel_size=1", "critic.megatron.tensor_model_parallel_size=1",
            "critic.megatron.fsdp=optim_grads_params",
        ),
    ),
]  # fmt: skip
ALWAYS = ("deepseek_v3",)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.family, marks=() if case.family in ALWAYS else pytest.mark.slow)
        for case in CASES
    ],
)
def test_engines_answer_as_transformers_with_the_trained_model(case, task, tmp_path):
    model = make_tiny_model(
        tmp_path / "model", arithmetic_texts(), family=case.family, hidden_size=64, ffn_hidden_size=128,
        num_layers=case.layers, num_mtp_layers=case.num_mtp_layers, vision=case.vision,
        fields={"initializer_range": 0.2, **case.fields},
    )  # fmt: skip
    (tmp_path / "reward.py").write_text(REWARD)
    out = tmp_path / "run"
    succeed(
        "train", *PPO, *on(task, out), f"actor_rollout_ref.model.path={model}",
        f"custom_reward_function.path={tmp_path}/reward.py", "trainer.total_training_steps=2",
        "trainer.test_freq=2", "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0", *case.overrides,
    )  # fmt: skip
    replays = bool({REPLAY, RECORDED} & {*case.overrides})
    for step in steps(out):
        assert (step["actor/ratio_mean"], step["actor/ppo_kl"], step["actor/pg_clipfrac"]) == (1.0, 0.0, 0.0)
        # Gated delta nets differ more by rounding: an engine computes token by token, the trainer chunk by chunk.
        assert step["training/rollout_log_prob_diff_max"] < (3e-4 if case.family in QWEN_HYBRIDS else 2e-5)
        # In float32 the engine, the old log-probs and the update would choose the same experts even without replay.
        assert step.get("actor/routing_changed") == (0.0 if replays else None)
        by_layer = {key: value for key, value in step.items() if key.startswith("actor/expert_violation/")}
        assert bool(by_layer) == (case.family not in ("qwen3", "qwen3_5"))
        assert not by_layer or max(by_layer.values()) == step["actor/expert_violation_max"] > 0
        # The mean over layers of the squared log-sum-exp, which for a uniform router of 8 experts is at least log(8) squared.
        assert step.get("actor/router_z_loss", 0.0) == 0.0 or step["actor/router_z_loss"] > 1.0
        assert ("actor/router_z_loss" in step) == (case.family == "deepseek_v3")
        predicts = MTP in case.overrides
        assert ("actor/mtp_loss" in step) == predicts
        if predicts:  # a random model's loss with 512 tokens
            assert 4.0 < step["actor/mtp_loss"] < 9.0
        assert ("actor/indexer_loss" in step) == (INDEXER in case.overrides)
    kept = read_trajectories(out / "rollouts" / "step-000001.parquet")
    assert (ROUTED_EXPERTS in kept.column_names) == replays
    moves = case.family == "deepseek_v3"
    assert_trained(model, out / "hf", None if predicts else case.layers, moves, INDEXER in case.overrides)
    if moves:
        assert_biases_moved(model, out / "hf", case.layers)
    answers = read_trajectories(out / "rollouts" / "val-000002.parquet")
    assert set(answers["weight_version"].to_pylist()) == {3}
    assert greedy_differences(out / "hf", answers) == (0, pytest.approx(0.0, abs=1e-4))
    different, _ = greedy_differences(model, answers)
    assert different > 0  # the answers come from the trained model


def assert_biases_moved(before: Path, after: Path, layers: int) -> None:
    """Router biases moved by multiples of the update rate, also in the engines, whose answers equal the exported model's."""
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    biases = [
        name for name in new if name.endswith("e_score_correction_bias") and f"layers.{layers}." not in name
    ]
    assert biases
    for name in biases:
        steps_taken = (new[name].float() - old[name].float()) / RATE
        assert steps_taken.any() and torch.allclose(steps_taken, steps_taken.round(), atol=1e-2), steps_taken


def assert_trained(before: Path, after: Path, layers: int | None, biases_move: bool, indexers: bool) -> None:
    """Every weight moved, except a vision tower, the MTP layer `layers` if it is not trained, and router biases and indexers unless
    `biases_move` and `indexers` are set."""
    old, new = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (before, after)
    )
    assert old.keys() == new.keys()
    same = {name for name in old if torch.equal(old[name], new[name])}
    repeated = (f"layers.{layers}.embed_tokens.weight", f"layers.{layers}.shared_head.head.weight")
    predicting = (f"model.layers.{layers}.", "mtp.")
    assert same == {
        name
        for name in old
        if name.startswith("model.visual.")
        or (name.endswith("e_score_correction_bias") and not biases_move)
        or (".indexer." in name and not indexers)
        or (layers is not None and name.startswith(predicting) and not name.endswith(repeated))
    }


@torch.no_grad()
def greedy_differences(folder, answers):
    """(the number of tokens that are not transformers' greedy choice, the largest difference of a log-prob) over all answers."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    choose_alike(model)
    different, largest = 0, 0.0
    columns = (answers[name].to_pylist() for name in ("prompt_ids", "response_ids", "rollout_log_probs"))
    for prompt, response, log_probs in zip(*columns, strict=True):
        expected = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        chosen = torch.tensor(response)
        different += int((expected.argmax(-1) != chosen).sum())
        found = expected.gather(1, chosen[:, None])[:, 0] - torch.tensor(log_probs)
        largest = max(largest, float(found.abs().max()))
    return different, largest
