"""Triton kernels of the GPU path, interpreted on a CPU, compared with torch's operators."""

import json
import os
import subprocess
import sys

import pytest
import torch

from megarl.gpu_test.kernels import TRITON, positions
from megarl.gpu_test.pairs import Compared, compared
from megarl.shadow import device

PARTS = {
    "queries", "keys", "values", "gradient of queries", "gradient of keys and values", "gradient of the rotary key",
}  # fmt: skip
PARTS_OF_HEAD = {
    "log-probabilities", "entropies", "gradient of hidden states", "gradient of the weight", "gradient of padding",
}  # fmt: skip
PARTS_OF_SLICES = {"slot", "checksums", "parameters", "checksums of parameters"}


@pytest.mark.skipif(
    not (device.PACKAGES / "triton").is_dir(), reason="Triton is not installed for shadow runs"
)
def test_kernels_compute_what_torch_does() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megarl.gpu_test.kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(TRITON)
    for check in found:
        assert check["ok"], check
    rotary, second, head, rounded, slices, draws, exact = (check["figures"] for check in found)
    assert set(rotary) == set(second) == PARTS
    assert set(head) == set(rounded) == PARTS_OF_HEAD
    assert {name.partition(" 0 x")[0] for name in slices if " 0 x" in name} == PARTS_OF_SLICES
    computed = {name.partition(" of computed")[0] for name in slices if "computed" in name}
    assert computed == PARTS_OF_SLICES
    assert set(exact) == {
        f"{case} of (40, 300) torch.{dtype}"
        for case, dtype in ((1, "bfloat16"), (3, "bfloat16"), (3, "float32"))
    }
    assert set(draws) == {
        f"{what} of 3 x 5000, {dtype}"
        for what in ("tokens", "log-probs")
        for dtype in ("float32", "bfloat16")
    }


def test_a_rank_has_a_chunk_from_each_end_of_every_sequence() -> None:
    assert positions((8, 4), 0, 2).tolist() == [0, 1, 6, 7, 0, 3]
    assert positions((8, 4), 1, 2).tolist() == [2, 3, 4, 5, 1, 2]
    assert positions((2, 1), 0, 1).tolist() == [0, 1, 0]


def test_what_differs_or_raises_is_no_success() -> None:
    one = torch.tensor([1.0, 2.0])
    assert compared("same", lambda: [Compared("a", one, one)], 1e-6).ok
    assert not compared("other", lambda: [Compared("a", one, one), Compared("b", one + 0.1, one)], 1e-2).ok
    assert not compared("nan", lambda: [Compared("a", one * torch.nan, one)], 1e-2).ok
    assert not compared("shape", lambda: [Compared("a", one[:1], one)], 1e-2).ok
    assert not compared("nothing", lambda: [], 1e-2).ok

    def broken():
        yield Compared("a", one, one)
        raise RuntimeError("an illegal memory access")

    check = compared("raises", broken, 1e-2)
    assert check.ok is False and "RuntimeError: an illegal memory access" in check.found
