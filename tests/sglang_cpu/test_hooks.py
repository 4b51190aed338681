"""The stand-ins that sglang_cpu supplies, and that it stays out of the way of other processes."""

import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec

import pytest

from megarl.rollout.sglang.before_import import cpu_engine_function
from megarl.sglang_cpu import hooks

SWITCH = "SGLANG_USE_CPU_ENGINE"


def run(code, **environment):
    base = {name: value for name, value in os.environ.items() if name != SWITCH}
    done = subprocess.run(
        [sys.executable, "-c", code], env=base | environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_entry_points_are_installed():
    for group in ("torch.backends", "sglang.srt.plugins"):
        assert "megarl_cpu_sglang" in {entry.name for entry in metadata.entry_points(group=group)}
    assert cpu_engine_function("on_scheduler_start") is hooks.on_scheduler_start
    assert cpu_engine_function("obstacle").__module__ == "megarl.sglang_cpu.batch_invariant"


def test_an_installation_without_an_entry_point_is_named():
    with pytest.raises(
        RuntimeError, match=r"without the entry point speed of group megarl\.cpu_engine.* install it again"
    ):
        cpu_engine_function("speed")


def test_imports_nothing_but_the_standard_library():
    code = "import sys; import megarl.sglang_cpu.hooks; print(sorted({name.split('.')[0] for name in sys.modules}))"
    names = set(run(code).strip("[]").replace("'", "").split(", "))
    # .pth files in site-packages may have imported other modules before
    assert not names & {"torch", "sglang", "triton", "transformers", "ray", "pyarrow", "numpy"}


def test_other_processes_see_no_stand_in():
    code = """
import torch
from importlib.util import find_spec
print(find_spec("sgl_kernel"), getattr(find_spec("triton"), "origin", None))
"""
    assert run(code) == run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_torchvision_imports_and_declares_nms_once():
    code = "import torch, torchvision; print(torch.ops.torchvision.nms.default)"
    assert run(code) == "torchvision.nms.default"


@pytest.mark.skipif(find_spec("sgl_kernel") is not None, reason="the real sgl_kernel is installed")
def test_a_missing_kernel_raises_when_it_is_called():
    code = """
import torch
from sgl_kernel import some_kernel
try:
    some_kernel(1)
except NotImplementedError as error:
    print(error)
"""
    assert run(code, **{SWITCH: "1"}) == "sgl_kernel.some_kernel needs SGLang's compiled CPU kernels"


def test_sglang_does_without_an_nccl_that_is_there():
    """torch's CUDA build brings NCCL also where there is no device; here any loadable library takes its place."""
    code = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
try:
    NCCLLibrary()
except ValueError as error:
    print(error)
"""
    answer = run(code, **{SWITCH: "1", "SGLANG_NCCL_SO_PATH": "libc.so.6"})
    assert answer.splitlines()[-1] == "no NCCL: SGLang runs on the CPU, over gloo"


def test_a_real_module_is_never_shadowed(tmp_path):
    for name in ("sgl_kernel", "triton"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("real = True")
    code = "import torch, sgl_kernel, triton; print(sgl_kernel.real, triton.real)"
    assert run(code, PYTHONPATH=str(tmp_path), **{SWITCH: "1"}) == "True True"


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, after its public description."""
    assert len(data) % 4 == 0
    h = 0
    for at in range(0, len(data), 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 % 2**32
        k = ((k << 15) % 2**32 | k >> 17) * 0x1B873593 % 2**32
        h ^= k
        h = ((h << 13) % 2**32 | h >> 19) * 5 + 0xE6546B64
        h %= 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def test_request_noise_is_murmur3():
    import torch

    from megarl.sglang_cpu.hooks import _murmur_hash32

    assert murmur3(b"test") == 0xBA6BD213  # published test vector
    seeds, positions, columns = [0, 1, 2**62 + 12345, 2**63 - 1], [0, 3, 70000, 2**31 - 1], [0, 1, 151935]
    got = _murmur_hash32(
        torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns)
    ).tolist()
    for seed, position, row in zip(seeds, positions, got, strict=True):
        for column, value in zip(columns, row, strict=True):
            block = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert value == murmur3(block)


def test_experts_of_other_ranks_add_nothing():
    """SGLang's plain-torch experts on two ranks of four experts: the sum over the ranks equals the result of one rank with all experts."""
    from types import SimpleNamespace
    from typing import NamedTuple

    import torch

    from megarl.sglang_cpu.hooks import _present_experts

    class Chosen(NamedTuple):  # the fields of SGLang's StandardTopKOutput
        topk_weights: torch.Tensor
        topk_ids: torch.Tensor
        router_logits: torch.Tensor | None

    def apply_all(layer, x, chosen, config):
        """As `moe_forward_native`: `layer.scale[expert] * x`, weighted and summed; -1 would be the last expert."""
        return (layer.scale[chosen.topk_ids] * chosen.topk_weights)[..., None].mul(x[:, None]).sum(1)

    generator = torch.Generator().manual_seed(0)
    x, scale = torch.randn(5, 3, generator=generator), torch.randn(4, generator=generator)
    ids = torch.tensor([[0, 1], [2, 3], [1, 2], [0, 3], [3, 2]])
    weights = torch.rand(5, 2, generator=generator)
    everywhere = apply_all(SimpleNamespace(scale=scale), x, Chosen(weights, ids, None), None)
    total = torch.zeros_like(x)
    for first in (0, 2):
        local = torch.where((ids >= first) & (ids < first + 2), ids - first, -1)
        layer = SimpleNamespace(scale=scale[first : first + 2])
        total += _present_experts(apply_all, layer, x, Chosen(weights, local, None), None)
    torch.testing.assert_close(total, everywhere)
    nowhere = Chosen(weights, torch.full_like(ids, -1), None)
    assert _present_experts(apply_all, SimpleNamespace(scale=scale), x, nowhere, None).count_nonzero() == 0
