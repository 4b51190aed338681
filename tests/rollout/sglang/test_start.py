"""What is checked before SGLang is started."""

import os
import threading
from dataclasses import replace

import pytest
import torch

from megarl.rollout.engine import EngineConfig
from megarl.rollout.sglang import start as sglang_start
from megarl.rollout.sglang.start import check_version, server_arguments


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
