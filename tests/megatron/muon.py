"""Muon by its definition, in plain torch over Hugging Face's models, next to torch's own AdamW."""

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel

from megarl.config.schema.models import OptimConfig

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # K. Jordan's coefficients, from modded-nanogpt's train_gpt_medium.py


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """The Newton-Schulz iteration by its formula, in float64."""
    x = matrix.double() / matrix.double().norm()
    for a, b, c in QUINTIC:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


class PlainMuon:
    """Steps of a model with clipping: Muon for the matrices of its layers, AdamW for the other weights."""

    def __init__(self, model: PreTrainedModel, optim: OptimConfig) -> None:
        self.model, self.optim = model, optim
        owned = {id(weight) for weights in self._matrices() for weight, _ in weights}
        others = [weight for weight in model.parameters() if id(weight) not in owned]
        groups = [
            {"params": [weight for weight in others if (weight.dim() > 1) == decays], "weight_decay": decay}
            for decays, decay in ((True, optim.weight_decay), (False, 0.0))
        ]
        self.adam = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
        self.momenta: list[torch.Tensor] = []

    def _matrices(self) -> Iterator[list[tuple[torch.nn.Parameter, Callable[[torch.Tensor], torch.Tensor]]]]:
        """For each of Megatron's matrices, the weights that it stacks by rows (gate and up), each with a function to its part (an expert)."""
        named = dict(self.model.named_parameters())
        for name, weight in named.items():
            if not name.startswith("model.layers.") or weight.dim() < 2 or name.endswith("up_proj.weight"):
                continue
            if weight.dim() == 3:
                for expert in range(len(weight)):
                    yield [(weight, lambda tensor, expert=expert: tensor[expert])]
            elif name.endswith("gate_proj.weight"):
                up = named[name.replace("gate_proj", "up_proj")]
                yield [(weight, lambda tensor: tensor), (up, lambda tensor: tensor)]
            else:
                yield [(weight, lambda tensor: tensor)]

    @torch.no_grad()
    def step(self) -> float:
        """Returns: the gradient's norm before clipping."""
        optim, muon = self.optim, self.optim.muon
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip_grad)
        self.adam.step()
        for index, weights in enumerate(self._matrices()):
            gradient = torch.cat([part(weight.grad) for weight, part in weights])
            if len(self.momenta) <= index:
                self.momenta.append(torch.zeros_like(gradient))
            momentum = self.momenta[index]
            momentum.mul_(muon.momentum).add_(gradient, alpha=1 - muon.momentum)
            mean = (1 - muon.momentum) * gradient + muon.momentum * momentum if muon.nesterov else momentum
            update = muon.scale * max(mean.shape) ** 0.5 * orthogonal(mean)
            rows = update.split([len(part(weight)) for weight, part in weights])
            for (weight, part), step in zip(weights, rows, strict=True):
                part(weight).mul_(1 - optim.lr * optim.weight_decay).sub_(optim.lr * step)
        return float(norm)
