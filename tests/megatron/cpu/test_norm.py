"""RMS norm and its own backward pass, against Hugging Face's module and torch's automatic one."""

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from megarl.megatron.cpu.norm import rms_norm


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_values_and_gradients_are_hugging_faces(eps: float) -> None:
    torch.manual_seed(0)
    oracle = Qwen2RMSNorm(48, eps).double()
    with torch.no_grad():
        oracle.weight.normal_(1.0, 0.3)
    x = torch.randn(5, 7, 48, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(5, 7, 48)
    expected = oracle(x)
    expected_grads = torch.autograd.grad(expected, (x, oracle.weight), grad.double())
    own_x, own_weight = (t.detach().float().requires_grad_() for t in (x, oracle.weight))
    out = rms_norm(own_x, own_weight, eps)
    grads = torch.autograd.grad(out, (own_x, own_weight), grad)
    torch.testing.assert_close(out, expected.float(), rtol=1e-6, atol=1e-6)
    for found, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted.float(), rtol=2e-6, atol=2e-6)


def test_bfloat16_is_computed_in_float32_and_a_frozen_weight_has_no_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 64).bfloat16().requires_grad_()
    weight = torch.randn(64).bfloat16()
    out = rms_norm(x, weight, 1e-6)
    wide = torch.nn.functional.rms_norm(x.detach().float(), (64,), weight.float(), 1e-6)
    assert out.dtype == torch.bfloat16 and torch.equal(out, wide.bfloat16())
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.dtype == torch.bfloat16
