"""SGLang's class for Qwen3-Next, all of whose norms have the engine's type.

In SGLang 0.5.21 the norms of gated delta nets' outputs have the type that config.json names (srt/models/qwen3_next.py), whatever the
engine's is.
"""

from typing import Any

import torch
from sglang.srt.models import qwen3_next


class Qwen3NextForCausalLM(qwen3_next.Qwen3NextForCausalLM):
    """The name is the one that SGLang looks for."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        config.dtype = torch.get_default_dtype()  # the engine's, while SGLang makes a model
        super().__init__(config, *args, **options)


EntryClass = [Qwen3NextForCausalLM]
