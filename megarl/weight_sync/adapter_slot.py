"""Low-rank adapters that SGLang serves beside the weights: one set, in one slot of its memory pool.

SGLang is started with LoRA and given one adapter without values, `NAME`, which each request asks for. The slot that it
is served from is what weight syncs write into, read back and compare: no file, no tensor in between, and no second
adapter whose turn it could be.

Guarantee, asserted by a test: an adapter that left its slot, or has another rank or scaling than the one that is sent, is
an error of the sync.

Written against sglang 0.5.21.
"""

import math
from typing import Any

import torch

from megarl.rollout.engine import AdapterConfig

NAME = "policy"
_MANAGER = "_megarl_lora_manager"  # attribute of the model: a weight loader is given nothing but the model


def register() -> None:
    """Called in each scheduler process before SGLang runs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.lora.lora_manager.LoRAManager.init_memory_pool", remember_manager, HookType.AFTER
    )


def remember_manager(result: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Let weight loaders find the manager through its model."""
    setattr(manager.base_model, _MANAGER, manager)
    return result


def server_arguments(adapters: AdapterConfig, device: str) -> dict[str, Any]:
    """The arguments of SGLang's engine with which it serves these adapters."""
    return {
        "enable_lora": True,
        "max_loras_per_batch": 1,  # slots: nothing is asked for without the adapter
        "max_lora_rank": adapters.rank,
        "lora_target_modules": list(adapters.layers),
        **({"lora_backend": "torch_native"} if device == "cpu" else {}),
    }


def empty_adapter(adapters: AdapterConfig) -> dict[str, Any]:
    """adapter_config.json of the adapter without values."""
    return {
        "peft_type": "LORA",
        "r": adapters.rank,
        "lora_alpha": adapters.scaling * adapters.rank,
        "target_modules": list(adapters.layers),
    }


class Slot:
    """The slot of a model inside SGLang.

    Attributes:
        tensors: "<layer>.lora_A" -> A [stacked * rank, in], "<layer>.lora_B" -> B [out, rank], as they are served.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Puts the adapter into its slot, where it stays."""
        self._manager = getattr(model, _MANAGER)
        (self._uid,) = self._manager.loras
        self._manager.fetch_new_loras({self._uid})
        self._number = self._manager.memory_pool.uid_to_buffer_id[self._uid]
        self.tensors = {name: buffer[self._number] for name, buffer in buffers_of(model).items()}

    def problem(self, scaling: float) -> str | None:
        """What is wrong with the slot, for adapters of this scaling; None: nothing."""
        if self._manager.memory_pool.uid_to_buffer_id != {self._uid: self._number}:
            return "SGLang took the adapters out of their slot"
        served = self._manager.loras[self._uid]
        if not math.isclose(served.scaling, scaling, rel_tol=1e-9):
            return f"the engine scales adapters by {served.scaling:g}, the trainer by {scaling:g}"
        return None


def has_slot(model: torch.nn.Module) -> bool:
    """Whether the engine was started with adapters."""
    return hasattr(model, _MANAGER)


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All memory for adapters: "<layer>.lora_A" -> A by slot [slots, stacked * rank, in], "<layer>.lora_B" -> B [slots, out,
    rank]. None of it is part of what SGLang releases with the weights."""
    manager, found = getattr(model, _MANAGER, None), {}
    for layers in manager.lora_modules if manager is not None else ():
        for name, layer in layers.items():
            of_qkv = hasattr(layer, "A_buffer_qkv")
            found[f"{name}.lora_A"] = layer.A_buffer_qkv if of_qkv else layer.A_buffer
            found[f"{name}.lora_B"] = layer.B_buffer_qkv if of_qkv else layer.B_buffer
    return found
