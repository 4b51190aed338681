"""Sampling by seed on a GPU: the Triton kernels, interpreted on a CPU (`interpreted_sampling`), draw the tokens of SGLang's own functions,
and are compiled for an H100."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.rollout.sglang import sampling
from megarl.rollout.sglang.before_import import sglang_environment
from megarl.shadow import device

needs_triton = pytest.mark.skipif(
    not (device.PACKAGES / "triton").is_dir(), reason="Triton is not installed for shadow runs"
)


def cases(how: str, folder: Path) -> dict[str, Any]:
    """The result of each case."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder),
        "TORCH_COMPILE_DISABLE": "1",
    }
    environment["TRITON_INTERPRET"] = "1" if how == "interpret" else "0"
    command = [sys.executable, "-W", "ignore", "-m", "tests.rollout.sglang.interpreted_sampling", how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return cases("interpret", tmp_path_factory.mktemp("triton"))


@needs_triton
@pytest.mark.parametrize(
    "case",
    ["sizes_and_types", "seeds_and_positions", "masked_columns", "extreme_logits", "not_a_distribution"],
)
def test_tokens_are_those_of_sglang_and_log_probs_those_of_torch(found: dict[str, Any], case: str) -> None:
    assert found[case] == []


@needs_triton
def test_float64_decides_between_scores_that_float32_cannot_tell_apart(found: dict[str, Any]) -> None:
    ties = found["scores_that_nearly_tie"]
    assert ties["widest"] < 1e-6 and ties["float32 is wrong"] > 5  # of 40
    assert ties["differing"] == []


@needs_triton
def test_float32_nominates_within_its_slack(found: dict[str, Any]) -> None:
    errors = found["all_magnitudes_of_noise"]
    assert errors["usual"] < 1e-5 and errors["others"] < 2**-13


@needs_triton
def test_a_row_depends_on_itself_alone(found: dict[str, Any]) -> None:
    assert found["rows_alone"] == []


@needs_triton
def test_tokens_are_as_frequent_as_they_are_probable(found: dict[str, Any]) -> None:
    # 3 degrees of freedom: 16.3 is exceeded once in a thousand times.
    assert set(found["chi_square"]) == {"seeds", "positions"}
    assert max(found["chi_square"].values()) < 16.3


@needs_triton
def test_sglangs_sampler_draws_the_same_with_the_hook(found: dict[str, Any]) -> None:
    assert found["in_sglangs_sampler"]["equal"] == 1
    assert found["in_sglangs_sampler"]["log-probs"] < 5e-6  # SGLang takes the logarithm of a softmax


@needs_triton
def test_what_the_kernels_do_not_draw_is_left_to_sglang(found: dict[str, Any]) -> None:
    left = found["left_to_sglang"]
    assert len(left) == 8
    assert all(counts == [0, 0] for counts in left.values()), left


class Made(TorchDispatchMode):
    """Records the operations of torch, and the bytes of the tensors that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: set[str] = set()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.operations.add(str(func.overloadpacket))
            self.nbytes += out.nbytes
        return out


class Kernel:
    """Notes its launches, and computes nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.grids.append(grid)


@pytest.mark.parametrize("rows", [1, 256])
def test_a_draw_is_two_launches_and_makes_nothing_of_the_size_of_its_logits(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    kernels = SimpleNamespace(score_blocks=Kernel(), choose=Kernel())
    monkeypatch.setattr(sampling, "kernels", lambda: kernels)
    logits = torch.empty(rows, 151936, device="meta")
    temperatures = torch.empty(rows, 1, device="meta")
    numbers = torch.empty(rows, dtype=torch.int64, device="meta")
    with Made() as made:
        sampling.draw(logits, temperatures, numbers, numbers)
    blocks = -(-151936 // sampling.BLOCK)
    assert (kernels.score_blocks.grids, kernels.choose.grids) == ([(blocks, rows)], [(rows,)])
    assert made.operations == {"aten.new_empty"}
    assert made.nbytes == rows * (blocks * (4 + 4 + 8 + 4) + 4 + 4)


@needs_triton
def test_the_compiler_takes_the_kernels(tmp_path: Path) -> None:
    """Divisions are rounded as torch's are, and no logarithm is the approximate instruction, which has no correct digit near 1."""
    compiled = cases("compile", tmp_path)
    assert len(compiled) == 4
    for name, kernel in compiled.items():
        assert kernel.pop("bytes") > 0
        assert not [what for what in kernel if what.startswith(("lg2", "div.full"))], (name, kernel)


@pytest.mark.slow
def test_only_gpus_have_the_hook() -> None:
    code = "from megarl.rollout.sglang.process import hooks; print(*(set(hooks('cuda', 1)) - set(hooks('cpu', 1))))"
    environment = {**os.environ, **sglang_environment("cpu", 1)}  # allows the import of SGLang here
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "sglang.srt.layers.sampler.Sampler.forward"


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"
)


@pytest.mark.gpu
@needs_gpu
def test_the_host_does_not_wait() -> None:
    rows = (
        torch.randn(8, 5000, device="cuda"),
        torch.ones(8, 1, device="cuda"),
        *torch.ones(2, 8, dtype=torch.int64).cuda(),
    )
    sampling.draw(*rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampling.draw(*rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
