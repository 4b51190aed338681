"""Adapters of the two parameters in which transformers 5 has a layer's routed experts, as adapters of single experts.

To a parameter [experts, out, in] PEFT 0.21 (`ParamWrapper`) gives one A [experts * rank, in], expert by expert, and one B
[out, rank * experts], whose columns go rank by rank, with those of all experts side by side. A layer's wrappers lie in each
other: names begin with `mlp.experts.` and `mlp.experts.base_layer.`, in the order in which PEFT met the parameters;
which is which the shapes tell. `gate_up_proj` has gate's rows above up's, so both have the same A.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from megarl.models import ModelConfig
from megarl.models.lora import A, B

PARAMETERS = ("gate_up_proj", "down_proj")
_FUSED = re.compile(rf"((.*\.experts)(?:\.base_layer)*){re.escape(A)}")


class Part(NamedTuple):
    """A tensor within the stored one `stored`: `shape` from `row` on, every `step`-th column from `column` on."""

    stored: str
    shape: tuple[int, ...]
    row: int = 0
    column: int = 0
    step: int = 1


class Adapted(NamedTuple):
    """The adapter of a module: PEFT's name of what it belongs to, and where its tensors A and B are."""

    peft_name: str
    a: Part
    b: Part


def fused_modules(names: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """What of a folder's tensors (name -> shape) is of experts' parameters: the name without A's end -> the layer's
    experts ("model.layers.1.mlp.experts")."""
    found = (_FUSED.fullmatch(name) for name in names)
    return {match[1]: match[2] for match in found if match}


def split_experts(stored: Mapping[str, tuple[int, ...]], config: ModelConfig) -> dict[str, Adapted]:
    """The single experts' adapters by module ("model.layers.1.mlp.experts.3.gate_proj").

    Args:
        stored: name -> shape of a folder's tensors.

    Raises:
        ValueError: B is missing; shapes are not those of a parameter of the model's experts; a parameter is there twice.
    """
    assert config.moe is not None
    count, ffn, hidden = config.moe.num_experts, config.moe.ffn_hidden_size, config.hidden_size
    # (in, out) -> the parameter, and the projections in it with their first rows
    kinds = {
        (hidden, 2 * ffn): ("gate_up_proj", {"gate_proj": 0, "up_proj": ffn}),
        (ffn, hidden): ("down_proj", {"down_proj": 0}),
    }
    modules: dict[str, Adapted] = {}
    for module, experts in fused_modules(stored).items():
        if module + B not in stored:
            raise ValueError(f"missing: {module}{B}")
        a_shape, b_shape = stored[module + A], stored[module + B]
        kind, projections = kinds.get((*a_shape[1:], *b_shape[:-1]), ("", {}))
        if not projections or a_shape[0] != b_shape[-1] or a_shape[0] % count or not a_shape[0]:
            raise ValueError(
                f"{module} has A of shape {a_shape} and B of shape {b_shape}, which are of none of the parameters of "
                f"{count} experts of width {ffn} with hidden_size={hidden}"
            )
        (rows, columns), out = a_shape, b_shape[0]
        rank = rows // count
        for projection, first in projections.items():
            height = out // len(projections)
            for expert in range(count):
                name = f"{experts}.{expert}.{projection}"
                if name in modules or name + A in stored:
                    raise ValueError(f"{name} has an adapter twice, one of them in {module}")
                a = Part(module + A, (rank, columns), row=expert * rank)
                b = Part(module + B, (height, rank), row=first, column=expert, step=count)
                modules[name] = Adapted(f"{experts}.{kind}", a, b)
    return modules
