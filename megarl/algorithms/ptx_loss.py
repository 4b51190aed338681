"""The likelihood of texts that a policy goes on learning while it is trained by reinforcement."""

import torch
from torch import Tensor


def ptx_loss(log_probs: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The third term of PPO-ptx's objective (InstructGPT, arXiv:2203.02155, equation 2), negated:

        -ptx_coef E_{x ~ D_pretrain}[log pi(x)],    here a mean over the learnt tokens of a batch of texts.

    Args:
        log_probs: float [tokens]; the policy's, at temperature 1.
        weights: float [tokens]; ptx_coef / the number of learnt tokens of the whole batch, over all ranks.
        mask: bool [tokens]; which are learnt.

    Returns: the loss [], and sums over the learnt tokens: actor/ptx_loss (negative log-likelihood in nats, without the
        weights) and actor/ptx_tokens (their number).
    """
    losses = torch.where(mask, -log_probs, 0.0)
    sums = {"actor/ptx_loss": losses.detach().double().sum(), "actor/ptx_tokens": mask.sum().double()}
    return (losses * weights).sum(), sums
