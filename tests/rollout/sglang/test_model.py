"""Which models and layouts are refused before SGLang is started, and what SGLang is told of a model."""

import json

import pytest

from megarl.rollout.engine import EngineConfig
from megarl.rollout.sglang.model import config_overrides, read_model


@pytest.mark.parametrize(
    ("tp", "ep", "change", "message"),
    [
        (4, 3, {}, "expert_parallel_size=3 does not divide tensor_parallel_size=4"),
        (4, 4, {"num_experts": 6}, "expert_parallel_size=4 does not divide num_experts=6"),
        (
            4,
            1,
            {"moe_intermediate_size": 6},
            "tensor_parallel_size / expert_parallel_size=4 does not divide moe_i",
        ),
        (
            4,
            4,
            {"n_shared_experts": 1, "moe_intermediate_size": 6},
            "size=4 does not divide n_shared_experts .*=6",
        ),
        (4, 4, {"first_k_dense_replace": 1}, "tensor_parallel_size=4 does not divide intermediate_size=6"),
        (2, 2, {"num_experts": None}, "expert_parallel_size=2 does not divide number of experts=1"),
    ],
)
def test_experts_that_cannot_be_dealt_out_are_refused(tmp_path, tp, ep, change, message):
    sizes = {"num_attention_heads": 4, "intermediate_size": 6, "num_experts": 8, "moe_intermediate_size": 8}
    model = {name: value for name, value in (sizes | change).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ValueError, match=message):
        read_model(EngineConfig(str(tmp_path), tensor_parallel_size=tp, expert_parallel_size=ep))


def test_sglang_is_told_what_transformers_does_not_write():
    engine = EngineConfig("folder")
    told = config_overrides(engine, {"model_type": "deepseek_v3", "topk_method": "noaux_tc"})
    assert told == {"moe_layer_freq": 1, "scoring_func": "sigmoid"}
    assert config_overrides(engine, {"model_type": "qwen3"}) == {}


def test_the_engine_says_whether_weights_are_quantised():
    """A float8 checkpoint is served as it is; what is synced is what the engine's config says."""
    fp8, plain = {"quantization_config": {"quant_method": "fp8"}}, {"model_type": "qwen3"}
    assert config_overrides(EngineConfig("folder", load_format="auto"), fp8) == {}
    assert config_overrides(EngineConfig("folder"), fp8) == {"quantization_config": None}
    told = config_overrides(EngineConfig("folder", fp8_block=(128, 64)), plain)["quantization_config"]
    assert (told["quant_method"], told["weight_block_size"]) == ("fp8", [128, 64])
