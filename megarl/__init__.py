"""megarl: reinforcement learning for language models on Megatron-core, SGLang and Ray.

The Python API: `Trainer`, `DataCollector`, `make_trainer_config` (see megarl.api.trainer).

Importing this package imports nothing else, until one of these names is used: SGLang's and torch's plugin entry points
load `megarl.sglang_cpu.hooks` while torch itself is still being imported.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_API = {
    "DataCollector": "megarl.api.trainer",
    "Trainer": "megarl.api.trainer",
    "make_trainer_config": "megarl.api.config",
}
__all__ = ["DataCollector", "Trainer", "__version__", "make_trainer_config"]


def __getattr__(name: str) -> Any:
    """The names of the API, each from its module (PEP 562)."""
    if name not in _API:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    return getattr(importlib.import_module(_API[name]), name)
