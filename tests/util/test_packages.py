"""The packages that megarl imports are installed by its metadata and requirements/cpu.txt."""

import re
import sys
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from megarl.util import packages
from megarl.util.packages import KNOWN, PURPOSES, install_command, installed, pinned, require, requirements
from tests.sources import ROOT, modules, source_of
from tests.test_repository import pins

# Imported only if the user asks for a data set of the Hub or for a weight sync by NIXL, with a message of its own; and for figures of a GPU's
# driver, if the package is installed.
OPTIONAL = {"datasets", "nixl", "pynvml"}
IN_ENGINES = ("megarl/trainer/workers/agents.py", "megarl/environments/openenv.py")


distributions = cache(packages_distributions)  # it reads the lists of all files of all packages


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_package_that_is_imported_is_required() -> None:
    by_module = distributions() | {"fla": ["fla-core"]}  # only shadow runs look for it
    names = {name.split(".")[0] for path in modules() for _, name in source_of(path).imports}
    names -= {*sys.stdlib_module_names, "megarl", *OPTIONAL}
    needed = {normal(package) for name in names for package in by_module.get(name, [name])}
    assert {"torch", "megatron-core", "sglang", "pyyaml"} <= needed
    files = (requirements("cpu"), requirements("shadow"))
    assert needed - {normal(name) for file in files for name in pinned(file)} == set()


def test_the_wheel_requires_what_is_imported_but_megatron_and_sglang() -> None:
    """Each is required directly, because a package that brings another one may stop doing so. Transformer Engine and Triton are parts of the GPU
    image. The rooms rollout/ and gateway/ and the files of `IN_ENGINES` run in the processes of SGLang's engines, with the packages that SGLang
    brings; the imports of shadow/ are in requirements/shadow.txt."""
    by_module = distributions()
    files = [path for path in modules() if not {"rollout", "gateway", "shadow"} & set(path.parts)]
    files = [path for path in files if path.relative_to(ROOT).as_posix() not in IN_ENGINES]
    names = {name.split(".")[0] for path in files for _, name in source_of(path).imports}
    names -= {
        *sys.stdlib_module_names,
        "megarl",
        "megatron",
        "sglang",
        "transformer_engine",
        "triton",
        *OPTIONAL,
    }
    core = (ROOT / "setup.py").read_text().partition("CORE = [")[2].partition("\n]")[0]
    required = {normal(name) for name in re.findall(r'^    "([\w.-]+)', core, re.MULTILINE)}
    assert {normal(package) for name in names for package in by_module[name]} - required == set()


def test_the_command_installs_what_these_tests_run_on() -> None:
    pinned_versions = pins("runtime.txt") | pins("cpu.txt")
    assert {normal(name) for name in pinned(requirements("cpu"))} == pinned_versions.keys()
    assert {name: version(name).split("+")[0] for name in pinned_versions} == pinned_versions, "make install"
    assert all(version(name).startswith(KNOWN[name]) for name in KNOWN)


def test_readme_has_the_command() -> None:
    command = install_command(on_gpus=False)
    options = command.partition("pip install")[2].partition(" -r ")[0]
    assert f'pip install{options} -r "$(megarl requirements cpu)"' in (ROOT / "README.md").read_text()


def test_what_is_missing_is_named_with_its_purpose_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    require(list(PURPOSES))
    monkeypatch.setattr(packages, "installed", lambda name: None if name == "sglang" else installed(name))
    require(["megatron-core"])
    with pytest.raises(
        ValueError, match=r"not installed: sglang \(rollouts, evaluation\); without a GPU: .* -m pip install"
    ):
        require(["megatron-core", "sglang"])
    assert installed("no-such-package-at-all") is None


def test_included_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("# a==1\n-r two.txt\nb[x]==1\nc==2; python_version < '4'\n")
    (tmp_path / "two.txt").write_text("d_e.f==3\n")
    assert list(pinned(tmp_path / "one.txt")) == ["d_e.f", "b", "c"]
