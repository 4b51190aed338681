"""The commands and the job's file of docs/launch.md, exactly as the page has them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.launch.job import make_job
from tests.launch.kube_api import LOG, Store, serving

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/launch.md").read_text()
COMMANDS = re.findall(r"^\$ megarl (launch .*)$", PAGE, re.MULTILINE)
KUBERAY = [f"megarl {command}" for command in COMMANDS if command.startswith("launch kuberay")]


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_can_be_given_as_it_stands(command: str, capsys: pytest.CaptureFixture) -> None:
    assert main([*shlex.split(command), "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(("megarl ", "sbatch ", "---\n"))


def test_the_page_has_commands_of_each_kind() -> None:
    assert {command.split()[1] for command in COMMANDS} == {"local", "slurm", "kuberay", "skypilot"}


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, list[str]]]:
    """A server that kubectl finds; yields its objects, and the changes that were made."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl on this machine")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("HOME", str(tmp_path))  # kubectl keeps facts about servers there
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # has megarl
    with serving(tmp_path / "kubeconfig") as server:
        yield server


def run(command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        shlex.split(command, comments=True), capture_output=True, text=True, timeout=200, check=False
    )


def test_the_commands_of_kubernetes_run_as_they_stand(kubernetes: tuple[Store, list[str]]) -> None:
    large, launch = KUBERAY
    logs, get, delete = re.findall(r"^\$ (kubectl .*)$", PAGE, re.MULTILINE)
    store, changes = kubernetes
    assert re.fullmatch(r"configmap/\S+ created\nrayjob.ray.io/\S+ created\n", run(large).stdout)
    del changes[:]
    assert run(launch).stdout == "configmap/demo-recipe created\nrayjob.ray.io/demo created\n"
    assert {"recipe.yaml"} == store["configmaps", "team", "demo-recipe"]["data"].keys()
    assert run(launch).stdout == "configmap/demo-recipe unchanged\nrayjob.ray.io/demo unchanged\n"
    assert run(logs).stdout == LOG
    assert "\ndemo " in run(get).stdout
    assert run(delete).stdout == 'rayjob.ray.io "demo" deleted\n'
    assert changes == ["POST configmaps demo-recipe", "POST rayjobs demo", "DELETE rayjobs demo"]


def test_what_kubernetes_refuses_is_said_and_the_exit_code_tells(kubernetes: tuple[Store, list[str]]) -> None:
    """A number that the operator refuses, written by hand, since megarl itself would not write it."""
    manifest = run(f"{KUBERAY[-1]} --dry-run").stdout
    bad = manifest.replace("backoffLimit: 3", "backoffLimit: -1")
    assert bad != manifest
    applied = subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=bad, capture_output=True, text=True, timeout=200
    )
    assert applied.returncode == 1 and "backoff limit is not negative" in applied.stderr
    assert kubernetes[1] == ["POST configmaps demo-recipe"]


def test_the_job_file_is_one(tmp_path: Path) -> None:
    [text] = re.findall(r"^```yaml\n# job.yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "job.yaml").write_text(text)
    job = make_job("train", "recipes/qwen2.5_72b_grpo_lora.yaml", [], str(tmp_path / "job.yaml"), [])
    assert job.seconds == 24 * 3600 and job.launch.slurm.container == "pyxis"
    assert job.launch.kuberay.mount == ("shared:/workspace", "models:/models:ro")
