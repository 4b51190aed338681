"""The interface of Transformer Engine's and apex's FusedAdam over torch's own AdamW kernel.

megatron-core 0.19.2 falls back to torch.optim.AdamW where neither is installed, but its distributed
optimizer cannot load a checkpoint in that case: it wants the step count in the parameter group, as the
fused optimizers keep it. With this class the same paths are taken on every machine.
"""

from collections.abc import Callable
from typing import Any

import megatron.core.optimizer
import torch
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015) or, with `adam_w_mode`, AdamW (Loshchilov and Hutter, 2019).

    A parameter group's `step` counts its updates. States are `exp_avg` and `exp_avg_sq`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert not capturable
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert closure is None
        update = adamw if self.adam_w_mode else adam
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in parameters:
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
            states = [self.state[parameter] for parameter in parameters]
            # The kernel adds one to each of these itself.
            steps = [
                torch.tensor(float(group["step"] - 1), device=parameter.device) for parameter in parameters
            ]
            update(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def install() -> None:
    """Let megatron-core find this class where it found neither Transformer Engine nor apex."""
    if not megatron.core.optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = False
    megatron.core.optimizer.Adam = FusedAdam
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    # This switch makes state_dict() give all groups, empty ones too, the common step count.
    distrib_optimizer.USING_TE_OPTIMIZER = True
