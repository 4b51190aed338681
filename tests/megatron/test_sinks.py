"""`settle_sinks`, which adjusts attention's sinks in a model; test_families compares models that have sinks with Hugging Face's."""

from types import SimpleNamespace

import pytest
import torch

from megarl.megatron.sinks import settle_sinks

HEADS = 4


class Attention(torch.nn.Module):
    """Has sinks in the form that Transformer Engine makes."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax_offset = torch.nn.Parameter(torch.zeros(HEADS))


def model_of(cp: int) -> torch.nn.Module:
    model = torch.nn.Sequential(Attention(), torch.nn.Linear(2, 2))
    model.config = SimpleNamespace(params_dtype=torch.bfloat16, context_parallel_size=cp)
    return model


def test_sinks_have_the_models_type_and_are_cut_over_tensor_parallel_ranks() -> None:
    model = model_of(1)
    settle_sinks(model, fused=False)
    sinks, other = model[0].softmax_offset, model[1].weight
    assert (sinks.dtype, other.dtype) == (torch.bfloat16, torch.float32)
    assert sinks.tensor_model_parallel and sinks.partition_dim == 0
    assert not hasattr(other, "tensor_model_parallel")


@pytest.mark.parametrize(("fused", "cp"), [(True, 1), (True, 2), (True, 4), (False, 2)])
def test_gradients_of_context_parallel_ranks_add_up_to_the_sinks_gradient(fused: bool, cp: int) -> None:
    """Transformer Engine gives each rank the sum over all ranks' tokens, megarl's attention in torch the sum over the rank's own tokens."""
    generator = torch.Generator().manual_seed(0)
    of_tokens = torch.randint(-8, 8, (cp, HEADS), generator=generator).float() * cp  # by rank
    summed = torch.zeros(HEADS)
    for rank in range(cp):
        model = model_of(cp)
        settle_sinks(model, fused=fused)
        gradient = of_tokens.sum(0) if fused else of_tokens[rank]
        for _ in range(2):  # micro-batches
            (model[0].softmax_offset.float() * gradient).sum().backward()
        summed += model[0].softmax_offset.grad
    assert torch.equal(summed, 2 * of_tokens.sum(0))
