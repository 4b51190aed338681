"""SGLang's processes import megarl's models and no others, and derive the right context from a model's config.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.models import read_model_config
from megarl.rollout.sglang.before_import import sglang_environment
from tests.models.published import CONFIGS

# In config.json these names end with ForCausalLM.
FAMILIES = (
    "DeepseekV2",  # takes the place of DeepseekV32 and GlmMoeDsa where there is no GPU
    "DeepseekV32",
    "DeepseekV3",
    "Glm4Moe",
    "Glm4MoeLite",
    "GlmMoeDsa",
    "GptOss",
    "Llama",
    "MiniMaxM2",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Qwen3Next",
    "Qwen3_5",
    "Qwen3_5Moe",
)
# Prints the names of the model classes that a scheduler imports, all model files that were imported for them, and the context that
# SGLang derives from each config.json.
SCHEDULER = """
import json, sys
from sglang.srt.models.registry import ModelRegistry
classes = sorted(ModelRegistry.models)
files = [name for name in sys.modules if name.startswith("sglang.srt.models.")]
from sglang.srt.utils.hf_transformers import get_config, get_context_length, get_hf_text_config
configs = [get_hf_text_config(get_config(path, trust_remote_code=False)) for path in sys.argv[1:]]
print(json.dumps([classes, files, [*map(get_context_length, configs)]]))
"""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with a config.json each: published ones, and some whose fields take precedence over max_position_embeddings or scale it."""
    qwen = next(config for config in CONFIGS.values() if config["model_type"] == "qwen2")
    llama = next(config for config in CONFIGS.values() if config["model_type"] == "llama")
    configs = [
        config for config in CONFIGS.values() if config["model_type"] != "kimi_k2"
    ]  # not in transformers
    configs += [
        {**qwen, "model_max_length": 5000},
        {**qwen, "max_sequence_length": 6000, "model_max_length": 5000},
        {**qwen, "rope_scaling": YARN},
        {**qwen, "rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 1e6}},
        {**llama, "max_position_embeddings": 9000, "rope_scaling": LLAMA3},
    ]
    folders = [tmp_path_factory.mktemp("model") for _ in configs]
    for folder, config in zip(folders, configs, strict=True):
        (folder / "config.json").write_text(json.dumps(config))
    return folders


@pytest.fixture(scope="module")
def scheduler(folders: list[Path]) -> tuple[list[str], list[str], list[int]]:
    """The output of `SCHEDULER`, from one process with SGLang."""
    result = subprocess.run(
        [sys.executable, "-c", SCHEDULER, *map(str, folders)],
        env={**os.environ, **sglang_environment("cpu", 1)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


def test_a_scheduler_imports_the_models_of_the_families(scheduler) -> None:
    classes, files, _ = scheduler
    assert classes == [f"{name}ForCausalLM" for name in FAMILIES]
    assert len(files) < 40  # of 190


def test_the_context_of_a_model_is_what_sglang_derives(scheduler, folders: list[Path]) -> None:
    *_, derived = scheduler
    assert [read_model_config(str(folder)).context_length[1] for folder in folders] == derived
    assert derived[-5:-3] == [5000, 6000] and len(set(derived)) > 5
