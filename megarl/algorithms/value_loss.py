"""The critic's loss on packed tokens; sums and masks as in policy_loss."""

import torch
from torch import Tensor

from megarl.algorithms.policy_loss import Sums


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, Sums]:
    """Clipped squared error (the `ppo2` of OpenAI Baselines), summed with `weights`.

    A token's loss is 0.5 * max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2), so a value does not gain
    from moving further than `clip` from the one that made the advantages; clip None: 0.5 * (v - R)^2.

    Args: all [tokens]; values carry the gradient; old_values and returns are the ones that the advantages were computed with.
    Sums: critic/vf_loss (weighted loss); over live tokens: critic/tokens, critic/vf_clipfrac, critic/vpred (the
    values), and the moments of returns and of returns - old_values for the explained variance.
    """
    assert clip is None or clip > 0.0, f"the value clip range {clip} must be above 0"
    zero = values.new_zeros(())
    values, old_values = torch.where(mask, values, zero), torch.where(mask, old_values, zero)
    returns, weights = torch.where(mask, returns, zero), torch.where(mask, weights, zero)

    losses = (values - returns).square()
    clipped_count = mask.new_zeros((), dtype=torch.int64)
    if clip is not None:
        # Not old_values + clamped difference: rounding would move values within the range, and count them as clipped.
        near = values.clamp(old_values - clip, old_values + clip)
        clipped_losses = (near - returns).square()
        clipped_count = (mask & (clipped_losses > losses)).sum()
        losses = torch.maximum(losses, clipped_losses)
    loss = 0.5 * (weights * losses).sum()

    target, residual = returns.double(), returns.double() - old_values.double()
    sums = {
        "critic/vf_loss": loss.detach().double(),
        "critic/tokens": mask.sum().double(),
        "critic/vf_clipfrac": clipped_count.double(),
        "critic/vpred": values.detach().double().sum(),
        "critic/returns_sum": target.sum(),
        "critic/returns_square_sum": target.square().sum(),
        "critic/residual_sum": residual.sum(),
        "critic/residual_square_sum": residual.square().sum(),
    }
    return loss, sums
