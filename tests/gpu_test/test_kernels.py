"""The parts of step `kernels` that need no GPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from megarl.gpu_test import family_kernels
from megarl.gpu_test.kernels import TORCH, TRANSFORMER_ENGINE, checks, fla_checks
from megarl.gpu_test.pairs import LENGTHS, attention, compared
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
    changed[LENGTHS[0] - 1] += 1  # the last token of the first sequence: no earlier token attends to it
    differs = (before - attention(query, key, changed)).abs().amax((1, 2)) > 0
    assert differs.nonzero().flatten().tolist() == [LENGTHS[0] - 1]


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="it is installed")
def test_a_kernel_that_is_not_there_is_a_check_that_is_wrong() -> None:
    case, tolerance = TRANSFORMER_ENGINE["RMSNorm"]
    check = compared("RMSNorm", lambda: case("cpu"), tolerance)
    assert check.ok is False
    assert "ModuleNotFoundError: No module named 'transformer_engine'" in check.found


def test_transformer_engine_takes_what_it_is_given() -> None:
    """Transformer Engine's own Python code runs over stand-ins for kernels, which check arguments and shapes but no numbers."""
    problem = device.missing()
    if problem is not None:
        pytest.skip(problem)
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu_test.shadow_kernels"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    fits = dict(json.loads(line) for line in done.stdout.splitlines())
    assert fits.keys() == {**TORCH, **TRANSFORMER_ENGINE, **family_kernels.TRANSFORMER_ENGINE}.keys()
    assert all(fit and all(fit) for fit in fits.values()), fits


@pytest.mark.parametrize("window", [None, 32])
def test_the_reference_of_attention_with_sinks_is_that_of_transformers(window: int | None) -> None:
    """transformers' attention of gpt-oss, sequence by sequence, with its mask."""
    from types import SimpleNamespace

    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    drawn = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 16, generator=drawn) for heads in (8, 2, 2))
    sinks = torch.randn(8, generator=drawn)
    layer = SimpleNamespace(num_key_value_groups=4, sinks=sinks, training=False)
    expected, first = [], 0
    for length in LENGTHS:
        own = [part[first : first + length].transpose(0, 1)[None] for part in (query, key, value)]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        mask = torch.zeros(1, 1, length, length).masked_fill(hidden, -torch.inf)
        expected.append(eager_attention_forward(layer, *own, mask, 16**-0.5)[0][0])
        first += length
    found = attention(query, key, value, sinks, window)
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_kernels_of_gated_delta_nets_are_looked_for() -> None:
    (check,) = fla_checks("cpu", has_fla=False)
    assert check.ok is None and "not installed" in check.found
    if importlib.util.find_spec("fla") is None:
        wrong = list(fla_checks("cpu", has_fla=True))
        assert [check.ok for check in wrong] == [False, False], wrong
