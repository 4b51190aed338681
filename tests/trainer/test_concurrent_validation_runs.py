"""Real runs whose validations have engines of their own: training goes on, and each result belongs to the step whose weights it used."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.data.trajectories import read_trajectories
from megarl.trainer.run.export import verify_greedy
from megarl.trainer.run.logger import read_metrics
from tests.fixtures.runs import megarl, steps, succeed

RECIPE = [
    "recipes/quickstart_ppo.yaml", "critic=null", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false",
    "data.train_batch_size=4", "data.val_batch_size=4", "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=2", "trainer.test_freq=2",
    "trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.save_hf=true",
]  # fmt: skip
CONCURRENT = [
    "trainer.eval_mode=concurrent", "actor_rollout_ref.actor.resource_pool=train",
    "resource_pools={train: {n_gpus_per_node: 1}, eval: {n_gpus_per_node: 1}}",
]  # fmt: skip
NUM_PROMPTS = 16
# A validation's scores wait for the end of step `after`; a blocking validation would wait forever. The first score after `kill_from`
# scores kills the engine, once.
REWARD = """
import os, signal, time
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info, run, after=0, kill_from=None):
    if extra_info["split"] == "test":
        while after and f'{{"step": {after}, ' not in Path(run, "metrics.jsonl").read_text():
            time.sleep(0.05)
        seen = Path(run, "seen")
        with seen.open("a") as file:
            file.write("x")
        if kill_from is not None and seen.stat().st_size > kill_from:
            try:
                Path(run, "killed").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                kill(str(Path(run, "logs/eval-rank0.log").resolve()))
    return float(len(solution_str) % 3)


def kill(log):
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.readlink(process / "fd/1") == log:
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            pass
"""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, its arguments except the folder and the reward function's, and its output."""

    folder: Path
    arguments: list[str]
    printed: str

    def answers(self, step: int) -> list[tuple[str, list[int], float]]:
        """The uids, response ids and scores of a validation."""
        table = read_trajectories(self.folder / f"rollouts/val-{step:06d}.parquet")
        return list(zip(*(table[name].to_pylist() for name in ("uid", "response_ids", "score")), strict=True))

    def results(self, step: int) -> dict[str, float]:
        (found,) = (row for row in read_metrics(self.folder) if row["step"] == step)
        return {name: value for name, value in found.items() if name.startswith("val/")}


def run(folder: Path, arguments: list[str], **reward: int) -> FinishedRun:
    kwargs = json.dumps({"run": str(folder), **reward})
    printed = succeed(
        "train", *arguments, f"trainer.default_local_dir={folder}", f"custom_reward_function.reward_kwargs={kwargs}"
    )  # fmt: skip
    return FinishedRun(folder, arguments, printed)


@pytest.fixture(scope="module")
def finished(task: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("concurrent")
    (folder / "reward.py").write_text(REWARD)
    arguments = [
        *RECIPE, *CONCURRENT, f"data.train_files={task}/data/train.parquet", f"data.val_files={task}/data/test.parquet",
        f"actor_rollout_ref.model.path={task}/model", f"custom_reward_function.path={folder}/reward.py",
    ]  # fmt: skip
    return run(folder / "run", arguments, after=3)


def test_training_goes_on_while_a_validation_waits(finished: FinishedRun) -> None:
    """Step 2's validation waits for the end of step 3; its results belong to step 2, which has one line for training and one for them."""
    lines = [(row["step"], "val/score/mean" in row) for row in steps(finished.folder)]
    assert lines == [(1, False), (2, False), (3, False), (2, True), (4, False), (4, True)]
    assert [row["step"] for row in read_metrics(finished.folder)] == [1, 2, 3, 4]
    assert "validation after step 2  accuracy " in finished.printed
    synced = {row["step"]: row for row in steps(finished.folder) if "eval_sync/bytes_total" in row}
    assert list(synced) == [2, 4]
    assert all(row["eval_sync/bytes_total"] == row["sync/bytes_total"] > 0 for row in synced.values())
    assert "timing_s/validate_wait" not in synced[2] and synced[4]["timing_s/validate_wait"] >= 0


def test_its_answers_are_those_of_its_steps_weights(finished: FinishedRun) -> None:
    """transformers gives the same greedy answers, token by token, with the weights after steps 2 and 4."""
    for step in (2, 4):
        model = finished.folder / f"checkpoints/step-{step}/hf"
        verify_greedy(str(model), str(finished.folder / f"rollouts/val-{step:06d}.parquet"), NUM_PROMPTS)
        scores = [score for _, _, score in finished.answers(step)]
        assert finished.results(step)["val/score/mean"] == pytest.approx(sum(scores) / NUM_PROMPTS)
    assert finished.answers(2) != finished.answers(4)


@pytest.mark.slow
def test_a_validation_that_a_run_did_not_finish_is_repeated(finished: FinishedRun, tmp_path: Path) -> None:
    """A run resumed from step 2's checkpoint, saved before the validation's results, gets the same results. In its next validation the engine
    is killed: the run names the engine and repeats the validation with the same weights."""
    folder = tmp_path / "run"
    shutil.copytree(finished.folder / "checkpoints/step-2", folder / "checkpoints/step-2")
    saved = json.loads((folder / "checkpoints/step-2/run.json").read_text())
    assert saved["validations"] == {"open": 2}
    again = run(folder, finished.arguments, kill_from=NUM_PROMPTS)
    assert (
        "the validation after step 2 had not ended: it is repeated with the weights of step 2"
        in again.printed
    )
    assert (
        "the validation after step 4 has lost its engines: it is repeated with the weights of step 4"
        in again.printed
    )
    assert "eval rank 0" in again.printed and (folder / "killed").exists()
    (report,) = (folder / "failures").iterdir()
    assert "\nrole: eval\nrank: 0\n" in report.read_text()
    for step in (2, 4):
        assert again.answers(step) == finished.answers(step)
        assert (
            again.results(step) == finished.results(step) or step == 2
        )  # this folder has no training metrics of step 2
    assert [row["step"] for row in steps(folder)].count(4) == 2
    assert (folder / "hf/model.safetensors").read_bytes() == (finished.folder / "hf/model.safetensors").read_bytes()  # fmt: skip


@pytest.mark.slow
def test_a_blocking_validation_has_the_same_results(finished: FinishedRun, tmp_path: Path) -> None:
    """Training is the same with blocking and with concurrent validation."""
    arguments = [one for one in finished.arguments if one not in CONCURRENT]
    blocking = run(tmp_path / "run", [*arguments, "trainer.n_gpus_per_node=1"])
    for step in (2, 4):
        assert blocking.answers(step) == finished.answers(step)
        assert blocking.results(step) == finished.results(step)
    names = ("actor/grad_norm", "critic/score/mean", "actor/entropy")
    rows = [
        [[row[name] for name in names] for row in read_metrics(one.folder)] for one in (blocking, finished)
    ]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_another_engine_answers_the_prompts_of_a_lost_one(finished: FinishedRun, tmp_path: Path) -> None:
    """Both engines had the same weights; the lost one is replaced before the next validation."""
    pools = "resource_pools={train: {n_gpus_per_node: 1}, eval: {n_gpus_per_node: 2}}"
    found = run(tmp_path / "run", [*finished.arguments, pools, "trainer.n_gpus_per_node=3"], kill_from=0)
    assert (found.folder / "killed").exists() and "eval rank 0" in found.printed
    assert "has lost its engines" not in found.printed and "starting it anew, 1 of 3 times" in found.printed
    for step in (2, 4):
        assert found.answers(step) == finished.answers(step)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["one_step_off", "partial_rollouts", "fully_async"])
def test_other_modes(finished: FinishedRun, tmp_path: Path, mode: str) -> None:
    """transformers gives the same answers with the weights after the step, also in modes in which training rollouts continue during validation."""
    apart = [] if mode == "partial_rollouts" else [
        "trainer.n_gpus_per_node=3", "resource_pools.rollout={n_gpus_per_node: 1}", "actor_rollout_ref.rollout.resource_pool=rollout",
    ]  # fmt: skip
    found = run(
        tmp_path / "run",
        [*finished.arguments, f"trainer.mode={mode}", "trainer.val_before_train=true", *apart],
    )
    assert found.results(0) and found.results(2) and found.results(4)
    for step in (2, 4):
        model = found.folder / f"checkpoints/step-{step}/hf"
        verify_greedy(str(model), str(found.folder / f"rollouts/val-{step:06d}.parquet"), NUM_PROMPTS)


@pytest.mark.slow
def test_a_reward_that_always_fails_ends_the_run(finished: FinishedRun, tmp_path: Path) -> None:
    """The error is the same as for a blocking validation."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, run):\n"
        "    assert extra_info['split'] != 'test', 'no answer'\n    return 1.0\n"
    )
    ended = megarl(
        "train", *finished.arguments, f"trainer.default_local_dir={tmp_path}/run",
        f"custom_reward_function.path={tmp_path}/reward.py", f"custom_reward_function.reward_kwargs={{run: {tmp_path}}}",
    )  # fmt: skip
    assert ended.returncode == 1
    assert "the rewards of all 16 trajectories failed" in ended.stderr and "no answer" in ended.stderr
