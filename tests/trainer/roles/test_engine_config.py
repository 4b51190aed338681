"""What an engine is started with, from a run's configuration."""

from dataclasses import replace

import pytest

from megarl.config import RolloutConfig
from megarl.trainer.roles.engine_config import engine_config

ROLLOUT = RolloutConfig(tensor_model_parallel_size=2, expert_parallel_size=1, nodes_per_engine=1)


@pytest.mark.parametrize(("use_gpu", "device", "dtype", "seconds"), [(True, "cuda", "bfloat16", 1800), (False, "cpu", "float32", 300)])  # fmt: skip
def test_a_start_on_gpus_may_compile_kernels(use_gpu: bool, device: str, dtype: str, seconds: float) -> None:
    found = engine_config(ROLLOUT, "/model", 64, use_gpu=use_gpu, synced=True)
    assert (found.device, found.dtype, found.start_timeout) == (device, dtype, seconds)
    told = engine_config(replace(ROLLOUT, start_timeout=9.0), "/model", 64, use_gpu=use_gpu, synced=False)
    assert (told.start_timeout, told.load_format) == (9.0, "auto")
