"""The rotation of packed sequences, against Hugging Face's rotation of one sequence."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

from megarl.megatron.cpu.rotary import local_positions, rotate_packed

LENGTHS = [5, 1, 8, 3]


def _group(size: int = 1, rank: int = 0) -> SimpleNamespace:
    """A process group with the methods that `rotate_packed` calls."""
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def _bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _angles(positions: int, width: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions), 100.0 ** -torch.linspace(0, 0.9, width // 2))
    return torch.cat((angles, angles), -1)[:, None, None]


@pytest.mark.parametrize("rotated", [8, 6])  # all of a head's width, and a part of it
def test_every_sequence_is_rotated_as_hugging_face_rotates_it_alone(rotated: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(LENGTHS), 3, 8, requires_grad=True)
    freqs = _angles(max(LENGTHS), rotated)
    out = rotate_packed(x, _bounds(LENGTHS), freqs, cp_group=_group())
    weights = torch.randn_like(out)
    (grad,) = torch.autograd.grad((out * weights).sum(), x)
    expected = []
    for part in x.split(LENGTHS):
        angles = freqs[: len(part), 0]
        heads = part[None, ..., :rotated].transpose(1, 2)
        turned, _ = apply_rotary_pos_emb(heads, heads, angles.cos()[:, 0][None], angles.sin()[:, 0][None])
        expected.append(torch.cat((turned.transpose(1, 2)[0], part[..., rotated:]), -1))
    expected = torch.cat(expected)
    (expected_grad,) = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-6)


def test_interleaved_pairs_are_put_in_halves_and_scaled() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 2, 8, requires_grad=True)
    freqs = _angles(4, 8)
    out = rotate_packed(x, _bounds([4]), freqs, mla_rotary_interleaved=True, mscale=1.5, cp_group=_group())
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    turned = 1.5 * pairs * torch.exp(1j * freqs[:, 0, :, :4])
    expected = torch.cat((turned.real, turned.imag), -1)
    weights = torch.randn_like(out)
    (grad,), (expected_grad,) = (torch.autograd.grad((y * weights).sum(), x) for y in (out, expected))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-6)


def test_positions_of_context_parallel_ranks_are_the_first_and_the_last_parts_of_each_sequence() -> None:
    bounds = _bounds([8, 4])
    assert local_positions(bounds, 1, 0).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert local_positions(bounds, 2, 0).tolist() == [0, 1, 6, 7, 0, 3]
    assert local_positions(bounds, 2, 1).tolist() == [2, 3, 4, 5, 1, 2]
