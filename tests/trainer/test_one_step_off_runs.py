"""Real runs in which the next step's batch is collected while the models learn from this one."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.checkpoints import find_damage, read_checkpoint, steps_in
from megarl.data.trajectories import TRAJECTORY_SCHEMA, ragged, read_trajectories
from megarl.report.timeline import RecordedTimeline, read_timeline
from megarl.trainer.stages.step_scores import read_step_scores
from megarl.util.spans import Span
from tests.fixtures.runs import (
    PPO,
    REPOSITORY,
    assert_same_steps,
    command,
    environment,
    megarl,
    on,
    steps,
    succeed,
)
from tests.trainer.test_reward_model_runs import judged_steps
from tests.waiting import wait_for

# Dynamic sampling makes the number of prompts of a step depend on scores; the sampler depends on scores, too.
RECIPE = [
    "recipes/one_step_off_cpu.yaml", "data.train_batch_size=4", "data.gen_batch_size=6", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "data.val_files=null", "trainer.test_freq=-1",
    "trainer.total_training_steps=4", "trainer.save_freq=1", "trainer.save_hf=true", "data.sampler.name=worst_first",
    "algorithm.filter_groups={enable: true, max_num_gen_batches: 0}",
]  # fmt: skip
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 2)
"""
PLUGIN = """
import numpy as np
from megarl.data.samplers import Sampler, register_sampler


@register_sampler("worst_first")
class WorstFirst(Sampler):
    def __init__(self, config):
        super().__init__(config)
        self.scores = {}

    def order(self, table, seed, epoch):
        return np.argsort([self.scores.get(uid, 0.5) for uid in table["uid"].to_pylist()], kind="stable")

    def update(self, uids, scores):
        self.scores |= dict(zip(uids, map(float, scores)))

    def state_dict(self):
        return dict(self.scores)

    def load_state_dict(self, state):
        self.scores = dict(state)
"""
# A plugin that kills the actor at its second update, once.
BLOW = """
import os, signal, sys
from pathlib import Path

worker = sys.modules.get("megarl.trainer.workers.actor")
if worker is not None:
    as_it_is, calls = worker.ActorWorker.update_policy, []

    def update_policy(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            try:
                Path(__file__).with_name("blow").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            except FileNotFoundError:
                pass
        return as_it_is(self, *args, **kwargs)

    worker.ActorWorker.update_policy = update_policy
"""


@dataclass(frozen=True)
class FinishedRun:
    """A run without faults: its folder, and its arguments except the folder."""

    folder: Path
    arguments: list[str]

    def is_that_of(self, folder: Path, first: int) -> None:
        """The run in `folder` has the same steps from `first` on, the same trajectories in them, and the same final weights."""
        assert_same_steps(self.folder, folder, first)
        names = [f"rollouts/step-{step:06d}.parquet" for step in range(first, 5)]
        for name in (*names, "hf/model.safetensors"):
            assert (self.folder / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "reward.py").write_text(REWARD)
    (folder / "sampler.py").write_text(PLUGIN)
    arguments = [
        *RECIPE, f"data.train_files={task}/data/train.parquet", f"actor_rollout_ref.model.path={task}/model",
        f"custom_reward_function.path={folder}/reward.py", f"plugins=[{folder}/sampler.py]",
    ]  # fmt: skip
    succeed("train", *arguments, f"trainer.default_local_dir={folder}/run")
    return FinishedRun(folder / "run", arguments)


def spans(recorded: RecordedTimeline, name: str) -> list[Span]:
    """The engine's spans of this name."""
    return [
        span
        for track in recorded.tracks
        if track.role == "rollout"
        for span in track.spans
        if span.name == name
    ]


def trajectories(whole: FinishedRun, step: int):
    return read_trajectories(whole.folder / f"rollouts/step-{step:06d}.parquet")


def test_a_batch_is_of_the_weights_before_the_last_update(whole: FinishedRun, task: Path) -> None:
    """Checked with transformers: batch k was sampled from the weights after k - 2 updates, batch 1 from the initial weights."""
    versions = [set(trajectories(whole, step)["weight_version"].to_pylist()) for step in (1, 2, 3, 4)]
    assert versions == [{1}, {1}, {2}, {3}]
    assert [step["staleness/mean"] for step in steps(whole.folder)] == [0.0, 1.0, 1.0, 1.0]
    assert [step["staleness/max"] for step in steps(whole.folder)] == [0.0, 1.0, 1.0, 1.0]
    models = [task / "model", *(whole.folder / f"checkpoints/step-{step}/hf" for step in (1, 2, 3))]
    policies = [AutoModelForCausalLM.from_pretrained(folder) for folder in models]
    for step, sampled_from in ((1, 0), (2, 0), (3, 1), (4, 2)):
        table, apart = trajectories(whole, step), np.zeros(len(policies))
        for row in range(table.num_rows):
            prompt, response = (table[f"{name}_ids"][row].as_py() for name in ("prompt", "response"))
            for number, policy in enumerate(policies):
                with torch.no_grad():
                    logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
                found = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()
                apart[number] = max(
                    apart[number], np.abs(found - table["rollout_log_probs"][row].as_py()).max()
                )
        assert apart.argmin() == sampled_from and apart[sampled_from] < 1e-4 < 100 * np.delete(apart, sampled_from).min(), apart  # fmt: skip


def test_the_correction_sees_stale_trajectories(whole: FinishedRun) -> None:
    first, *others = steps(whole.folder)
    assert first["training/rollout_log_prob_diff_max"] < 1e-4
    for step in others:
        assert step["training/rollout_log_prob_diff_max"] > 1e-2
        assert step["rollout_corr/is_weight_max"] > 1.0 > step["rollout_corr/is_weight_min"]


def test_its_seconds_are_told_apart(whole: FinishedRun) -> None:
    *ahead, last = steps(whole.folder)
    for step in ahead:
        collected, waited = step["timing_s/ahead"], step["timing_s/ahead_wait"]
        assert step["timing_s/ahead_overlap"] == pytest.approx(max(0.0, collected - waited))
        assert 0 < step["timing_s/ahead/generate"] < collected
    assert "timing_s/generate" in ahead[0] and "timing_s/generate" not in ahead[1]
    assert not any(name.startswith("timing_s/ahead") for name in last)


def test_the_timeline_shows_collecting_and_learning_at_once(whole: FinishedRun) -> None:
    """While the actor learns from batch k, the engine answers for batch k + 1: neither waits for the other.

    In at least one step the answers are requested before learning ends, and learning begins before they and their scores have
    arrived; not in all, since learning and an answer take less than 0.1 s here, and so may a call on a busy machine.
    """
    found = read_timeline(whole.folder)
    tracks = {(track.role, track.name): track.spans for track in found.tracks}
    ahead = [span for span in tracks["controller", "collect-ahead"] if span.name == "ahead"]
    assert [(span.facts["step"], span.facts["for_step"]) for span in ahead] == [(1, 2), (2, 3), (3, 4)]
    at_once = []
    for span in ahead:
        answers = [
            one
            for one in tracks["rollout", "rank 0"]
            if one.name == "land" and span.begin < one.begin < span.end
        ]
        assert answers and all(one.facts["step"] == span.facts["step"] for one in answers)
        learns = [
            one
            for one in tracks["actor", "rank 0"]
            if one.name in ("compute_log_probs", "update_policy") and one.facts["step"] == span.facts["step"]
        ]
        assert [one.name for one in learns] == ["compute_log_probs", "update_policy"]
        asked = min(one.begin for one in answers)
        at_once.append(asked < learns[-1].end and learns[0].begin < span.end)
    assert any(at_once)


def test_a_checkpoint_has_the_next_batch(whole: FinishedRun) -> None:
    for step in (1, 2, 3):
        folder = whole.folder / f"checkpoints/step-{step}"
        assert find_damage(read_checkpoint(folder)) == []
        assert "ahead/batch.arrow" in read_checkpoint(folder).manifest.files
        with pa.OSFile(str(folder / "ahead/batch.arrow")) as file:
            saved, trained = pa.ipc.open_file(file).read_all(), trajectories(whole, step + 1)
        names = [name for name in TRAJECTORY_SCHEMA.names if name != "environment_score"]  # is NaN
        assert saved.select([*names, "score"]).equals(trained.select([*names, "score"]))
    last = whole.folder / "checkpoints/step-4/ahead"
    assert [path.name for path in last.iterdir()] == ["state.json"]


@pytest.mark.slow
def test_a_run_goes_on_with_the_batch_of_its_checkpoint(whole: FinishedRun, tmp_path: Path) -> None:
    """The run resumed from step 2 has the same metrics, trajectories and weights. It cannot resume in another mode."""
    shutil.copytree(whole.folder / "checkpoints/step-2", tmp_path / "checkpoints/step-2")
    other = megarl(
        "train", *whole.arguments, f"trainer.default_local_dir={tmp_path}", "trainer.mode=sync",
        "algorithm.rollout_correction.rollout_is=null",
    )  # fmt: skip
    assert other.returncode == 2
    assert "trainer.mode was 'one_step_off', is 'sync' now: " in other.stderr
    printed = succeed("train", *whole.arguments, f"trainer.default_local_dir={tmp_path}")
    assert "going on from step 2" in printed
    whole.is_that_of(tmp_path, 3)


@pytest.fixture
def started(whole: FinishedRun, tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process with the same run, after its first checkpoint."""
    with open(tmp_path / "stdout", "w") as out:
        process = subprocess.Popen(
            command("train", *whole.arguments, f"trainer.default_local_dir={tmp_path}/run"),
            cwd=REPOSITORY, env=environment(), stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def has_saved() -> bool:
        assert process.poll() is None, (tmp_path / "stdout").read_text()
        return "checkpoint: " in (tmp_path / "stdout").read_text()

    wait_for(has_saved, 400, (tmp_path / "stdout").read_text)
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_is_ended_in_the_middle_and_goes_on(
    whole: FinishedRun, tmp_path: Path, started: subprocess.Popen, number: signal.Signals
) -> None:
    os.kill(started.pid, number)
    code = started.wait(200)
    saved = steps_in(tmp_path / "run/checkpoints")
    logged = [step["step"] for step in steps(tmp_path / "run")]
    assert code == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    if number == signal.SIGTERM:
        assert saved[-1] == logged[-1] < 4
    before = read_timeline(tmp_path / "run")
    succeed("train", *whole.arguments, f"trainer.default_local_dir={tmp_path}/run")
    whole.is_that_of(tmp_path / "run", 1)
    after = read_timeline(tmp_path / "run")
    assert before.windows and before.windows.keys() < after.windows.keys() == {1, 2, 3, 4}
    # The engine's spans. A killed run may lack the spans of its last step.
    starts = len(spans(before, "start"))
    assert starts == 1 or (starts == 0 and number == signal.SIGKILL)
    assert len(spans(after, "start")) == starts + 1


@pytest.mark.slow
def test_an_actor_that_dies_while_it_learns(whole: FinishedRun, tmp_path: Path) -> None:
    """The run restarts from the checkpoint, with the batch in it."""
    (tmp_path / "blow.py").write_text(BLOW)
    (tmp_path / "blow").touch()
    plugins = next(argument for argument in whole.arguments if argument.startswith("plugins="))
    ended = megarl(
        "train", *whole.arguments, f"trainer.default_local_dir={tmp_path}/run", "trainer.max_restarts=1",
        plugins.replace("]", f", {tmp_path}/blow.py]"),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed = ended.stdout
    assert not (tmp_path / "blow").exists()
    assert "starting again: 1 of trainer.max_restarts=1" in printed and "going on from step 1" in printed
    (report,) = (tmp_path / "run" / "failures").iterdir()
    text = report.read_text()
    # The next batch may have arrived by then; in tests/faults/test_one_step_off.py it never has.
    assert "\nrole: actor\nrank: 0\n" in text and "\nphase: step / update\nmeanwhile: step" in text
    whole.is_that_of(tmp_path / "run", 1)


@pytest.mark.slow
def test_ppo_with_a_process_reward_model_in_the_engines_pool(task: Path, tmp_path: Path) -> None:
    """Collecting and learning both move device memory at once; batches collected ahead have the reward model's step scores, here for words."""
    make_tiny_model(
        tmp_path / "judge", arithmetic_texts(40), vocab_size=320, hidden_size=32, ffn_hidden_size=48, num_layers=2,
        family="llama", head="step_scores", seed=7,
    )  # fmt: skip
    (tmp_path / "reward.py").write_text(REWARD)
    succeed(
        "train", *PPO, *on(task, tmp_path / "run"), "trainer.total_training_steps=3", "trainer.test_freq=2",
        "trainer.mode=one_step_off", "algorithm.rollout_correction.bypass_mode=true", "trainer.n_gpus_per_node=3",
        "resource_pools={main: {n_gpus_per_node: 2}, others: {n_gpus_per_node: 1}}", "actor_rollout_ref.actor.resource_pool=main",
        "actor_rollout_ref.rollout.resource_pool=others", "reward_model.resource_pool=others",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1", "critic.megatron.pipeline_model_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.free_cache_engine=true",
        "reward_model.enable=true", f"reward_model.model.path={tmp_path}/judge", "reward_model.rule_weight=0.5",
        f"reward_model.model.input_tokenizer={task}/model", "data.return_raw_input_ids=true",
        "reward_model.micro_batch_size_per_gpu=3", "reward_model.max_length=128", "reward_model.megatron.param_offload=true",
        "reward_model.step_separator=' '", "reward_model.weight=2",
        *(f"{role}.megatron.{part}_offload=true" for role in ("actor_rollout_ref.actor", "critic")
          for part in ("param", "grad", "optimizer")),
        "actor_rollout_ref.actor.optim.lr=1e-2", f"custom_reward_function.path={tmp_path}/reward.py",
    )  # fmt: skip
    for number, version in ((1, 1), (2, 1), (3, 2)):
        batch = read_trajectories(tmp_path / f"run/rollouts/step-{number:06d}.parquet")
        assert set(batch["weight_version"].to_pylist()) == {version}
        expected, rules = judged_steps(tmp_path, task, batch)
        np.testing.assert_array_equal(batch["score"].to_numpy(), 0.5 * rules)
        found = [[score for _, score in own] for own in read_step_scores(batch)]
        assert [len(own) for own in found] == [len(own) for own in expected]
        np.testing.assert_allclose(np.concatenate(found), 2 * np.concatenate(expected), rtol=0, atol=1e-4)
        rewards, offsets = ragged(batch, "token_level_rewards")
        sums = np.array([own.sum() for own in np.split(rewards, offsets[1:-1])])
        expected_sums = 0.5 * rules + [2 * sum(own) for own in expected]
        np.testing.assert_allclose(sums, expected_sums, rtol=0, atol=0.02)  # minus a KL of some 0.001 nats
    _, second, third = steps(tmp_path / "run")
    assert 0 < second["reward/model_step_score"] < 1 <= second["reward/model_num_steps"]
    assert (
        second["memory/generate/reward_model_weights"] == 0 == second["memory/score_model/rollout_kv_cache"]
    )
    assert second["memory/score_model/reward_model_weights"] > 0 < second["memory/generate/rollout_kv_cache"]
    assert (
        second["memory/evaluate_models/actor_optimizer"] == 0 < second["memory/update_actor/actor_optimizer"]
    )
    assert second["timing_s/ahead/score_model"] > 0 and second["val/score/mean"] != 0
    # The old log-probs are the engine's; the policy of the first mini-batch is already one step newer.
    assert third["training/rollout_log_prob_diff_mean"] > 1e-4
