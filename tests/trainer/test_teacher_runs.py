"""Complete runs in which a policy learns from a teacher, mostly without rewards, and comes closer to it.

The teacher that judges sampled tokens gets a longer prompt than the policy. If the data has responses, a step uses some of them.
"""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.data.trajectories import GIVEN, REF_PROMPT_IDS, read_trajectories
from tests.fixtures.runs import PPO, assert_same_steps, megarl, on, steps, succeed
from tests.trainer.roles.test_weight_sync import SMALL

ACTOR = "actor_rollout_ref.actor"
WAYS = {
    "sampled": [
        "actor_rollout_ref.ref.megatron={pipeline_model_parallel_size: 2}",
        f"{ACTOR}.kl_loss_type=k2",
        "data.ref_prompt_key=told",
    ],
    "top": [
        "actor_rollout_ref.ref.megatron={pipeline_model_parallel_size: 2}",
        f"{ACTOR}.kl_loss_type=top_k",
        f"{ACTOR}.kl_loss_top_k=8",
        f"{ACTOR}.kl_loss_beta=0",
    ],
    "served": [
        "resource_pools={global: {n_gpus_per_node: 2}, teacher: {n_gpus_per_node: 1}}",
        "trainer.n_gpus_per_node=3",
        "actor_rollout_ref.ref.resource_pool=teacher",
        "actor_rollout_ref.ref.engine={}",
        f"{ACTOR}.kl_loss_type=top_k",
        f"{ACTOR}.kl_loss_top_k=8",
        f"{ACTOR}.kl_loss_beta=0",
    ],
    "whole": [
        f"{ACTOR}.kl_loss_type=full",
        f"{ACTOR}.kl_loss_beta=0.5",
        "actor_rollout_ref.model.lora.rank=8",
        "actor_rollout_ref.rollout.lora_sync=merged",
    ],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with the tokenizer of the task's model and a larger hidden size."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    make_tiny_model(folder, arithmetic_texts(), hidden_size=192, num_layers=2, seed=5)
    return folder


@pytest.mark.parametrize(
    "way", ["sampled", *(pytest.param(way, marks=pytest.mark.slow) for way in ("top", "served", "whole"))]
)
def test_a_policy_comes_closer_to_its_teacher(task: Path, teacher: Path, tmp_path: Path, way: str) -> None:
    """The teacher gives log-probs or its most likely tokens from processes of its own, its most likely tokens as an engine, or full distributions
    in the processes of an actor with adapters."""
    rows = pq.read_table(task / "data" / "train.parquet").to_pylist()
    for row in rows:
        question, answer = row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]
        row["told"] = f"{question} It is {answer}."
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "told.parquet")
    said = succeed(
        "train", *PPO, *on(task, tmp_path), *SMALL, f"data.train_files={tmp_path}/told.parquet", f"actor_rollout_ref.ref.model.path={teacher}", f"{ACTOR}.pg_loss_coef=0",
        f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=1", "trainer.total_training_steps=6", *WAYS[way],
    )  # fmt: skip
    found = steps(tmp_path)
    first, last = found[0]["actor/kl_loss"], found[-1]["actor/kl_loss"]
    assert last < 0.9 * first, (first, last, said)
    for step in found:
        assert step["actor/loss"] == pytest.approx(step["actor/kl_loss"], rel=1e-5)
        assert step["actor/pg_loss"] != step["actor/loss"]
    if way == "served":
        assert "ref-rank0.log" in {path.name for path in (tmp_path / "logs").iterdir()}
        table = read_trajectories(tmp_path / "rollouts" / "step-000006.parquet").to_pylist()
        check_log_probs(teacher, [row["prompt_ids"] for row in table], table)
    if way == "sampled":
        check_judged(teacher, tmp_path / "rollouts" / "step-000001.parquet")


@pytest.mark.slow
def test_a_resumed_run_learns_from_the_same_given_responses(
    task: Path, teacher: Path, tmp_path: Path
) -> None:
    """Some of a step's 8 prompts are drawn: both their responses are the data's. Scores and their metrics cover only the other prompts. The
    teacher is an engine, which has no state."""
    rows = pq.read_table(task / "data" / "train.parquet").to_pylist()
    for row in rows:
        row["told"] = [{"role": "assistant", "content": f"#### {row['reward_model']['ground_truth']}"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "told.parquet")
    truths = {f"told:{number}": row["told"][0]["content"] for number, row in enumerate(rows)}
    run = [
        "train", *PPO, *SMALL, *WAYS["served"], f"{ACTOR}.pg_loss_coef=0.5", f"{ACTOR}.use_kl_loss=true",
        f"actor_rollout_ref.ref.model.path={teacher}", "data.given_response_key=told", "data.on_policy_share=0.6",
        "trainer.total_training_steps=3", "trainer.save_freq=2", f"{ACTOR}.ppo_mini_batch_size=4",
    ]  # fmt: skip
    out = tmp_path / "run"
    succeed(*run, *on(task, out), f"data.train_files={tmp_path}/told.parquet")
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    for number, step in enumerate(steps(out), 1):
        table = read_trajectories(out / "rollouts" / f"step-{number:06d}.parquet")
        there = table.to_pylist()
        given = [row for row in there if row[GIVEN]]
        assert len(given) == 16 * step["given/share"] and len({row["prompt_uid"] for row in there}) == 8
        assert {row["score"] for row in given} == {0.0} and not any(sum(row["advantages"]) for row in given)
        for row in given:
            assert (
                tokenizer.decode(row["response_ids"], skip_special_tokens=True) == truths[row["prompt_uid"]]
            )
            assert row["response_ids"][-1] == tokenizer.eos_token_id
        own = [row["score"] for row in there if not row[GIVEN]]
        assert step["critic/score/mean"] == pytest.approx(sum(own) / len(own))
        assert step["actor/given_kl"] > 0 < step["actor/own_kl"]
    assert {
        len(read_trajectories(path).filter(pc.field(GIVEN))) for path in out.glob("rollouts/*.parquet")
    } != {0}
    again = tmp_path / "again"
    shutil.copytree(out / "checkpoints" / "step-2", again / "checkpoints" / "step-2")
    said = succeed(*run, *on(task, again), f"data.train_files={tmp_path}/told.parquet")
    assert "going on from step 2" in said
    assert_same_steps(out, again, 3)
    for name in ("hf/model.safetensors", "rollouts/step-000003.parquet"):
        assert (out / name).read_bytes() == (again / name).read_bytes()


@pytest.mark.slow
def test_each_row_is_judged_by_its_teacher(task: Path, teacher: Path, tmp_path: Path) -> None:
    """One teacher is a model served by an engine, the other is the initial policy on Megatron ranks, both at the rollouts' temperature. A data
    source without a teacher is refused before the run starts."""
    rows = pq.read_table(task / "data" / "train.parquet").to_pylist()
    for number, row in enumerate(rows):
        row["domain"] = ("plus", "minus", "rest")[number % 3]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "domains.parquet")
    wide = f"{{model: {{path: {teacher}}}, sources: [plus, minus], engine: {{}}, resource_pool: teacher}}"
    temperature, key = 0.8, "actor_rollout_ref.teachers"
    run = [
        "train", *PPO, *SMALL, *WAYS["served"][:2], f"actor_rollout_ref.rollout.temperature={temperature}", f"{ACTOR}.pg_loss_coef=0", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=k2",
        "data.teacher_key=domain", f"{key}.wide={wide}", f"data.train_files={tmp_path}/domains.parquet",
    ]  # fmt: skip
    refused = megarl(*run, *on(task, tmp_path / "none"), run[-1])
    assert refused.returncode and "'domain' is 'rest', and no teacher judges such rows" in refused.stderr
    assert "'plus' (wide), 'minus' (wide)" in refused.stderr
    succeed(*run, *on(task, tmp_path / "run"), run[-1], f"{key}.rest={{}}")
    first, second = steps(tmp_path / "run")
    assert first["actor/teacher_kl/wide"] > 0.01
    assert first["actor/teacher_kl/rest"] == pytest.approx(0, abs=1e-6)
    assert second["actor/teacher_kl/rest"] > 0
    table = read_trajectories(tmp_path / "run" / "rollouts" / "step-000002.parquet")
    assert set(table["teacher"].to_pylist()) == {"wide", "rest"}
    for name, folder in (("wide", teacher), ("rest", task / "model")):
        own = table.filter(pc.field("teacher") == name).to_pylist()
        check_log_probs(folder, [row["prompt_ids"] for row in own], own, temperature)


@torch.no_grad()
def check_log_probs(
    folder: Path, prompts: list[list[int]], rows: list[dict], temperature: float = 1.0
) -> None:
    """The rows' `ref_log_probs` equal those of Hugging Face's model in the folder, given these prompts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, row in zip(prompts, rows, strict=True):
        response = row["response_ids"]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row["ref_log_probs"]), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def check_judged(teacher: Path, path: Path) -> None:
    """The teacher's log-probs equal those of Hugging Face's model given the teacher's prompt, and differ from those given the policy's."""
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)

    def judged(prompt: list[int], response: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]

    for row in read_trajectories(path).to_pylist()[::3]:
        prompt, told, response = row["prompt_ids"], row[REF_PROMPT_IDS], row["response_ids"]
        assert told != prompt
        found = torch.tensor(row["ref_log_probs"])
        torch.testing.assert_close(found, judged(told, response), rtol=1e-4, atol=1e-4)
        assert (found - judged(prompt, response)).abs().max() > 1e-3
