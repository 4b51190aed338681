"""The Dockerfile of the GPU image: what a linter finds in it. It is built on a machine with a network alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCKERFILE = Path(__file__).resolve().parent.parent / "Dockerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has no package for this kind of machine")
def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    assert lint(DOCKERFILE) == (0, "")
    careless = tmp_path / "Dockerfile"
    careless.write_text(re.sub(r"^FROM .*$", "FROM ubuntu", DOCKERFILE.read_text(), flags=re.MULTILINE))
    code, found = lint(careless)
    assert code == 1 and "DL3006" in found  # it looks: an image without a tag is found


def lint(file: Path) -> tuple[int, str]:
    done = subprocess.run([HADOLINT, "--no-color", str(file)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_the_image_runs_as_a_user_with_a_health_check() -> None:
    text = DOCKERFILE.read_text()
    *_, user = re.findall(r"^USER (\S+)$", text, re.MULTILINE)
    assert user.split(":")[0] not in ("root", "0")
    assert re.search(r"^HEALTHCHECK ", text, re.MULTILINE)
