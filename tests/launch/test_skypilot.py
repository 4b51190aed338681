"""Tasks for SkyPilot: read by SkyPilot's own code, and refused where they would fail."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli.main import main
from megarl.config import TrainConfig, load_config
from tests.launch.examples import examples

pytestmark = pytest.mark.usefixtures("in_root")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "launch/skypilot"
TARGET, RECIPE = "skypilot", "recipes/qwen2.5_72b_grpo_lora.yaml"
NEEDED = ["--image", "registry.example/megarl:1", "--accelerator", "H100", "--mount", "shared:/workspace"]
UNREACHABLE = re.compile(r"Retrying \(|Connection|Temporary failure in name resolution|timed out")


@pytest.fixture
def launch(dry_run: Callable[..., str]) -> Any:
    """launch(arguments...): the task."""
    return lambda *arguments, **options: yaml.safe_load(dry_run(*arguments, **options))


@pytest.fixture(scope="session")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """sky(task): the answer of tests/launch/sky_task.py, one process for all tasks. SkyPilot is installed in a folder of its own, outside the tests'
    environment."""
    packages, home = tmp_path_factory.mktemp("skypilot"), tmp_path_factory.mktemp("home")
    installed = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1", "--no-deps",
            "--no-compile", "--only-binary", ":all:", "--target", packages, "-r", ROOT / "tests/launch/skypilot_packages.txt",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    if installed.returncode and UNREACHABLE.search(installed.stderr):
        pytest.skip(f"no package index to take SkyPilot from: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    variables = {"PYTHONPATH": str(packages), "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    with subprocess.Popen(
        [sys.executable, ROOT / "tests/launch/sky_task.py"],
        env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip

        def sky(task: dict[str, Any]) -> dict[str, Any]:
            process.stdin.write(f"{json.dumps(task)}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("{"):
                    return json.loads(line)
            raise AssertionError(f"SkyPilot's process ended with status {process.wait()}")

        yield sky
        process.stdin.close()


def understood(read: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in read, read["error"]
    return read


@pytest.mark.parametrize("name", sorted(examples(EXAMPLES)))
def test_examples_are_what_the_command_makes(name: str, capsys: pytest.CaptureFixture) -> None:
    assert main(examples(EXAMPLES)[name]) == 0
    assert capsys.readouterr().out == (EXAMPLES / name).read_text(), "run launch/skypilot/make_examples.sh"


def test_every_example_is_made() -> None:
    assert {path.name for path in EXAMPLES.glob("*.yaml")} == set(examples(EXAMPLES))


@pytest.mark.timeout(300)
def test_skypilot_understands_a_task(launch: Any, sky: Any, tmp_path: Path) -> None:
    (tmp_path / "env").write_text("NOTE=a $b = 'c'd\n")
    task = launch(
        *NEEDED, "--mount", "models.v2:/models", "--infra", "kubernetes", "--infra", "runpod", "--spot", "--retries", "5",
        "--cpus-per-node", "96", "--memory-per-node", "900", "--disk-size", "500", "--network-tier", "best",
        "--secret", "HF_TOKEN", "--env-file", str(tmp_path / "env"), "trainer.save_freq=5",
    )  # fmt: skip
    read = understood(sky(task))
    assert read["nodes"] == 1 and read["workdir"] is None and read["setup"] is None
    assert {one["infra"].lower() for one in read["resources"]} == {"kubernetes", "runpod"}
    for one in read["resources"]:
        assert one["accelerators"] == {"H100": 8} and one["spot"] is True
        assert one["image"] == ["docker:registry.example/megarl:1"]
        assert (one["cpus"], one["memory"], one["disk_size"]) == ("96+", "900+", 500)
        assert one["recovery"]["max_restarts_on_errors"] == 5
        assert one["recovery"]["recover_on_exit_codes"] == [75]
    assert read["volumes"] == {"/workspace": "shared", "/models": "models.v2"}
    assert read["envs"]["NOTE"] == "a $b = 'c'd"
    assert read["secrets"] == {"RAY_AUTH_TOKEN": "a secret", "HF_TOKEN": "a secret"}
    assert read["run"] == task["run"]


@pytest.mark.timeout(300)
def test_skypilot_understands_the_example_and_a_task_without_an_image(launch: Any, sky: Any) -> None:
    [example] = (yaml.safe_load(path.read_text()) for path in EXAMPLES.glob("*.yaml"))
    assert understood(sky(example))["resources"][0]["accelerators"] == {"H100": 8}
    bare = launch(
        "--setup", "make install", "--cpu", "--mount", "shared:/workspace", "--retries", "0", "--nodes", "2",
        "trainer.n_gpus_per_node=2", recipe="recipes/quickstart_ppo.yaml",
    )  # fmt: skip
    read = understood(sky(bare))
    assert (read["nodes"], read["setup"], read["workdir"]) == (2, "make install", str(ROOT))
    [resources] = read["resources"]
    assert resources["accelerators"] is None and resources["recovery"] is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "wrong", [{"resourcez": {}}, {"resources": {"accelerators": {"H100": "8"}}}, {"num_nodes": "2"}]
)
def test_skypilot_refuses_what_it_does_not_know(wrong: dict[str, Any], launch: Any, sky: Any) -> None:
    assert next(iter(wrong)) in sky(launch(*NEEDED) | wrong)["error"]


def test_the_whole_recipe_is_in_the_task(launch: Any, tmp_path: Path) -> None:
    """The recipe includes bases and overrides, with any characters: the shell that writes the file interprets none of them."""
    run = launch(*NEEDED, 'trainer.project_name=it\'s "$HOME" `x` \\n')["run"]
    script = run.replace("/tmp/megarl-recipe.yaml", str(tmp_path / "recipe.yaml"))
    subprocess.run(["bash", "-c", script.rpartition("bash /opt")[0]], check=True)
    read = load_config(TrainConfig, str(tmp_path / "recipe.yaml"), [])
    assert read == load_config(TrainConfig, RECIPE, ['trainer.project_name=it\'s "$HOME" `x` \\n'])


def test_the_script_has_the_nodes_and_the_devices(launch: Any) -> None:
    assert shlex.split(launch(*NEEDED)["run"].splitlines()[-1]) == [
        "bash", "/opt/megarl/launch/skypilot/node.sh", "--nodes", "1", "--devices", "8", "--work-dir", "/workspace",
        "--start-seconds", "600", "--", "train", "/tmp/megarl-recipe.yaml",
    ]  # fmt: skip


def test_the_run_folder_is_on_a_volume_or_its_checkpoints_in_a_bucket(launch: Any, refused: Any) -> None:
    image = ["--image", "a", "--accelerator", "H100"]
    said = refused(*image, "--mount", "models:/models")
    assert (
        "trainer.default_local_dir=outputs/megarl/ppo is /workspace/outputs/megarl/ppo on the machines"
        in said
    )
    assert "skypilot.mount: models:/models" in said
    said = refused(*NEEDED, "trainer.default_local_dir=../runs/a")
    assert "trainer.default_local_dir=../runs/a is /runs/a on the machines" in said
    assert "volumes" not in launch(*image, "trainer.checkpoint_url=s3://bucket/run")
    assert "is on no volume" in refused(
        *image, "--nodes", "2", "trainer.nnodes=2", "trainer.checkpoint_url=s3://bucket/run"
    )


def test_what_cannot_run_is_refused(refused: Any) -> None:
    assert "either an image that has megarl (--image), or the commands" in refused(*NEEDED[2:])
    assert "found both" in refused(*NEEDED, "--setup", "true")
    assert "give --accelerator KIND" in refused(*NEEDED, "--cpu")
    assert "SkyPilot's tasks have no time limit; give trainer.max_run_minutes" in refused(
        *NEEDED, "--time", "60"
    )
    assert "expected SOURCE:TARGET" in refused(*NEEDED, "--mount", "shared")
    assert "such as s3://bucket/folder" in refused(*NEEDED, "--bucket", "models:/models")
    assert "/workspace is the target of several" in refused(*NEEDED, "--bucket", "s3://x:/workspace")
    assert "name of an environment variable other than RAY_AUTH_TOKEN" in refused(*NEEDED, "--secret", "A=b")


@pytest.mark.parametrize(
    ("kind", "expected"), [("job", ["jobs", "launch"]), ("cluster", ["launch", "--cluster", "qwen2-5-72b-grpo-lora"])]
)  # fmt: skip
def test_sky_is_given_the_task_and_the_secrets_apart(
    kind: str,
    expected: list[str],
    launch: Any,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    program = tmp_path / "sky"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, shutil, sys\n"
        f"shutil.copy(sys.argv[-1], {str(tmp_path / 'task.yaml')!r})\n"
        f"facts = [sys.argv[1:-1], os.environ.get('RAY_AUTH_TOKEN'), os.environ.get('HF_TOKEN')]\n"
        f"json.dump(facts, open({str(tmp_path / 'facts')!r}, 'w'))\nsys.exit(3)\n"
    )
    arguments = ["launch", "skypilot", RECIPE, *NEEDED, "--secret", "HF_TOKEN", "--kind", kind]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert main(arguments) == 2
    assert "sky is not on PATH" in capsys.readouterr().err
    program.chmod(0o755)
    assert main(arguments) == 2
    assert "not in this command's environment: HF_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    assert main(arguments) == 3
    given, token, secret = json.loads((tmp_path / "facts").read_text())
    assert given == [*expected, "--secret", "RAY_AUTH_TOKEN", "--secret", "HF_TOKEN"]
    assert re.fullmatch(r"[0-9a-f]{64}", token) and secret == "hf-secret"
    written = (tmp_path / "task.yaml").read_text()
    assert token not in written and secret not in written
    assert yaml.safe_load(written) == launch(*NEEDED, "--secret", "HF_TOKEN", "--kind", kind)
