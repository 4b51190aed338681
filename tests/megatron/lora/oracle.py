"""The oracle for adapters: Hugging Face's model with W + scaling B A in place of W, trained by autograd.

It knows nothing of Megatron's layers: weights have the names of the checkpoint's file, transformers' fused experts are put
together from each expert's weights, and a shared adapter is one tensor from which several weights are made.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from megarl.config.schema.commands import OptimConfig
from megarl.config.schema.models import LoraConfig
from megarl.models.config import ModelConfig
from megarl.models.lora import logical_adapters
from tests.megatron.hf import name_in_file, projections_of
from tests.megatron.parity import NUM_TARGETS, sequences

A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


@dataclass(frozen=True)
class Oracle:
    """The oracle's results: the adapters before training, loss and gradient norm of two steps, the first step's gradients.

    `adapters`, `gradients`: by the adapters' names; a shared tensor appears under each name, with the sum as its gradient.
    """

    adapters: dict[str, Tensor]
    history: list[tuple[float, float]]
    gradients: dict[str, Tensor]


def owner(name: str, lora: LoraConfig, num_experts: int) -> str:
    """The name of the tensor that holds the values of `name`: itself, or the adapter that it shares values with."""
    if lora.expert_groups is not None:
        size = num_experts // lora.expert_groups
        name = re.sub(r"experts\.(\d+)\.", lambda found: f"experts.{int(found[1]) // size * size}.", name)
    if lora.shared_a and name.endswith(A):
        name = re.sub(r"\b[kv]_proj", "q_proj", name)
        name = name.replace("up_proj", "gate_proj")
    return name


def train(model: PreTrainedModel, config: ModelConfig, lora: LoraConfig, optim: OptimConfig) -> Oracle:
    """Two steps of AdamW on random adapters of the model."""
    model.requires_grad_(False)
    shapes = logical_adapters(config, lora)
    num_experts = config.moe.num_experts if config.moe else 1
    owners = {name: owner(name, lora, num_experts) for name in shapes}
    weights = _file_weights(model)
    generator = torch.Generator().manual_seed(11)
    leaves = {}
    for name in dict.fromkeys(owners.values()):
        start = 0.1 * torch.randn(shapes[name], generator=generator)
        if name.endswith(MAGNITUDE):
            start = start + weights[name.removesuffix(MAGNITUDE) + ".weight"].norm(dim=1)
        leaves[name] = start.requires_grad_()
    adapters = {name: leaves[owners[name]].detach().clone() for name in shapes}
    adam = torch.optim.AdamW(
        [
            {"params": [t for t in leaves.values() if t.dim() > 1], "weight_decay": optim.weight_decay},
            {"params": [t for t in leaves.values() if t.dim() == 1], "weight_decay": 0.0},
        ],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
    )
    history, gradients = [], {}
    for step in range(2):
        adam.zero_grad()
        loss = _loss(model, lambda: _merged(weights, leaves, owners, lora))
        if step == 0:
            gradients = {name: leaves[owners[name]].grad.clone() for name in shapes}
        norm = torch.nn.utils.clip_grad_norm_(list(leaves.values()), optim.clip_grad)
        adam.step()
        history.append((loss, norm.item()))
    return Oracle(adapters, history, gradients)


def _loss(model: PreTrainedModel, make_weights: Callable[[], dict[str, Tensor]]) -> float:
    """The mean loss of all targets; adds its gradients to the adapters' gradients."""
    total = 0.0
    for tokens in sequences():
        ids = torch.tensor([tokens])
        logits = functional_call(model, _in_model(model, make_weights()), (ids,)).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / NUM_TARGETS
        loss.backward()
        total += loss.item()
    return total


def _merged(
    weights: dict[str, Tensor], leaves: dict[str, Tensor], owners: dict[str, str], lora: LoraConfig
) -> dict[str, Tensor]:
    """Every adapted weight: W + scaling B A; with DoRA this is multiplied by m / |W + scaling B A|, with the norm as a constant."""
    alpha = lora.rank if lora.alpha is None else lora.alpha
    scaling = alpha / lora.rank ** (0.5 if lora.use_rslora else 1)
    found = {}
    for name in owners:
        if not name.endswith(A):
            continue
        module = name.removesuffix(A)
        a, b = (leaves[owners[module + kind]] for kind in (A, B))
        merged = weights[module + ".weight"] + scaling * (b @ a)
        if lora.use_dora:
            norm = merged.detach().norm(dim=1)
            merged = (leaves[owners[module + MAGNITUDE]] / norm)[:, None] * merged
        found[module + ".weight"] = merged
    return found


def _file_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's matrices under the names in its file, with a tensor for each projection of each expert."""
    found = {}
    for name, tensor in model.state_dict().items():
        layer, fused, kind = name_in_file(model, name).rpartition("experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            found[layer + fused + kind] = tensor
            continue
        parts = projections_of(model, kind)
        for expert, weight in enumerate(tensor):
            for part, rows in zip(parts, weight.chunk(len(parts)), strict=True):
                found[f"{layer}{fused}{expert}.{part}.weight"] = rows
    return found


def _in_model(model: PreTrainedModel, adapted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The adapted weights in the model's form: experts in one tensor, gate above up."""
    weights = _file_weights(model) | adapted
    found = {}
    for name in model.state_dict():
        layer, fused, kind = name_in_file(model, name).rpartition("experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            if layer + fused + kind in adapted:
                found[name] = adapted[layer + fused + kind]
            continue
        parts = projections_of(model, kind)
        count = len(model.get_parameter(name))
        found[name] = torch.stack(
            [
                torch.cat([weights[f"{layer}{fused}{expert}.{part}.weight"] for part in parts])
                for expert in range(count)
            ]
        )
    return found
