"""A complete run with a reward model and with separate pools."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.data.trajectories import read_trajectories
from tests.fixtures.runs import PPO, on, steps, succeed

REWARD = "def compute_score(solution_str, **rest):\n    return len(solution_str) % 2\n"
OFF = 1e-5  # tolerance of a score
POOLS = {"main": 2, "critics": 1, "judges": 1, "engines": 1}


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    """Two steps: actor and reference TP2 on one pool; critic, reward model (another family, tokenizer) and engine each
    on another. The score is the model's plus half of a reward function's."""
    folder = tmp_path_factory.mktemp("rewarded")
    make_tiny_model(
        folder / "judge", arithmetic_texts(40), vocab_size=320, hidden_size=32, ffn_hidden_size=48, num_layers=2,
        family="llama", head="score", seed=7,
    )  # fmt: skip
    (folder / "reward.py").write_text(REWARD)
    printed = succeed(
        "train", *PPO, *on(task, folder / "run"), "trainer.total_training_steps=2", "trainer.test_freq=2",
        "trainer.n_gpus_per_node=5", *(f"resource_pools.{pool}.n_gpus_per_node={n}" for pool, n in POOLS.items()),
        "actor_rollout_ref.actor.resource_pool=main", "critic.resource_pool=critics",
        "actor_rollout_ref.rollout.resource_pool=engines", "reward_model.resource_pool=judges",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
        "critic.megatron.pipeline_model_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.free_cache_engine=true",
        "reward_model.enable=true", f"reward_model.model.path={folder}/judge", "reward_model.rule_weight=0.5",
        f"reward_model.model.input_tokenizer={task}/model", "data.return_raw_input_ids=true",
        "reward_model.micro_batch_size_per_gpu=3", "reward_model.max_length=128",
        "reward_model.megatron.param_offload=true", "actor_rollout_ref.actor.optim.lr=1e-2",
        f"custom_reward_function.path={folder}/reward.py",
    )  # fmt: skip
    return folder, printed


def judged(folder, task, batch):
    """Scores of trajectories by transformers' model and tokenizer, and by the reward function."""
    model = AutoModelForSequenceClassification.from_pretrained(folder / "judge", dtype=torch.float32).eval()
    own, policy = (
        AutoTokenizer.from_pretrained(folder / "judge"),
        AutoTokenizer.from_pretrained(task / "model"),
    )
    models, rules = [], []
    for row in batch.to_pylist():
        answer = policy.decode(row["response_ids"], skip_special_tokens=True)
        chat = [*json.loads(row["messages"]), {"role": "assistant", "content": answer}]
        ids = own(own.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            models.append(model(torch.tensor([ids])).logits.item())
        rules.append(len(answer) % 2)
    return np.array(models), np.array(rules)


def judged_steps(folder, task, batch):
    """Scores of each word of trajectories by transformers' token classifier, in the text of TRL's PRMTrainer, and the reward function's scores."""
    model = AutoModelForTokenClassification.from_pretrained(folder / "judge", dtype=torch.float32).eval()
    own, policy = (
        AutoTokenizer.from_pretrained(folder / "judge"),
        AutoTokenizer.from_pretrained(task / "model"),
    )
    steps, rules = [], []
    for row in batch.to_pylist():
        answer = policy.decode(row["response_ids"], skip_special_tokens=True)
        prompt = own.apply_chat_template(
            json.loads(row["messages"]), tokenize=False, add_generation_prompt=True
        )
        ids, ends = own(prompt)["input_ids"], []
        for word in [word for word in answer.split(" ") if word.strip()] or [answer]:
            ids += own(word)["input_ids"] + own(" ")["input_ids"]
            ends.append(len(ids) - 1)
        with torch.no_grad():
            steps.append(model(torch.tensor([ids])).logits.softmax(-1)[0, ends, 1].tolist())
        rules.append(len(answer) % 2)
    return steps, np.array(rules)


@pytest.mark.parametrize(("name", "rows"), [("step-000001", 8), ("step-000002", 8), ("val-000002", 16)])
def test_scores_are_those_of_model_and_rule(run, task, name, rows):
    folder, _ = run
    batch = read_trajectories(folder / "run" / "rollouts" / f"{name}.parquet")
    models, rules = judged(folder, task, batch)
    assert batch.num_rows == rows
    np.testing.assert_allclose(batch["score"].to_numpy(), models + 0.5 * rules, rtol=0, atol=OFF)
    assert models.std() > 100 * OFF, "the model's scores differ"
    step = steps(folder / "run")[int(name[-1]) - 1]
    prefix = "val/reward" if name.startswith("val") else "reward"
    assert step[f"{prefix}/model"] == pytest.approx(models.mean(), abs=OFF)
    assert step[f"{prefix}/rule"] == pytest.approx(rules.mean()) and step[f"{prefix}/model_text_cut"] == 0


def test_the_reward_model_is_there_for_its_phase_alone(run):
    folder, printed = run
    for step in steps(folder / "run"):
        there = {
            phase: step[f"memory/{phase}/reward_model_weights"]
            for phase in ("sync", "generate", "score_model", "evaluate_models", "update")
        }
        assert there.pop("score_model") > 0 and set(there.values()) == {0.0}
        assert step["memory/score_model/rollout_kv_cache"] == 0 < step["memory/score_model/rollout_weights"]
        assert step["timing_s/score_model"] > 0
    assert "reward model" in printed


def test_every_role_on_devices_of_its_own(run):
    folder, _ = run
    plan = json.loads((folder / "run" / "batch_plan.json").read_text())
    assert {role: plan[role]["pool"] for role in ("actor", "ref", "critic", "reward_model", "rollout")} == {
        "actor": "main", "ref": "main", "critic": "critics", "reward_model": "judges", "rollout": "engines",
    }  # fmt: skip
    assert {path.name for path in (folder / "run" / "logs").iterdir()} >= {
        "actor-rank0.log", "actor-rank1.log", "critic-rank0.log", "reward_model-rank0.log", "rollout-rank0.log",
    }  # fmt: skip
    for step in steps(folder / "run"):
        assert step["actor/ratio_mean"] == 1.0 and step["training/rollout_log_prob_diff_max"] < 1e-4
        assert step["critic/grad_norm"] > 0 and step["actor/grad_norm"] > 0
