"""The Dockerfile of the GPU image: a linter's findings, and whether its pip lines can be resolved. Building it needs a network."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "Dockerfile"
HADOLINT, UV = (shutil.which(name, path=str(Path(sys.executable).parent)) for name in ("hadolint", "uv"))
PINS = ROOT / "requirements/gpu.txt"
# The image's Python and its glibc (Ubuntu 24.04's).
TARGET = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39"]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has no package for this kind of machine")
def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    assert lint(DOCKERFILE) == (0, "")
    careless = tmp_path / "Dockerfile"
    careless.write_text(re.sub(r"^FROM .*$", "FROM ubuntu", DOCKERFILE.read_text(), flags=re.MULTILINE))
    code, found = lint(careless)
    assert code == 1 and "DL3006" in found  # the linter works: it finds an image without a tag


def lint(file: Path) -> tuple[int, str]:
    done = subprocess.run([HADOLINT, "--no-color", str(file)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_the_image_runs_as_a_user_with_a_health_check() -> None:
    text = DOCKERFILE.read_text()
    *_, user = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert user.split(":")[0] not in ("root", "0")
    assert re.search(r"^HEALTHCHECK ", text, re.MULTILINE)


def test_the_last_layer_of_packages_is_followed_by_their_imports() -> None:
    """The imports of packages that are compiled, or that load compiled packages."""
    text = DOCKERFILE.read_text()
    *_, last = re.finditer(r"\bpip install ", text)
    (imports,) = re.findall(r'python -c "import ([\w., ]+)" \\\n    && rm', text[last.end() :])
    assert set(imports.split(", ")) == {"transformer_engine.pytorch", "sgl_kernel", "deep_gemm", "flashinfer"}
    assert "libcuda.so.1" in text[last.end() :]  # sgl_kernel is linked with it, and the build has no driver


def test_no_flash_attn_2_is_built() -> None:
    """Transformer Engine refuses the newest version, and flash-attn-4 installs into a folder of the same name."""
    assert not re.search(r"flash-attn==|FLASH_ATTN", DOCKERFILE.read_text())
    assert any(pin.startswith("flash-attn-4==") for pin in pins())


def pip_lines() -> list[list[str]]:
    """The arguments of each `pip install` of the Dockerfile, with its ARGs in their places."""
    text = re.sub(r"^ *#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    values = dict(re.findall(r"^ARG (\w+)=(\S*)$", text, re.MULTILINE))
    found = re.findall(r"\bpip install ([^&;\n]*)", text)
    return [
        shlex.split(re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]].strip('"'), line)) for line in found
    ]


def requirements_of(line: list[str]) -> list[str]:
    """The requirements of a pip line that come from the index: no options, no git, nothing whose version is empty (it is not installed)."""
    return [
        word for word in line if not word.startswith("-") and "git+" not in word and not word.endswith("==")
    ]


def pip_index() -> list[str]:
    """uv's options for the package index that pip is set to, since uv does not read pip's settings."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    found = re.findall(r"^\S+\.index-url='(\S+)'$", said.stdout, re.MULTILINE)
    return ["--default-index", found[0]] if found else []


def resolve(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """What pip would install in the image, a line `name==version` each; nothing is installed here."""
    command = [
        UV,
        "pip",
        "compile",
        *TARGET,
        "--no-python-downloads",
        "--no-annotate",
        "--no-header",
        *pip_index(),
    ]
    return subprocess.run(
        [*command, *arguments],
        cwd=ROOT / "requirements",
        input=given,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def index() -> None:
    """Skip where there is no package index."""
    if UV is None:
        pytest.skip("uv has no package for this kind of machine")
    asked = resolve("--refresh", "-", given="wheel")
    if asked.returncode:
        pytest.skip(f"uv reaches no package index: {asked.stderr.strip().splitlines()[-1].strip()}")


def pins() -> set[str]:
    return {line for line in PINS.read_text().splitlines() if line and not line.startswith("#")}


def test_the_pins_of_the_image_are_the_resolution_of_its_requirements(index: None) -> None:
    """All pins are needed, and none is missing."""
    found = resolve("-c", "gpu.txt", "gpu.in")
    assert found.returncode == 0, found.stderr
    assert set(found.stdout.splitlines()) == pins()


def test_each_pip_line_of_the_image_takes_what_is_pinned(index: None) -> None:
    """So no layer installs what a later one replaces. megarl itself comes last, without its dependencies, which are there already."""
    lines = [line for line in map(requirements_of, pip_lines()) if line]
    assert [line[0].split("==")[0] for line in lines] == [
        "torch", "transformer-engine[pytorch,core_cu13]", "sglang", "megatron-core", ".",
    ]  # fmt: skip
    lines[3].remove("gpu.txt")  # the pins themselves: see the test above
    for line in lines[:-1]:
        takes(resolve("-c", "gpu.txt", "-", given="\n".join(line)))
    takes(resolve("-c", "gpu.txt", "../setup.py", "--extra", "rollout"))


def takes(found: subprocess.CompletedProcess[str]) -> None:
    assert found.returncode == 0, found.stderr
    assert found.stdout and set(found.stdout.splitlines()) <= pins()
