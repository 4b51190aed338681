"""Where a version's slices lie in SGLang's model, and what is set beside them.

Written against sglang 0.5.21.
"""

from collections.abc import Mapping, Sequence

import torch

from megarl.layout.boxes import Box
from megarl.weight_sync.packets import Slice


class RefusedError(ValueError):
    """A share or a slice that must not be served."""


def renew_derived(model: torch.nn.Module) -> None:
    """Recompute what the model keeps beside its parameters: latent attention's absorbed projections.

    SGLang's models have a method for it. SGLang calls it after its own loaders, but not after a custom one (0.5.21).
    """
    renew = getattr(model, "post_load_weights", None)
    if renew is not None:
        renew()


def set_cache_scales(model: torch.nn.Module) -> None:
    """Scales of the cache of keys and values are 1, as SGLang itself has them where a folder has none.

    They are parameters of a model in float8. Until they are set they hold what a model without a folder begins with, random numbers,
    or what lies in memory that was released and taken back; SGLang takes what is above 0 for a scale (0.5.21,
    layers/quantization/kv_cache.py).
    """
    for parameter in model.parameters():
        if getattr(parameter, "_skip_weight_check", False):
            parameter.fill_(1.0)


def place(item: Slice, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The part of the model that a slice fills: a view.

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
    """The model's parameters by name, which are those of a model without adapters.

    A layer that SGLang gave adapters has the layer that it was within it, as `base_layer` (sglang 0.5.21).
    """
    return {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that a version fills: all but those that SGLang's own check of weights leaves out, too.

    These are scales of the KV cache, which a model in float8 has as parameters (sglang 0.5.21).
    """
    parameters = named_weights(model).items()
    return {name: value for name, value in parameters if not getattr(value, "_skip_weight_check", False)}


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
    """Whether any two boxes of a tensor have an element in common."""
    ordered = sorted(boxes)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box.start and other.start[0] >= box.start[0] + box.size[0]:
                break  # so do all that follow
            if box.intersect(other) is not None:
                return True
    return False
