"""Where SGLang's model holds the slices of a version: parameters, scales of its KV cache, and the slot of its adapters.

SGLang is started with LoRA and given one adapter without values, `ADAPTER_NAME`, which each request asks for. Weight syncs write into
the memory-pool slot that serves it, read it back and compare: no file, no tensor in between, and no second adapter that could
take its slot.

Where a second model drafts tokens, SGLang gives it the model's embedding and head themselves, and its other
parameters have names that begin with DRAFT. Where they are not trained, SGLang loads them from a folder and keeps a copy on the host while
memory is released; no trainer rank has them, and no sync sends them.

Guarantees, each asserted by a test:

- an adapter that left its slot, or has another rank or scaling than the one that is sent, is an error of the sync;
- so is a draft's parameter that no sync fills and that is no longer what was loaded.

Written against sglang 0.5.21.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megarl.layout.boxes import Box
from megarl.models import DRAFT
from megarl.rollout.engine import AdapterConfig
from megarl.weight_sync.packets import Slice
from megarl.weight_sync.slice_kernels import checksums_in_place

ADAPTER_NAME = "policy"
# Attributes of the model: a weight loader gets only the model.
_MANAGER = "_megarl_lora_manager"
_DRAFT = "_megarl_draft_runner"
_LOADED = "_megarl_draft_checksums"


class RefusedError(ValueError):
    """A share or a slice that must not be served."""


def renew_derived(model: torch.nn.Module) -> None:
    """Recompute the tensors that the model derives from its parameters: latent attention's absorbed projections, and the factors of norms
    that multiply by 1 + weight, which some of SGLang's kernels are given (layers/layernorm.py, GemmaRMSNorm).

    SGLang's models have a method for the projections. SGLang calls it after its own loaders, but not after a custom one (0.5.21). The method
    writes into the projections, but makes their scale anew (models/deepseek_common/deepseek_weight_loader.py, float8 by other blocks than
    128 x 128): CUDA graphs would go on reading the scale that was there when they were captured.
    """
    for module in model.modules():
        factor = getattr(module, "gemma_weight", None)
        if factor is not None:
            torch.add(module.get_parameter("weight").data, 1.0, out=factor)
    renew = getattr(model, "post_load_weights", None)
    if renew is not None:
        scales = [(module, getattr(module, "w_scale", None)) for module in model.modules()]
        renew()
        for module, scale in scales:
            made = getattr(module, "w_scale", None)
            if isinstance(scale, torch.Tensor) and isinstance(made, torch.Tensor) and made is not scale:
                module.w_scale = scale.copy_(made)


def set_cache_scales(model: torch.nn.Module) -> None:
    """Set the scales of the KV cache to 1, SGLang's own value for a model folder without scales.

    They are parameters of a model in float8. Until they are set they hold the random numbers of a dummy load, or the contents of memory
    that was released and taken back; SGLang takes any value above 0 for a scale (0.5.21, layers/quantization/kv_cache.py).
    """
    for parameter in model.parameters():
        if getattr(parameter, "_skip_weight_check", False):
            parameter.fill_(1.0)


def place(item: Slice, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The view of the model that a slice fills.

    Raises:
        RefusedError: there is no such parameter or place, or it has another type.
    """
    name, local, box = item.tensor, item.local, item.box
    if local not in targets:
        raise RefusedError(f"{name}: the engine has no parameter {local!r}")
    target, dtype = targets[local], getattr(torch, item.dtype)
    if target.dtype != dtype:
        raise RefusedError(f"{name}: {local} holds {target.dtype}, not {dtype}")
    fits = len(box.start) == len(box.size) == target.dim() and all(
        start >= 0 and size > 0 and start + size <= extent
        for start, size, extent in zip(box.start, box.size, target.shape, strict=True)
    )
    if not fits:
        raise RefusedError(
            f"{name}: {local} has shape {tuple(target.shape)}: no place for start {box.start}, size {box.size}"
        )
    return target.data[box.slices]


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters, by the names that they have in a model without adapters.

    A layer to which SGLang gave adapters wraps the original layer as `base_layer` (sglang 0.5.21). In gpt-oss's experts gate's rows and
    up's alternate: they are views [experts, gate and up, rows, ...], as the weight table names their places.
    """
    found: dict[str, torch.Tensor] = {
        name.replace(".base_layer.", "."): value for name, value in model.named_parameters()
    }
    if type(model).__name__ == "GptOssForCausalLM":
        for name in found:
            if name.endswith((".w13_weight", ".w13_weight_bias")):
                found[name] = found[name].data.unflatten(1, (-1, 2)).transpose(1, 2)
    return found


def clear_biases(model: torch.nn.Module) -> None:
    """Set the biases of experts' outputs to 0 on all but the first of the ranks that share an expert, whose outputs are added up."""
    for layer in model.modules():
        bias = getattr(layer, "w2_weight_bias", None)
        if isinstance(bias, torch.nn.Parameter) and layer.moe_tp_rank:
            bias.zero_()


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that a version fills: all but those that SGLang's own check of weights also leaves out.

    These are the scales of the KV cache, which are parameters of a model in float8 (sglang 0.5.21).
    """
    parameters = named_weights(model).items()
    return {name: value for name, value in parameters if not getattr(value, "_skip_weight_check", False)}


def remember_draft(result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    """After SGLang has made the worker of a draft and loaded its weights: let weight loaders find the draft and the weights' checksums."""
    model, weights = worker.target_worker.model_runner.model, weights_of(worker.draft_runner.model)
    set_draft_runner(model, worker.draft_runner)
    with torch.no_grad():
        sums = checksums_in_place([*weights.values()]).tolist()
    setattr(model, _LOADED, dict(zip(weights, sums, strict=True)))


def set_draft_runner(model: torch.nn.Module, runner: Any) -> None:
    """Store SGLang's runner of the model that drafts tokens in the model."""
    setattr(model, _DRAFT, runner)


def draft_runner_of(model: torch.nn.Module) -> Any:
    """SGLang's runner of the model that drafts tokens; None: there is none."""
    return getattr(model, _DRAFT, None)


def draft_of(model: torch.nn.Module) -> torch.nn.Module | None:
    """The model that drafts tokens."""
    runner = draft_runner_of(model)
    return None if runner is None else runner.model


def draft_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of the model that drafts tokens which a version may fill: all but the ones that it shares with the model."""
    draft, own = draft_of(model), {id(value) for value in model.parameters()}
    found = weights_of(draft).items() if draft is not None else ()
    return {DRAFT + name: value for name, value in found if id(value) not in own}


def verify_draft(model: torch.nn.Module) -> int:
    """Compare a draft's own parameters with what was loaded from its folder; returns their bytes.

    Raises:
        RefusedError: names the first parameter that differs.
    """
    own, loaded = draft_weights(model), getattr(model, _LOADED)
    found = checksums_in_place([*own.values()]).tolist()
    for name, value in zip(own, found, strict=True):
        expected = loaded[name.removeprefix(DRAFT)]
        if value != expected:
            raise RefusedError(
                f"{name}: checksum {value:#x}, {expected:#x} when the draft was loaded: SGLang did not keep it while memory was "
                "released, or something has written into it"
            )
    return sum(value.nbytes for value in own.values())


def check_complete(
    parameters: Mapping[str, torch.Tensor], written: Mapping[str, Sequence[Box]], padding: Mapping[str, int]
) -> None:
    """Check that `written` covers every element once, but for `padding` elements of each parameter.

    Raises:
        RefusedError: names each parameter where it does not.
    """
    wrong = []
    for name, parameter in parameters.items():
        boxes = written.get(name, [])
        if overlap(boxes):
            wrong.append(f"{name}: slices overlap")
        missing = parameter.numel() - sum(box.numel for box in boxes)
        if missing != padding.get(name, 0):
            wrong.append(
                f"{name}: {missing} of {parameter.numel()} elements missing, padding is {padding.get(name, 0)}"
            )
    wrong += [f"{name}: padding of no parameter" for name in padding if name not in parameters]
    if wrong:
        raise RefusedError("the version is incomplete: " + "; ".join(wrong))


def overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes of a tensor share an element."""
    ordered = sorted(boxes)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box.start and other.start[0] >= box.start[0] + box.size[0]:
                break  # so do all boxes that follow
            if box.intersect(other) is not None:
                return True
    return False


def remember_manager(result: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """After SGLang's LoRA manager was made: let weight loaders find it through its model."""
    setattr(manager.base_model, _MANAGER, manager)
    return result


def adapter_arguments(adapters: AdapterConfig, device: str) -> dict[str, Any]:
    """The arguments with which SGLang's engine serves these adapters."""
    return {
        "enable_lora": True,
        "max_loras_per_batch": 1,  # slots: every request asks for the adapter
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


class AdapterSlot:
    """The adapter slot of a model inside SGLang.

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
        """A message if the slot cannot hold adapters of this scaling; None if it can."""
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
    rank]. SGLang does not release it with the weights."""
    manager, found = getattr(model, _MANAGER, None), {}
    for layers in manager.lora_modules if manager is not None else ():
        for name, layer in layers.items():
            of_qkv = hasattr(layer, "A_buffer_qkv")
            found[f"{name}.lora_A"] = layer.A_buffer_qkv if of_qkv else layer.A_buffer
            found[f"{name}.lora_B"] = layer.B_buffer_qkv if of_qkv else layer.B_buffer
    return found
