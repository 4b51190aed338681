"""Real runs with adapters that resume after faults: their results equal those of a run without faults, bit for bit."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.checkpoints import find_damage, read_checkpoint, steps_in
from tests.disks import small_disk
from tests.fixtures.runs import assert_same_steps, megarl, succeed

# Two ranks (TP2) with actor, reference and critic on one frozen model, and one engine that receives only adapters.
PPO = [
    "recipes/lora_ppo_cpu.yaml", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.val_files=null", "trainer.test_freq=-1", "trainer.total_training_steps=3",
    "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.lora_sync=adapters",
    "trainer.n_gpus_per_node=2", "trainer.save_freq=1", "trainer.async_save=true",
]  # fmt: skip
GRPO = [
    *PPO, "critic=null", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.rollout.n=4",
]  # fmt: skip

# The reward worker kills itself at a sample that comes while the file `kill` exists.
REWARD = """
import os, signal
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    try:
        Path(__file__).with_name("kill").unlink()
    except FileNotFoundError:
        return 1.0 - abs(len(solution_str) - 4) / 8
    os.kill(os.getpid(), signal.SIGKILL)
"""

# A plugin that sends SIGNAL to rank 1 of the actor at the beginning of the save after step 2, once.
BLOW = """
import os, signal, sys
from pathlib import Path

def begin_save(folder, states, *, background):
    if ".step-2." in folder and folder.endswith("/actor") and worker.torch.distributed.get_rank() == 1:
        try:
            Path(__file__).with_name("blow").unlink()
            os.kill(os.getpid(), signal.SIGNAL)
        except FileNotFoundError:
            pass
    return as_it_is(folder, states, background=background)

worker = sys.modules.get("megarl.trainer.workers.model")
if worker is not None:
    as_it_is, worker.begin_save = worker.begin_save, begin_save
"""


@dataclass(frozen=True)
class FinishedRun:
    """A run without faults: its folder, and its arguments except the folder."""

    folder: Path
    arguments: list[str]

    def is_that_of(self, folder: Path, first: int) -> None:
        """The run in `folder` has the same steps from `first` on, the same last trajectories, and the same final weights."""
        assert_same_steps(self.folder, folder, first)
        for name in (
            "rollouts/step-000003.parquet",
            "hf/model.safetensors",
            "adapter/adapter_model.safetensors",
        ):
            assert (self.folder / name).read_bytes() == (folder / name).read_bytes(), name


def left_alone(recipe: list[str], task: Path, folder: Path) -> FinishedRun:
    (folder / "reward.py").write_text(REWARD)
    arguments = [
        *recipe, f"data.train_files={task}/data/train.parquet", f"actor_rollout_ref.model.path={task}/model",
        f"custom_reward_function.path={folder}/reward.py",
    ]  # fmt: skip
    succeed("train", *arguments, f"trainer.default_local_dir={folder}/run")
    return FinishedRun(folder / "run", arguments)


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return left_alone(PPO, task, tmp_path_factory.mktemp("whole"))


def occupied(folder: Path) -> int:
    """The KiB that a folder's files occupy in pages of 4 KiB."""
    return sum(4 * (1 + path.stat().st_size // 4096) for path in folder.rglob("*"))


def test_a_checkpoint_saved_in_the_background_is_complete(whole: FinishedRun) -> None:
    checkpoints = whole.folder / "checkpoints"
    assert steps_in(checkpoints) == [1, 2, 3]
    for step in (1, 2, 3):
        assert find_damage(read_checkpoint(checkpoints / f"step-{step}")) == []


@pytest.mark.slow
def test_a_run_goes_on_with_a_full_disk_and_a_killed_reward_worker(
    whole: FinishedRun, tmp_path: Path
) -> None:
    """Resumed from step 1 on a disk with room for one checkpoint, the run writes no other; its steps are the same."""
    saved = whole.folder / "checkpoints" / "step-1"
    (whole.folder.parent / "kill").touch()
    with small_disk(tmp_path / "checkpoints", occupied(saved) * 3 // 2) as disk:
        shutil.copytree(saved, disk / "step-1")
        printed = succeed(
            "train",
            *whole.arguments,
            f"trainer.default_local_dir={tmp_path}",
            "trainer.on_save_error=continue",
        )
        assert steps_in(disk) == [1]
        assert find_damage(read_checkpoint(disk / "step-1")) == []
        assert [path.name for path in disk.iterdir() if path.name.endswith(".partial")] == []
    assert "going on from step 1" in printed
    for step in (2, 3):
        assert f"Warning: step {step}: no checkpoint, the run goes on (trainer.on_save_error): " in printed
    assert "No space left on device" in printed
    assert not (whole.folder.parent / "kill").exists()
    whole.is_that_of(tmp_path, 2)


@pytest.mark.slow
def test_a_full_disk_stops_a_run_that_shall_not_go_on_without(whole: FinishedRun, tmp_path: Path) -> None:
    saved = whole.folder / "checkpoints" / "step-1"
    with small_disk(tmp_path / "checkpoints", occupied(saved) * 3 // 2) as disk:
        shutil.copytree(saved, disk / "step-1")
        result = megarl("train", *whole.arguments, f"trainer.default_local_dir={tmp_path}")
        assert result.returncode == 1
        assert "No space left on device" in result.stderr.partition("\n")[0]
        assert "step 2: no checkpoint, and the run ends (trainer.on_save_error=stop)" in result.stdout
        assert steps_in(disk) == [1]
        assert find_damage(read_checkpoint(disk / "step-1")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "signal"), [(PPO, "SIGKILL"), (GRPO, "SIGSTOP")], ids=["ppo", "grpo"])
def test_a_rank_is_lost_while_it_saves(
    whole: FinishedRun, task: Path, tmp_path: Path, recipe: list[str], signal: str
) -> None:
    """The run names the lost rank, restarts from step 1, and gives the same results as the run without faults."""
    if recipe is GRPO:
        (tmp_path / "whole").mkdir()
        whole = left_alone(GRPO, task, tmp_path / "whole")
    (tmp_path / "blow.py").write_text(BLOW.replace("SIGNAL", signal))
    (tmp_path / "blow").touch()
    run = tmp_path / "run"
    ended = megarl(
        "train", *whole.arguments, f"trainer.default_local_dir={run}", "trainer.max_restarts=1",
        f"plugins=[{tmp_path}/blow.py]", timeout=400,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    printed = ended.stdout
    assert not (tmp_path / "blow").exists()
    assert "starting again: 1 of trainer.max_restarts=1" in printed and "going on from step 1" in printed
    (report,) = (run / "failures").iterdir()
    text = report.read_text()
    assert "\nrole: actor\nrank: 1\nhost: 127.0.0.1\n" in text and "\nstep: 2\nphase: save\n" in text
    assert steps_in(run / "checkpoints") == [1, 2, 3]
    whole.is_that_of(run, 1)
