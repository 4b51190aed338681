"""A wheel of megarl, installed with all its requirements into a new environment, and used in a folder outside of the clone.

The new environment has links to packages of this environment, which `make install` has pinned: to those that the metadata require, and to those that
these require, so that requirements that the metadata lack are noticed; a true installation would unpack 1.7 GB. Megatron-core (on Python 3.11) and
SGLang are not there, as on a user's machine before the second command of README.md: commands that need them say so, and everything else works.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.parser import HeaderParser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megarl import __version__

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("examples", "launch", "recipes", "requirements")
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "megarl", *SHIPPED)

pytestmark = pytest.mark.timeout(900)


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that does not see the clone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = list(map(str, command))
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from copies of the sources, into which a build leaves its folders."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        source, target = ROOT / name, folder / "source" / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    arguments = ("--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source")
    built = run(sys.executable, "-m", "pip", "wheel", *arguments, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_has_what_a_user_needs_of_the_clone(wheel: Path) -> None:
    assert wheel.name == f"megarl-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        modes = {info.filename: info.external_attr >> 16 for info in file.infolist()}
    shared = [path for name in SHIPPED for path in (ROOT / name).rglob("*")]
    files = [path for path in shared if path.is_file() and "__pycache__" not in path.parts]
    assert {f"megarl/share/{path.relative_to(ROOT)}" for path in files} == {
        name for name in names if name.startswith("megarl/share/")
    }
    assert {"megarl/py.typed", f"megarl-{__version__}.dist-info/licenses/LICENSE"} <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "build/"))]
    assert modes["megarl/share/launch/ray/start_cluster.sh"] & 0o111
    assert {name.split("/")[0] for name in names} == {"megarl", f"megarl-{__version__}.dist-info"}


def test_the_metadata_say_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        told = HeaderParser().parsestr(file.read(f"megarl-{__version__}.dist-info/METADATA").decode())
    assert (told["License-Expression"], told["Author"]) == ("Apache-2.0", "The megarl authors")
    assert told["Description-Content-Type"] == "text/markdown" and told["Requires-Python"] == ">=3.11"
    addresses = dict(line.split(", ", 1) for line in told.get_all("Project-URL"))
    assert addresses["Paper"] == "https://arxiv.org/abs/2409.19256"
    assert all(address.startswith("https://") for address in addresses.values())
    classifiers = told.get_all("Classifier")
    assert "Typing :: Typed" in classifiers and "Programming Language :: Python :: 3.12" in classifiers
    required = [text for text in told.get_all("Requires-Dist") if "extra ==" not in text]
    assert any(text.startswith("torch==") for text in required)
    assert sorted(told.get_all("Provides-Extra")) == ["dev", "nixl", "rollout"]


def required(texts: list[str] | None) -> dict[str, Distribution]:
    """By name: the packages of this environment that the requirements ask for, directly or through other packages, at the allowed versions."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()

    def add(texts: list[str] | None, extra: str) -> None:
        for wanted in map(Requirement, texts or ()):
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(wanted.name)
            one = found.setdefault(name, distribution(wanted.name))
            assert wanted.specifier.contains(one.version, prereleases=True), (str(wanted), one.version)
            for more in ("", *wanted.extras):
                if (name, more) not in seen:
                    seen.add((name, more))
                    add(one.requires, more)

    add(texts, "")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bin/ of a new environment in which the wheel is installed, and what it requires is linked."""
    folder = tmp_path_factory.mktemp("environment")
    made = run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    assert made.returncode == 0, made.stdout + made.stderr
    (packages,) = (folder / "venv").glob("lib/*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        told = HeaderParser().parsestr(file.read(f"megarl-{__version__}.dist-info/METADATA").decode())
    for one in required(told.get_all("Requires-Dist")).values():
        for path in one.files or ():
            if (
                not path.is_absolute() and ".." not in path.parts
            ):  # programs name this environment in their first line
                target = packages / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(one.locate_file(path))
    done = run(*pip(folder / "venv/bin"), "install", "--no-deps", "--no-index", wheel, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder / "venv/bin"
    shutil.rmtree(folder)


def pip(environment: Path) -> tuple[object, ...]:
    """This environment's pip, for the new one."""
    return sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", environment / "python"


@pytest.fixture(scope="module")
def task(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the clone with the demo's task, made there."""
    folder = tmp_path_factory.mktemp("elsewhere")
    sizes = ("--num-sft", 64, "--num-train", 128, "--num-test", 16)
    made = run(environment / "megarl", "make-task", "outputs/demo", *sizes, cwd=folder)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def test_the_command_is_that_of_the_wheel(environment: Path, tmp_path: Path) -> None:
    said = run(environment / "megarl", "--version", cwd=tmp_path)
    assert (said.returncode, said.stdout) == (0, f"megarl {__version__}\n"), said.stderr
    helped = run(environment / "megarl", "--help", cwd=tmp_path)
    assert helped.returncode == 0 and "recipes" in helped.stdout, helped.stderr
    found = run(environment / "python", "-c", "import megarl; print(megarl.__file__)", cwd=tmp_path)
    assert Path(found.stdout).is_relative_to(environment.parent), found.stderr
    checked = run(*pip(environment), "check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout


def test_recipes_and_models_are_found(environment: Path, tmp_path: Path) -> None:
    listed = run(environment / "megarl", "recipes", cwd=tmp_path)
    assert "recipe:quickstart_ppo " in listed.stdout, listed.stderr
    planned = run(environment / "megarl", "plan", "memory", "recipe:qwen2.5_7b_dapo", cwd=tmp_path)
    assert planned.returncode == 0 and "fits" in planned.stdout, planned.stderr
    assert planned.stdout.startswith("recipe:models/qwen2.5-7b: 8 devices")


def test_a_task_is_made_and_its_recipe_is_right(environment: Path, task: Path) -> None:
    shown = run(environment / "megarl", "config", "recipe:quickstart_sft", "--command", "sft", cwd=task)
    assert shown.returncode == 0, shown.stderr
    assert "  path: outputs/demo/model  # recipe:quickstart_sft line " in shown.stdout


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    environment: Path, task: Path
) -> None:
    """The error comes before any process is started, and the file that its command names exists."""
    model = "actor_rollout_ref.model.path=outputs/demo/model"
    refused = run(environment / "megarl", "train", "recipe:quickstart_ppo", model, cwd=task)
    assert refused.returncode == 2 and "sglang (rollouts, evaluation)" in refused.stderr, refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    command = re.search(r"-m pip install --no-deps --ignore-requires-python -r (\S+);", refused.stderr)
    assert command is not None and Path(command[1]).is_file()
    asked = run(environment / "megarl", "requirements", "cpu", cwd=task)
    assert asked.stdout.strip() == command[1], asked.stderr
    looked = run(environment / "megarl", "doctor", cwd=task)
    assert looked.returncode == 1 and command[0].rstrip(";") in looked.stdout, looked.stdout + looked.stderr


@pytest.mark.slow
def test_a_job_of_slurm_gets_files_of_the_wheel(environment: Path, task: Path) -> None:
    command = ("launch", "slurm", "recipe:quickstart_ppo", "--cpu", "--dry-run")
    printed = run(environment / "megarl", *command, cwd=task)
    assert printed.returncode == 0, printed.stderr
    share = next(environment.parent.glob("lib/*/site-packages/megarl/share"))
    for name in ("launch/slurm/train.sbatch", "recipes/quickstart_ppo.yaml"):
        assert f" {share / name}" in printed.stdout and (share / name).is_file()
    assert f"--root {share} " in printed.stdout and (share / "launch/slurm/node.sh").is_file()
