import pytest
import torch

from megarl.algorithms.metrics import reduce_metrics
from megarl.algorithms.ptx_loss import ptx_loss


def test_the_mean_negative_log_likelihood_of_learnt_tokens_times_the_coefficient():
    """By hand: of -1, -3, -2 the second is not learnt; with coefficient 0.5 the loss is 0.5 * (1 + 2) / 2."""
    log_probs = torch.tensor([-1.0, -3.0, -2.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    loss, sums = ptx_loss(log_probs, torch.full((3,), 0.5 / 2), mask)
    loss.backward()
    assert loss.item() == pytest.approx(0.75)
    assert log_probs.grad.tolist() == [-0.25, 0.0, -0.25]
    assert {name: value.item() for name, value in sums.items()} == {
        "actor/ptx_loss": 3.0,
        "actor/ptx_tokens": 2.0,
    }


def test_the_logged_loss_counts_texts_alone():
    sums = {"actor/tokens": 10.0, "actor/entropy": 5.0, "actor/ptx_loss": 6.0, "actor/ptx_tokens": 4.0}
    assert reduce_metrics(sums, num_updates=2) == pytest.approx({"actor/entropy": 0.5, "actor/ptx_loss": 1.5})
