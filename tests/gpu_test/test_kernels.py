"""Step `kernels`: what of it needs no GPU."""

import importlib.util

import pytest
import torch

from megarl.gpu_test.kernels import LENGTHS, TRANSFORMER_ENGINE, attention, checks


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
def test_without_the_package_each_of_its_kernels_is_a_check_that_is_wrong() -> None:
    found = {check.name: check for check in checks("cpu", has_te=True) if check.ok is False}
    assert set(found) == set(TRANSFORMER_ENGINE)
    assert "ModuleNotFoundError: No module named 'transformer_engine'" in found["RMSNorm"].found
