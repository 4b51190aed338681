"""The packages that megarl runs on (tried versions, purposes, the command that installs them), and the folders outside of the
package that come with it.

`pip install` of megarl brings the packages of its metadata. Megatron-core and SGLang are installed separately (setup.py says why).
"""

import importlib.util
import re
import shlex
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

PURPOSES = {
    "torch": "tensors, process groups",
    "megatron-core": "models in their parallel layouts",
    "sglang": "rollouts, evaluation",
    "ray": "the processes of a run",
    "transformers": "tokenizers, model files",
    "pyarrow": "prompts and trajectories",
}
# Tried together (requirements/); the engine refuses any other SGLang itself, and SGLang any other torch.
KNOWN = {
    "torch": ("2.13.",),
    "megatron-core": ("0.19.2",),
    "sglang": ("0.5.21",),
    "ray": ("2.60.",),
}


def installed(name: str) -> str | None:
    """The version of a package; None: it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def requirements(name: str) -> Path:
    """The requirements file of a name, such as "cpu"."""
    return shipped() / "requirements" / f"{name}.txt"


def pinned(file: Path) -> Iterator[str]:
    """The names of the packages in a requirements file and in the files that it includes."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            yield from pinned(file.parent / line.removeprefix("-r ").strip())
        elif found := re.match(r"[\w.-]+(?=(\[.*\])?==)", line):
            yield found[0]


def install_command(on_gpus: bool) -> str:
    """The command that installs the packages that `pip install` of megarl does not bring."""
    if on_gpus:
        return f"install the pins of {requirements('gpu')} as megarl's Dockerfile does"
    python, file = shlex.quote(sys.executable), shlex.quote(str(requirements("cpu")))
    return f"{python} -m pip install --no-deps --ignore-requires-python -r {file}"


def require(names: Collection[str]) -> None:
    """Check that packages are installed.

    Raises:
        ValueError: names the missing packages, their purposes, and the command that installs them.
    """
    missing = [f"{name} ({PURPOSES[name]})" for name in names if installed(name) is None]
    if missing:
        raise ValueError(
            f"not installed: {', '.join(missing)}; without a GPU: {install_command(on_gpus=False)}; on GPUs: "
            f"{install_command(on_gpus=True)}"
        )


def shipped() -> Path:
    """The folder of `examples`, `launch`, `recipes` and `requirements`: `megarl/share` in an installed wheel, the top level in a clone."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "share"
    return installed if installed.is_dir() else package.parent


def example(name: str) -> ModuleType:
    """A module of `examples/`, such as "tiny_model". The folder is on no search path, so its package is loaded from its file."""
    if "examples" not in sys.modules:
        folder = shipped() / "examples"
        spec = importlib.util.spec_from_file_location("examples", folder / "__init__.py")
        assert spec is not None and spec.loader is not None, folder
        package = importlib.util.module_from_spec(spec)
        sys.modules["examples"] = package
        spec.loader.exec_module(package)
    return importlib.import_module(f"examples.{name}")
