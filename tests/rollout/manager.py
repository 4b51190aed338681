"""The part of SGLang's LoRAManager that a receiver uses, without SGLang."""

from types import SimpleNamespace

import torch

from megarl.weight_sync.served_model import remember_manager


class Manager:
    """Like SGLang's LoRAManager: one slot, an adapter that is not in it, a layer with q, k and v, and another layer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.base_model = model
        self.loras = {"policy": SimpleNamespace(scaling=1.5)}
        self.memory_pool = SimpleNamespace(uid_to_buffer_id={None: 0})
        qkv = SimpleNamespace(A_buffer_qkv=torch.ones(1, 6, 4), B_buffer_qkv=torch.ones(1, 8, 2))
        self.lora_modules = [
            {"0.qkv": qkv},
            {"1.o": SimpleNamespace(A_buffer=torch.ones(1, 2, 4), B_buffer=torch.ones(1, 4, 2))},
        ]

        remember_manager(None, self)

    def fetch_new_loras(self, uids: set[str | None]) -> None:
        self.memory_pool.uid_to_buffer_id = dict.fromkeys(uids, 0)
