"""Step `kernels`: what of it needs no GPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from megarl.gpu_test.kernels import LENGTHS, TORCH, TRANSFORMER_ENGINE, attention, checks, compared
from megarl.shadow import device


def test_torchs_kernels_fit_their_references_on_a_cpu_too() -> None:
    found = list(checks("cpu", has_te=False))
    assert [check.ok for check in found] == [True, True, None], found


def test_the_reference_of_attention_is_causal_and_keeps_sequences_apart() -> None:
    query, key, value = (
        torch.randn(sum(LENGTHS), 2, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)
    )
    before = attention(query, key, value)
    changed = value.clone()
    changed[LENGTHS[0]] += 1  # the only token of the second sequence
    after = attention(query, key, changed)
    differs = (before - after).abs().amax((1, 2)) > 0
    assert differs.nonzero().flatten().tolist() == [LENGTHS[0]]
    changed = value.clone()
    changed[LENGTHS[0] - 1] += 1  # the last of the first: nothing earlier sees it
    differs = (before - attention(query, key, changed)).abs().amax((1, 2)) > 0
    assert differs.nonzero().flatten().tolist() == [LENGTHS[0] - 1]


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="it is installed")
def test_a_kernel_that_is_not_there_is_a_check_that_is_wrong() -> None:
    case, tolerance = TRANSFORMER_ENGINE["RMSNorm"]
    check = compared("RMSNorm", lambda: case("cpu"), tolerance)
    assert check.ok is False
    assert "ModuleNotFoundError: No module named 'transformer_engine'" in check.found


def test_transformer_engine_takes_what_it_is_given() -> None:
    """Its own Python code over stand-ins for kernels: arguments and shapes, not a single number."""
    problem = device.missing()
    if problem is not None:
        pytest.skip(problem)
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu_test.shadow_kernels"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    fits = dict(json.loads(line) for line in done.stdout.splitlines())
    assert fits.keys() == {**TORCH, **TRANSFORMER_ENGINE}.keys()
    assert all(fit and all(fit) for fit in fits.values()), fits
