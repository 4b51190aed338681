"""A run with a killed process ends soon, reports which process died, and leaves no processes or folders behind."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.processes import alive, alive_after, guards_of
from tests.disks import small_disk
from tests.fixtures.runs import PPO, REPOSITORY, command, environment, megarl, on
from tests.waiting import wait_for

END_SECONDS = 40
# The smallest run: two actor ranks that wait for each other, one engine, no critic, no reference.
SMALL = [
    "critic=null",
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.max_restarts=0",  # restarted engines: tests/faults/test_engine_dies.py
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=1000",
]


@dataclass(frozen=True)
class LiveRun:
    """A `megarl train` in its first steps, with all its processes and all folders that its guards must remove."""

    process: subprocess.Popen
    folder: Path
    pids: list[int]
    scratch: list[str]

    def named(self, title: str) -> int:
        """The pid of the one process whose title begins with `title`."""
        (pid,) = [pid for pid in self.pids if _title(pid).startswith(title)]
        return pid

    def end(self) -> tuple[int, str]:
        """Wait for the end of the command and of all its processes; return its exit code and stderr."""
        begin = time.monotonic()
        code = self.process.wait(END_SECONDS)
        assert alive_after(self.pids, END_SECONDS - (time.monotonic() - begin)) == []
        assert [folder for folder in self.scratch if os.path.exists(folder)] == []
        return code, (self.folder / "stderr").read_text()


@pytest.fixture
def start(task: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """start(overrides...): a small run; its output goes to the files stdout and stderr of `tmp_path`."""
    processes = []

    def start(*overrides: str) -> subprocess.Popen:
        with open(tmp_path / "stdout", "w") as out, open(tmp_path / "stderr", "w") as err:
            process = subprocess.Popen(
                command("train", *PPO, *on(task, tmp_path / "run"), *SMALL, *overrides),
                cwd=REPOSITORY,
                env=environment(),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def run(start: Callable[..., subprocess.Popen], tmp_path: Path) -> LiveRun:
    """A run that has taken its first step."""
    process = start()

    def has_taken_a_step() -> bool:
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        return "step 1/" in (tmp_path / "stdout").read_text()

    wait_for(has_taken_a_step, 400, (tmp_path / "stderr").read_text)
    pids, scratch = _family(process.pid)
    # one folder of the cluster and one of each of the three ranks
    assert len(scratch) == 4 and all(os.path.isdir(folder) for folder in scratch), scratch
    return LiveRun(process, tmp_path, pids, scratch)


def test_a_killed_actor_rank(run, tmp_path):
    os.kill(run.named("ray::actor-rank1"), signal.SIGKILL)
    code, message = run.end()
    assert code == 1
    assert message.startswith("error: actor rank 1 (process ")
    log = tmp_path / "run" / "logs" / "actor-rank1.log"
    assert "on 127.0.0.1) died: killed " in message
    assert f"log: {log} on 127.0.0.1, its last lines:\n  | " in message
    # The last line of the output repeats the cause, and no other component prints errors.
    last = message.splitlines()[-1]
    assert last.startswith("the run ended: actor rank 1 (process ") and "on 127.0.0.1) died: killed " in last
    assert "Warning" not in message and "(raylet)" not in (tmp_path / "stdout").read_text()
    (report,) = (tmp_path / "run" / "failures").iterdir()
    assert f"stacks and logs of all processes: {report}\n" in message
    text = report.read_text()
    for part in ("\nstep: ", "\nphase: step", "role: actor\nrank: 1\nhost: 127.0.0.1\n", "cause: killed "):
        assert part in text
    # the stacks of the other processes: the other rank, the engine's process and its scheduler
    for part in ("ray::actor-rank0", "ray::rollout-rank0", "sglang::scheduler"):
        head = next(line for line in text.splitlines() if line.startswith("-- process") and part in line)
        assert "(most recent call first)" in text.partition(head)[2].partition("-- ")[0]


@pytest.mark.slow
def test_a_killed_sglang_scheduler(run, tmp_path):
    """The scheduler is a child of the engine's process, which notices its end, logs it and ends, too."""
    os.kill(run.named("sglang::scheduler"), signal.SIGKILL)
    code, message = run.end()
    assert code == 1
    assert message.startswith("error: rollout rank 0 (process ")
    assert str(tmp_path / "run" / "logs" / "rollout-rank0.log") in message
    assert "scheduler" in message and "exit code -9" in message


@pytest.mark.slow
def test_a_killed_controller(run):
    os.kill(run.process.pid, signal.SIGKILL)
    code, _ = run.end()
    assert code == -signal.SIGKILL


def test_ctrl_c(run, tmp_path):
    """All processes in the foreground get the signal, as from a terminal."""
    os.killpg(run.process.pid, signal.SIGINT)
    code, message = run.end()
    assert (code, message) == (130, "interrupted\n")
    assert "(raylet)" not in (tmp_path / "stdout").read_text()


@pytest.mark.slow
def test_a_reward_function_that_always_raises(start, tmp_path):
    """A function that raises only for some samples does not end the run: tests/trainer/test_dapo.py."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    raise KeyError('no such answer')\n"
    )
    process = start(f"custom_reward_function.path={reward}")
    assert process.wait(200) == 1
    message = (tmp_path / "stderr").read_text()
    assert message.startswith("error: the rewards of all 16 trajectories failed; the first, of train:")
    assert "KeyError: 'no such answer'" in message and str(reward) in message


def test_a_full_disk(task, tmp_path):
    """The disk has room for logs and metrics, but not for the model (0.6 MB)."""
    with small_disk(tmp_path / "disk", 256) as disk:
        result = megarl(
            "sft", "recipes/quickstart_sft.yaml", f"data.train_files={task}/data/sft.parquet",
            f"model.path={task}/model", "megatron.tensor_model_parallel_size=1",
            "megatron.pipeline_model_parallel_size=1", "trainer.n_gpus_per_node=1",
            "trainer.total_training_steps=1", f"trainer.default_local_dir={disk}/run",
        )  # fmt: skip
        assert result.returncode == 1
        assert result.stderr.startswith(f"error: {disk}/run/hf: ")
        assert "No space left on device; set trainer.default_local_dir to a folder" in result.stderr
        assert "Traceback" not in result.stderr
        assert "step 1/1" in result.stdout and "(raylet)" not in result.stdout
        assert [name for name in os.listdir(disk / "run") if name.startswith("hf")] == []


def _family(pid: int) -> tuple[list[int], list[str]]:
    """(the pids of a process, its descendants and their guards; the folders that the guards remove)."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    guards = guards_of(pids)
    return alive([*pids, *guards]), [folder for folders in guards.values() for folder in folders]


def _title(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:  # a helper of the start, which has ended since
        return ""
