"""`megarl launch slurm`: the arguments of sbatch, and jobs that are refused before anything is submitted."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megarl.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
TARGET, RECIPE = "slurm", str(ROOT / "recipes/quickstart_sft.yaml")
DEEPSEEK = str(ROOT / "recipes/deepseek_v3_grpo_lora.yaml")


@pytest.mark.parametrize("path", sorted((ROOT / "launch").rglob("*.s*")), ids=lambda path: path.name)
def test_scripts_are_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)


def test_the_arguments_of_a_job(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(
        "time: 1-00:00:00\nimage: registry#team/megarl:1\n"
        "slurm: {partition: gpu, account: team, container: pyxis, mount: ['/data:/data:ro'], interface: ib0}\n"
    )
    options = "--job job.yaml --sbatch=--constraint=h200 --retries 2 --dry-run trainer.save_freq=5"
    assert main(["launch", "slurm", DEEPSEEK, *options.split()]) == 0
    words = shlex.split(capsys.readouterr().out)
    script = words.index(str(ROOT / "launch/slurm/train.sbatch"))
    assert words[:script] == [
        "sbatch", "--job-name=deepseek-v3-grpo-lora", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--exclusive",
        "--mem=0", "--time=1-00:00:00", "--partition=gpu", "--account=team", "--signal=B:USR1@300", "--requeue", "--open-mode=append",
        f"--chdir={tmp_path}", f"--output={tmp_path}/outputs/slurm/%j.out", "--constraint=h200",
    ]  # fmt: skip
    assert words[script + 1 :] == [
        "--root", str(ROOT), "--command", "train", "--devices", "8", "--container", "pyxis", "--image",
        "registry#team/megarl:1", "--mount", "/data:/data:ro", "--interface", "ib0", "--logs",
        f"{tmp_path}/outputs/slurm", "--retries", "2", "--start-seconds", "300", "--", DEEPSEEK, "trainer.save_freq=5",
    ]  # fmt: skip
    assert not (tmp_path / "outputs").exists()


def test_without_a_container_the_nodes_use_this_environment(dry_run: Callable[..., str]) -> None:
    words = shlex.split(dry_run(*["--command", "sft", "--cpu", "--retries", "0", "--cpus-per-node", "4"]))
    assert words[words.index("--venv") + 1] == sys.prefix and "--cpu" in words
    assert "--no-requeue" in words and "--cpus-per-task=4" in words
    assert not {word for word in words if word.startswith(("--gpus", "--exclusive", "--mem"))}


def test_whole_nodes_come_with_all_of_their_memory(dry_run: Callable[..., str]) -> None:
    """Slurm gives an exclusive job the memory it asks for; sbatch refuses --mem beside --mem-per-gpu."""
    options = ["--command", "sft", "--cpu", "--retries", "0"]
    assert "--mem=0" in shlex.split(dry_run(*options))
    words = shlex.split(dry_run(*options, "--sbatch=--mem-per-gpu=100G"))
    assert [word for word in words if word.startswith("--mem")] == ["--mem-per-gpu=100G"]
    assert "#SBATCH --mem=0" in (ROOT / "launch/slurm/sweep.sbatch").read_text().splitlines()


def test_a_job_with_a_part_of_its_nodes_leaves_the_rest_to_others() -> None:
    """sbatch takes options from the script, too, and has none that takes --exclusive back."""
    lines = (ROOT / "launch/slurm/train.sbatch").read_text().splitlines()
    assert not [line for line in lines if line.startswith("#SBATCH --exclusive")]


def test_the_command_refuses_what_the_script_would(
    refused: Callable[..., str],
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    refused = partial(refused, "--command", "sft")
    assert "image=/none.sqsh: there is no such file" in refused(
        "--container", "pyxis", "--image", "/none.sqsh"
    )
    assert "needs slurm.container" in refused("--image", "x.y/z:1")
    assert "needs an image" in refused("--container", "apptainer")
    assert "is not less than time=5" in refused("--time", "5")
    assert "slurm.mount is for containers" in refused("--mount", "/a:/b")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "slurm", RECIPE, "--command", "sft"]) == 2
    assert "sbatch is not on PATH" in capsys.readouterr().err
