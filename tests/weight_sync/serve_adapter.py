"""SGLang on its own, through its own interface: what it reads from folders of adapters, and generates with them.

It runs in a process of its own: SGLang's environment must be set before torch is imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.rollout.sglang.before_import import sglang_environment


def greedy(
    model: str, adapters: Mapping[str, str], prompts: Sequence[Sequence[int]], num_tokens: int
) -> dict[str, list[list[int]]]:
    """The tokens that SGLang generates greedily after each prompt, by the name of the adapter ("": without one).

    Args:
        adapters: name -> folder.
    """
    return _call("_greedy", model, dict(adapters), [list(prompt) for prompt in prompts], num_tokens)


def target_modules(names: Sequence[Sequence[str]]) -> list[list[str]]:
    """SGLang's reading of each list of `target_modules`, sorted."""
    return _call("_target_modules", [list(each) for each in names])


def _call(function: str, *arguments: Any) -> Any:
    """Call a function of this module in a process with SGLang's environment; it prints its result last."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.weight_sync.serve_adapter", function, json.dumps(arguments)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **sglang_environment("cpu", 1)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _greedy(model: str, adapters: dict[str, str], prompts: list[list[int]], num_tokens: int) -> None:
    import sglang

    engine = sglang.Engine(
        model_path=model,
        lora_paths=adapters,
        max_loras_per_batch=len(adapters) + 1,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        lora_backend="torch_native",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        mem_fraction_static=0.1,
        max_total_tokens=4096,
        log_level="error",
    )
    parameters = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    found = {}
    for name in ("", *adapters):
        path = [name or None] * len(prompts)
        outputs = engine.generate(input_ids=prompts, sampling_params=parameters, lora_path=path)
        found[name] = [output["output_ids"] for output in outputs]
    engine.shutdown()
    print(json.dumps(found), flush=True)


def _target_modules(names: list[list[str]]) -> None:
    from sglang.srt.lora.utils import get_normalized_target_modules

    print(json.dumps([sorted(get_normalized_target_modules(each)) for each in names]))


if __name__ == "__main__":
    {"_greedy": _greedy, "_target_modules": _target_modules}[sys.argv[1]](*json.loads(sys.argv[2]))
