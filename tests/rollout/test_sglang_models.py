"""SGLang's processes import the models that megarl has, and no others."""

import json
import os
import subprocess
import sys

from megarl.rollout.environment import sglang_environment

FAMILIES = ("DeepseekV3", "Glm4Moe", "Llama", "Qwen2", "Qwen3", "Qwen3Moe")  # in config.json: ...ForCausalLM
# As a scheduler does it. The names of the models' classes, and of all files of models that were imported for them.
SCHEDULER = """
import json, sys
from sglang.srt.models.registry import ModelRegistry
files = [name for name in sys.modules if name.startswith("sglang.srt.models.")]
print(json.dumps([sorted(ModelRegistry.models), files]))
"""


def test_a_scheduler_imports_the_models_of_the_families() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCHEDULER],
        env={**os.environ, **sglang_environment("cpu", 1)},
        capture_output=True,
        text=True,
        check=True,
    )
    classes, files = json.loads(result.stdout.splitlines()[-1])
    assert classes == [f"{name}ForCausalLM" for name in FAMILIES]
    assert len(files) < 40  # of 190
