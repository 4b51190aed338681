"""What is checked before SGLang is started."""

import json
import os
import threading
from dataclasses import replace

import pytest
import torch

from megarl.rollout.engine import EngineConfig
from megarl.rollout.sglang import start as sglang_start
from megarl.rollout.sglang.start import check_version, config_overrides, read_model, server_arguments


def test_an_unknown_version_of_sglang_is_refused(monkeypatch, caplog):
    check_version(allow_unknown=False)
    monkeypatch.setattr(sglang_start, "version", lambda name: "0.9.9")
    with pytest.raises(
        ValueError, match=r"sglang 0\.9\.9 .*known to work with 0\.5\.21.*allow_unknown_version"
    ):
        check_version(allow_unknown=False)
    check_version(allow_unknown=True)
    assert "sglang 0.9.9 is installed" in caplog.text


GPU = EngineConfig("/model", device="cuda", dtype="bfloat16", context_length=64)


@pytest.mark.parametrize(
    ("capability", "backend"), [((9, 0), None), ((10, 0), "triton"), ((12, 0), "triton")]
)
def test_scales_in_float8_stay_in_float32_on_every_gpu(monkeypatch, capability, backend):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    config = replace(GPU, fp8_block=(128, 128))
    assert server_arguments(config, {}).get("fp8_gemm_runner_backend") == backend
    assert "fp8_gemm_runner_backend" not in server_arguments(GPU, {})


def test_what_a_start_on_gpus_is_busy_with_is_in_the_log():
    assert server_arguments(GPU, {})["log_level"] == "warning"


def test_a_start_on_gpus_changes_the_environment_that_schedulers_inherit(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    seen = []

    def start(arguments, timeout):
        seen.append((dict(os.environ), timeout))
        raise ValueError("not here")

    monkeypatch.setattr(sglang_start, "start_sglang", start)
    with pytest.raises(ValueError, match="not here"):
        sglang_start.start_owned(replace(GPU, start_timeout=7.0), {}, threading.Event())
    ((environment, timeout),) = seen
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment and timeout == 7.0


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
