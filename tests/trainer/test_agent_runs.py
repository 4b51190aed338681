"""Real runs whose trajectories are sessions of agents: training uses exactly the tokens of the engine, and each session once.

The first run has a mode that interrupts sessions, and its engine is killed in the middle of some.
"""

import itertools
import json
import shutil

import numpy as np
import pytest

from megarl.data.sessions import by_request
from megarl.data.trajectories import environment_notes, ragged, read_trajectories
from tests.fixtures.runs import PPO, on, steps, succeed

# If the file `kill` exists, the agent kills the engine once some sessions have ended.
AGENT = """
import json, os, sys, time, urllib.request
from pathlib import Path

ENDED, KILL = Path(__file__).with_name("ended"), Path(__file__).with_name("kill")

def kill_the_engine():
    import psutil
    if ENDED.stat().st_size < 5:
        return
    try:
        KILL.unlink()
    except FileNotFoundError:
        return
    for parent in psutil.Process().parents():
        for child in parent.children():
            try:
                engine = child.status() != "zombie" and "sglang::scheduler" in " ".join(child.cmdline())
            except psutil.NoSuchProcess:  # another agent, which has ended
                continue
            if engine:
                child.kill()
                time.sleep(1000)
    raise RuntimeError("no engine")

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
    kill_the_engine()
    if sample == "1":
        ask(user, first, {"role": "user", "content": "Really?"})
    with ENDED.open("a") as file:
        file.write("x")
    if sample == "3":
        sys.exit("broken")
    return float(len(json.dumps(first)) % 3)
"""
pytestmark = pytest.mark.timeout(900)  # an engine is restarted during a run
PROMPTS, SAMPLES, STEPS = 4, 4, 3


def write_agent(folder, kill):
    (folder / "agent.py").write_text(AGENT)
    for name in ("ended", "kill")[: 2 if kill else 1]:
        (folder / name).touch()


def overrides(folder):
    """Settings for the agent in this folder, and for steps with few sessions."""
    rollout = "actor_rollout_ref.rollout"
    return [
        "critic=null", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false",
        f"data.train_batch_size={PROMPTS}", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "data.max_prompt_length=64", "data.max_response_length=64", "actor_rollout_ref.actor.optim.lr=1e-3",
        *(f"actor_rollout_ref.actor.megatron.{name}_model_parallel_size=1" for name in ("tensor", "pipeline")),
        f"{rollout}.tensor_model_parallel_size=1", f"{rollout}.n={SAMPLES}", f"{rollout}.gateway.enable=true",
        f"{rollout}.gateway.agent={folder}/agent.py:play", f"{rollout}.gateway.models=[tiny]",
        f"{rollout}.gateway.preload=[urllib.request,psutil]", f"{rollout}.gateway.concurrency=8",
    ]  # fmt: skip


def arguments(task, folder, out):
    return [
        "train", *PPO, *on(task, out), *overrides(folder), "trainer.n_gpus_per_node=1", "trainer.mode=partial_rollouts",
        "data.val_max_samples=2", "trainer.test_freq=3", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    write_agent(folder, kill=True)
    out = folder / "out"
    succeed(*arguments(task, folder, out), timeout=600)
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


def test_an_engine_was_killed_and_its_sessions_began_anew(run):
    """All other tests check the results of this run."""
    out, _ = run
    assert not (out.parent / "kill").exists()
    (report,) = (out / "failures").iterdir()
    assert "\nrole: rollout\nrank: 0\n" in report.read_text()


def test_the_trainers_log_probs_are_the_engines(run):
    """For trajectories whose weights did not change in the middle; only the policy's tokens of each turn are live."""
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
    """GRPO by hand: failed sessions are left out, and all paths of a session have the session's advantage."""
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


@pytest.mark.slow
def test_a_run_goes_on_with_sessions_that_it_has_not_trained_on(run, task, tmp_path):
    """Resume from the checkpoint of step 2, as if the run had ended in step 3."""
    out, _ = run
    shutil.copytree(out / "checkpoints/step-2", tmp_path / "checkpoints/step-2")
    printed = succeed(*arguments(task, out.parent, tmp_path), timeout=600)
    assert "going on from step 2" in printed
    assert [path.name for path in (tmp_path / "rollouts").glob("step-*")] == ["step-000003.parquet"]
    found = by_request(read_trajectories(tmp_path / "rollouts/step-000003.parquet"))
    before = {uid for batch in batches(run)[:2] for uid in by_request(batch)}
    assert len(found) == PROMPTS * SAMPLES and not before & set(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
def test_agents_play_while_the_models_learn(task, tmp_path, mode):
    """In both modes an engine is killed during the run."""
    write_agent(tmp_path, kill=True)
    succeed(
        "train", f"recipes/{mode}_cpu.yaml", *on(task, tmp_path / "out"), *overrides(tmp_path), "trainer.test_freq=-1",
        "data.val_files=null", f"trainer.total_training_steps={STEPS}", timeout=800,
    )  # fmt: skip
    assert not (tmp_path / "kill").exists()
    seen = []
    for number in range(1, STEPS + 1):
        sessions = by_request(read_trajectories(tmp_path / f"out/rollouts/step-{number:06d}.parquet"))
        assert len(sessions) == PROMPTS * SAMPLES
        assert all(own.num_rows == (2 if uid.endswith("/1") else 1) for uid, own in sessions.items())
        seen += sessions
    assert len(set(seen)) == len(seen)
    assert max(metrics["staleness/max"] for metrics in steps(tmp_path / "out")) == 1
