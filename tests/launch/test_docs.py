"""The commands and the job's file of docs/launch.md, as they stand there."""

import re
import shlex
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.launch.job import make_job

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/launch.md").read_text()
COMMANDS = re.findall(r"^\$ megarl (launch .*)$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_given_as_it_stands(command: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*shlex.split(command), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(("megarl ", "sbatch ", "---\n"))


def test_the_page_has_commands_of_each_kind() -> None:
    assert {command.split()[1] for command in COMMANDS} == {"local", "slurm", "kuberay", "skypilot"}


def test_the_job_file_is_one(tmp_path: Path) -> None:
    [text] = re.findall(r"^```yaml\n# job.yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "job.yaml").write_text(text)
    job = make_job("train", "recipes/qwen2.5_72b_grpo_lora.yaml", [], str(tmp_path / "job.yaml"), [])
    assert job.seconds == 24 * 3600 and job.launch.slurm.container == "pyxis"
    assert job.launch.kuberay.mount == ("shared:/workspace", "models:/models:ro")
