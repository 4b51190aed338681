"""The CUDA device that is there by name only: built once by a C++ compiler, loaded before torch is imported.

Imports no torch: the process that loads the device must not have done so either.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from megarl.util.files import whole_file
from megarl.util.packages import requirements

SOURCE = Path(__file__).with_name("device.cpp")
PACKAGES = Path(sys.prefix) / "shadow-packages"


def missing() -> str | None:
    """Why this machine cannot run a shadow, and what to install; None: it can."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "a shadow run needs torch, which is not installed"
    version = importlib.metadata.version("torch")
    if (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return f"a shadow run needs torch's CPU build, which has no CUDA device of its own; installed is torch {version}"
    if shutil.which("g++") is None:
        return "a shadow run compiles its device once, with g++, which is not on the PATH (Debian: apt-get install g++)"
    if not all((PACKAGES / name).is_dir() for name in ("triton", "transformer_engine")):
        # In the environment itself the meta package of Transformer Engine would end megatron-core's import on a CPU.
        return (
            "a shadow run needs the Python code of Triton and Transformer Engine in a folder of their own: "
            f"pip install --no-deps --target {PACKAGES} -r {requirements('shadow')}"
        )
    return None


def load() -> None:
    """Give this process the device, and the packages of the CUDA branch.

    Raises:
        ValueError: something is missing (`missing`), or the device cannot be compiled.
    """
    assert "torch" not in sys.modules, "torch asks for its devices when it is imported"
    problem = missing()
    if problem is not None:
        raise ValueError(problem)
    ctypes.CDLL(str(build(_cache())))
    sys.path.insert(0, str(PACKAGES))
    os.environ["TORCHDYNAMO_DISABLE"] = (
        "1"  # operations that torch.compile would fuse are executed one by one
    )


def build(cache: Path) -> Path:
    """The compiled device for the torch that is installed, from the folder `cache` if it is there already.

    A device finds its torch by the path of the folder that it was compiled against: each environment has one of its own, since another
    environment with the same version may be deleted.

    Raises:
        ValueError: the compiler refused; its first lines are in the message.
    """
    root = _torch_folder()
    source = SOURCE.read_bytes()
    key = hashlib.sha256(source + f"{importlib.metadata.version('torch')} {root}".encode()).hexdigest()[:16]
    library = cache / f"device-{key}.so"
    if library.exists():
        return library
    with whole_file(library) as building:
        command = [
            *("g++", "-O1", "-std=c++20", "-shared", "-fPIC", str(SOURCE), f"-I{root / 'include'}"),
            *(f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}", "-o", str(building)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            first = "\n  ".join(done.stderr.splitlines()[:5])
            raise ValueError(f"g++ could not compile {SOURCE} against torch in {root}:\n  {first}")
    return library


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megarl" / "shadow"
