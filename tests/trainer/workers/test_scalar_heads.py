"""The critic's loss, as its ranks compute it."""

from types import SimpleNamespace

import pytest
import torch

from megarl.trainer.workers.scalar_heads import scaled_value_loss


@pytest.mark.parametrize("vf_coef", [1.0, 0.1])
def test_vf_coef_scales_the_loss_and_its_gradient_but_not_the_metrics(vf_coef: float) -> None:
    """Two tokens of weight 1/2, errors 1 - 3 and 2 - 2: the loss is 0.5 (0.5 * 4 + 0.5 * 0) = 1, its gradient (-1, 0)."""
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    fields = {
        "values": torch.tensor([1.0, 2.0]),
        "returns": torch.tensor([3.0, 2.0]),
        "loss_weights": torch.tensor([0.5, 0.5]),
    }
    batch = SimpleNamespace(fields=fields, mask=torch.tensor([True, True]))
    loss, sums = scaled_value_loss(None, vf_coef)(values, batch)
    loss.backward()
    assert loss.item() == pytest.approx(vf_coef)
    assert values.grad.tolist() == pytest.approx([-vf_coef, 0.0])
    assert sums["critic/vf_loss"].item() == 1.0
