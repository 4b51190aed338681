"""Training in float8 on devices without it, and state that a pass leaves behind. tests/shadow/test_float8.py executes the passes."""

import pytest
import torch

from megarl.config.schema.models import MegatronConfig
from megarl.megatron import float8
from megarl.megatron.float8 import float8_settings, forget_float8_weights


def test_a_cpu_has_none() -> None:
    assert float8_settings(MegatronConfig()) == {}
    with pytest.raises(
        ValueError, match=r"megatron\.fp8=e4m3 needs GPUs with Transformer Engine .*: set it to null"
    ):
        float8_settings(MegatronConfig(fp8="e4m3"))


@pytest.mark.parametrize(("start", "ends"), [(0, False), (2, True)])
def test_settings_are_megatrons(monkeypatch: pytest.MonkeyPatch, start: int, ends: bool) -> None:
    monkeypatch.setattr(float8, "check_float8", lambda given: None)
    found = float8_settings(MegatronConfig(fp8="hybrid", num_layers_at_start_in_bf16=start))
    assert found["fp8"] == "hybrid" and found["fp8_recipe"] == "blockwise"
    assert (found["first_last_layers_bf16"], found["num_layers_at_start_in_bf16"]) == (ends, start)


def test_copies_of_weights_go_with_the_pass() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1]._fp8_workspaces = {"weight": torch.zeros(2)}
    forget_float8_weights(module)
    assert module[1]._fp8_workspaces == {}
