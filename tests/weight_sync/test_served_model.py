"""Tensors that an engine's model derives from its weights."""

import torch

from megarl.weight_sync.served_model import renew_derived


class Attention(torch.nn.Module):
    """Latent attention in float8, as SGLang has it: each renewal of the projections makes a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.w_scale: float | torch.Tensor = 1.0
        self.renewals = 0

    def post_load_weights(self) -> None:
        self.renewals += 1
        self.w_scale = torch.tensor(float(self.renewals))


def test_a_scale_that_cuda_graphs_read_stays_where_it_is() -> None:
    model = Attention()
    renew_derived(model)  # at the start, before graphs are captured: there was a number
    captured = model.w_scale
    renew_derived(model)
    assert model.w_scale is captured and captured == model.renewals == 2
