"""Step `engine` on a CPU: `python -m tests.gpu_test.cpu_engine FOLDER`, in the environment of an engine's process; prints checks as JSON lines."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from examples.arithmetic import arithmetic_texts
from examples.tiny_model import make_tiny_model
from megarl.gpu_test.engine import use
from megarl.gpu_test.several import TINY
from megarl.rollout.engine import EngineConfig


def main() -> None:
    folder = Path(sys.argv[1])
    make_tiny_model(folder / "model", arithmetic_texts(), **TINY)
    config = EngineConfig(
        str(folder / "model"),
        load_format="auto",
        context_length=128,
        max_total_tokens=4096,
        enable_memory_saver=True,
    )
    for check in use(config, folder, None, prompts=4, tokens=8):
        print(json.dumps(asdict(check)), flush=True)


if __name__ == "__main__":
    main()
