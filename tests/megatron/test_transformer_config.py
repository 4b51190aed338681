"""Settings of layers that depend on what is installed."""

from dataclasses import replace

import pytest
import torch

from megarl.layout.grid import ParallelLayout
from megarl.megatron import transformer_config
from megarl.models import read_model_config
from megarl.util.packages import shipped


@pytest.mark.parametrize(
    ("changes", "fused"), [({}, True), ({"v_head_dim": 96}, False), ({"qk_rope_head_dim": 48}, False)]
)
def test_latent_attentions_rotary_kernel_takes_powers_of_two_alone(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], fused: bool
) -> None:
    """Its ranges are widths of queries and values; of others Triton says so when it compiles, in the first forward pass."""
    monkeypatch.setattr(transformer_config, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(transformer_config, "MLATransformerConfig", dict)
    config = read_model_config(str(shipped() / "recipes" / "models" / "deepseek-v3"))
    config = replace(config, mla=replace(config.mla, **changes))
    settings = transformer_config.transformer_config(config, ParallelLayout(world=1), torch.bfloat16, None)
    assert settings["apply_rope_fusion"] is fused
