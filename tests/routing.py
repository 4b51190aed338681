"""The experts that Hugging Face's own models choose."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


@torch.no_grad()
def experts_of(model: Any, ids: Sequence[int]) -> np.ndarray:
    """[tokens, layers with experts, top_k] of a sequence, each token's experts of a layer in ascending order."""
    found: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, arguments: found.append(arguments[1]))
        for name, module in model.named_modules()
        if name.endswith("mlp.experts")
    ]
    model(torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    assert len(found) == len(hooks) > 0
    return torch.stack(found, 1).sort(-1).values.numpy()
