"""A real run whose trajectories are sessions of agents, in a mode that interrupts them: what is trained on is what the engine saw, once."""

import itertools
import json

import numpy as np
import pytest

from megarl.data.sessions import by_request
from megarl.data.trajectories import environment_notes, ragged, read_trajectories
from tests.fixtures.runs import PPO, on, steps, succeed

AGENT = """
import json, os, sys, urllib.request

def ask(*messages):
    body = {"model": "tiny", "messages": messages, "max_tokens": 6}
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}
    request = urllib.request.Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode(), headers)
    answer = json.load(urllib.request.urlopen(request))
    return {"role": "assistant", "content": answer["content"]}

def play(task):
    user, sample = task["messages"][-1], task["uid"].rpartition("/")[2]
    first = ask(user)
    ask(user, first, {"role": "user", "content": "Sure?"})
    if sample == "1":
        ask(user, first, {"role": "user", "content": "Really?"})
    if sample == "3":
        sys.exit("broken")
    return float(len(json.dumps(first)) % 3)
"""
PROMPTS, SAMPLES, STEPS = 4, 4, 3


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agent.py").write_text(AGENT)
    rollout = "actor_rollout_ref.rollout"
    succeed(
        "train", *PPO, *on(task, folder / "out"), "critic=null", "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false", "trainer.n_gpus_per_node=1", "trainer.mode=partial_rollouts",
        f"data.train_batch_size={PROMPTS}", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "data.max_prompt_length=64", "data.max_response_length=64", "data.val_max_samples=2", "trainer.test_freq=3",
        "actor_rollout_ref.actor.optim.lr=1e-3", f"trainer.total_training_steps={STEPS}",
        *(f"actor_rollout_ref.actor.megatron.{name}_model_parallel_size=1" for name in ("tensor", "pipeline")),
        f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.n={SAMPLES}", f"{rollout}.gateway.enable=true",
        f"{rollout}.gateway.agent={folder}/agent.py:play", f"{rollout}.gateway.models=[tiny]",
        f"{rollout}.gateway.concurrency=8", timeout=600,
    )  # fmt: skip
    out = folder / "out"
    files = [f"step-{number:06d}" for number in range(1, STEPS + 1)]
    return out, {
        name: read_trajectories(out / f"rollouts/{name}.parquet") for name in [*files, f"val-{STEPS:06d}"]
    }


def batches(run):
    return [table for name, table in run[1].items() if name.startswith("step")]


def test_a_step_has_its_sessions_and_each_is_trained_on_once(run):
    seen = []
    for batch in batches(run):
        sessions = by_request(batch)
        assert len(sessions) == PROMPTS * SAMPLES
        seen += sessions
        for uid, own in sessions.items():
            assert own.num_rows == (2 if uid.endswith("/1") else 1)
            assert len(set(own["score"].to_pylist())) == 1
            turns = {note.numbers["num_turns"] for note in environment_notes(own)}
            assert turns == {3.0 if uid.endswith("/1") else 2.0}
    assert len(set(seen)) == len(seen)


def test_the_trainers_log_probs_are_the_engines(run):
    """Of trajectories whose weights did not change under way; each turn's own tokens alone are live."""
    compared = 0
    for batch, metrics in zip(batches(run), steps(run[0]), strict=True):
        mask, offsets = ragged(batch, "response_mask")
        engine, trainer = ragged(batch, "rollout_log_probs")[0], ragged(batch, "old_log_probs")[0]
        first, last = (batch[name].to_numpy() for name in ("weight_version", "last_weight_version"))
        current = np.repeat((first == last) & (first == metrics["step"]), np.diff(offsets)) & mask
        np.testing.assert_allclose(trainer[current], engine[current], atol=1e-4)
        compared += current.sum()
    assert compared > 64


def test_sessions_are_compared_with_those_of_their_prompt(run):
    """GRPO by hand: a failed session takes no part, and all paths of a session have its advantage."""
    for batch in batches(run):
        mask, offsets = ragged(batch, "response_mask")
        advantages = ragged(batch, "advantages")[0]
        of_row = [
            set(advantages[start:end][mask[start:end]].tolist()) for start, end in itertools.pairwise(offsets)
        ]
        uids, row = (
            batch["uid"].to_pylist(),
            {uid: number for number, uid in enumerate(batch["uid"].to_pylist())},
        )
        for prompt in set(batch["prompt_uid"].to_pylist()):
            scores = np.array([batch["score"][row[f"{prompt}/{sample}.0"]].as_py() for sample in range(3)])
            assert not of_row[row[f"{prompt}/3.0"]]
            expected = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
            for sample in range(3):
                for uid in (f"{prompt}/{sample}.0", f"{prompt}/{sample}.1"):
                    if uid in uids:
                        (found,) = of_row[row[uid]]
                        assert found == pytest.approx(expected[sample], abs=1e-3)


def test_a_failed_agent_is_reported_once_with_its_log(run):
    out, _ = run
    lines = [json.loads(line) for line in (out / "reward_errors.jsonl").read_text().splitlines()]
    assert all("exit code 1" in line["error"] and "broken" in line["error"] for line in lines)
    kept = {file.stem.rpartition("-")[2] for file in (out / "agents").iterdir()}
    assert kept == {"3"}
    for metrics in steps(out):
        assert metrics["reward/failed"] == PROMPTS and metrics["reward/num_turns"] == 2.25


def test_agents_answer_held_out_prompts(run):
    out, tables = run
    table = tables[f"val-{STEPS:06d}"]
    assert len(by_request(table)) == table.num_rows == 2
    assert steps(out)[-1]["val/score/mean"] == pytest.approx(np.mean(table["score"].to_numpy()))
