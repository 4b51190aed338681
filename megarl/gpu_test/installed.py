"""Step `installed`: installed packages and cards, and whether the packages of the GPU path can be imported."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megarl.doctor.nodes import FAILURE, OK, NodeFacts, check_node, node_facts
from megarl.gpu_test.runner import Check
from megarl.gpu_test.steps import ENGINE, Machine, machine_here

GIB = 1 << 30
IMPORT_SECONDS = 150.0  # limit of a command here, which mostly imports
# Package -> modules imported of it. flash_attn is not among them: Transformer Engine decides whether it takes one.
MODULES = {
    "transformer-engine": "transformer_engine.pytorch",
    "fla-core": "fla.ops.gated_delta_rule",
    "sglang-kernel": "sgl_kernel",
    "torch-memory-saver": "torch_memory_saver",
    "sglang": "sglang.srt.entrypoints.engine",
    "megatron-core": "megatron.core.extensions.transformer_engine",
    "ray": "ray",
}
# Modules of packages whose names on the index differ from version to version: reported whether found or not.
OTHERS = ("deep_gemm", "flashinfer", "flash_attn", "amp_C", "fused_weight_gradient_mlp_cuda")


def run(folder: Path) -> Iterator[Check]:
    machine = machine_here()
    yield from findings(node_facts(".", ""), machine)
    yield from _cards()
    yield _nvidia_smi()
    yield from imports(machine)
    for module in OTHERS:
        yield imported(module, required=False)
    yield _layers()


def findings(facts: NodeFacts, machine: Machine) -> Iterator[Check]:
    """What `megarl doctor` finds here, on the cards that CUDA shows. Where engines are left out, SGLang and its packages may be missing."""
    spared = ("sglang", "what these import") if machine.trains_only else ()
    for finding in check_node(replace(facts, gpus=machine.gpus), len(machine.gpus), {}):
        wrong = finding.level == FAILURE and finding.what not in spared
        text = f"{finding.found}; {finding.advice}" if finding.advice else finding.found
        yield Check(finding.what, False if wrong else True if finding.level == OK else None, text)


def imports(machine: Machine) -> Iterator[Check]:
    """The packages of the GPU path; where engines are left out, SGLang's need not be importable."""
    for package, module in MODULES.items():
        if package in machine.versions:
            yield imported(module, required=not (machine.trains_only and package in ENGINE))
        else:
            yield Check(f"import {module}", None, f"{package} is not installed")


def imported(module: str, *, required: bool) -> Check:
    """Import a module in a process of its own: a broken module must not end this process."""
    begun = time.monotonic()
    # torch first: extensions that setuptools has built know no path to its libraries (torch 2.13.0, utils/cpp_extension.py).
    code = f"import torch, {module} as m; print('at', m.__file__, getattr(m, '__version__', ''))"
    try:
        done = _run(sys.executable, "-c", code)
    except subprocess.TimeoutExpired:
        return Check(f"import {module}", False, f"not done after {IMPORT_SECONDS:.0f} s")
    seconds = time.monotonic() - begun
    if done.returncode == 0:
        place = next((line for line in done.stdout.splitlines() if line.startswith("at ")), "")
        return Check(f"import {module}", True, f"{seconds:.1f} s, {place}", {"seconds": seconds})
    return Check(f"import {module}", False if required else None, _last_line(done))


def _last_line(done: subprocess.CompletedProcess) -> str:
    """The last line of a process's errors, if a signal has not ended it without any."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"no message, exit code {done.returncode}"


def _run(*command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False)


def _cards() -> Iterator[Check]:
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        yield Check(
            f"cuda:{number}",
            None,
            f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.multi_processor_count} multiprocessors, "
            f"{free / GIB:.1f} of {total / GIB:.1f} GiB free, UUID {facts.uuid}",
            {"free": free, "total": total},
        )
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if pairs:
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        yield Check("GPUs reach each other", None, f"not: {apart}" if apart else "all pairs do")
    yield Check("NCCL", None, ".".join(map(str, torch.cuda.nccl.version())))
    yield cudnn(torch.backends.cudnn.version)
    x = torch.randn(1024, 1024, device="cuda")
    exact = x.cpu().double() @ x.cpu().double()
    error = float(((x @ x).cpu().double() - exact).abs().max() / exact.abs().max())
    yield Check("a product of matrices", error < 1e-2, f"largest difference {error:.1e}")


def cudnn(version: Callable[[], int | None]) -> Check:
    """`version`: torch's function, which raises where the library that was found first is not the one that torch was built with."""
    try:
        return Check("cuDNN", None, str(version()))
    except RuntimeError as error:
        advice = (
            "the folder of torch's own (nvidia/cudnn/lib, next to torch) has to come first in LD_LIBRARY_PATH"
        )
        return Check("cuDNN", False, f"{error}; {advice}")


def _nvidia_smi() -> Check:
    fields = "name,uuid,driver_version,vbios_version,pcie.link.gen.max,pcie.link.width.max,mig.mode.current,power.limit"
    done = _run("nvidia-smi", f"--query-gpu={fields}", "--format=csv")
    return Check("nvidia-smi", None, done.stdout.strip() or done.stderr.strip())


def _layers() -> Check:
    """Whose layers models are made of: Megatron-core turns any error of Transformer Engine's import into "is not there"."""
    code = "from megarl.megatron.transformer_config import has_transformer_engine as has; print('has', has())"
    done = _run(sys.executable, "-c", code)
    there = "transformer-engine" in machine_here().versions
    if done.returncode:
        return Check("layers of models", False, _last_line(done))
    used = "has True" in done.stdout
    text = "Transformer Engine's" if used else "megarl's own in torch: slower"
    return Check("layers of models", used if there else None, text)
