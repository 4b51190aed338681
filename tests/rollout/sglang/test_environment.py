"""What an engine's processes are started with on GPUs."""

import os
from importlib.util import find_spec
from pathlib import Path

from megarl.rollout.sglang.environment import prepare_schedulers, sglang_environment


def test_kernels_in_float8_are_not_compiled_for_every_number_of_tokens():
    """SGLang reads the variable by its own table, which knows no other names."""
    name = "SGLANG_JIT_DEEPGEMM_FAST_WARMUP"
    spec = find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    table = Path(spec.submodule_search_locations[0], "srt", "environ.py").read_text()
    assert f"    {name} = EnvBool(" in table
    assert sglang_environment("cuda", 8)[name] == "1"
    assert name not in sglang_environment("cpu", 8)


def test_the_memory_saver_finds_the_runtime_that_torch_has(tmp_path: Path):
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").touch()
    (tmp_path / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    environment = {"LD_LIBRARY_PATH": f"/toolkit/lib{os.pathsep}"}
    for _ in range(2):
        prepare_schedulers(environment, tmp_path)
        assert environment == {"LD_LIBRARY_PATH": f"/toolkit/lib{os.pathsep}{folder}"}
    environment = {}
    prepare_schedulers(environment, tmp_path / "no")
    assert environment == {}


def test_the_allocator_does_not_map_memory_beneath_the_saver():
    settings = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")
    environment = {**settings, "HOME": "/home"}
    prepare_schedulers(environment, Path("/no"))
    assert environment == {"HOME": "/home"}
