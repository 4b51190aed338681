"""Triton kernels that models run on a GPU, beside the same in torch, forward and backward.

Of megatron-core 0.19.2 these are the rotary embedding of latent attention (`apply_rope_fusion` in megarl/megatron/transformer_config.py);
megarl has none of its own. On a GPU they are compiled; with TRITON_INTERPRET=1, set before anything imports Triton, they are
interpreted on a CPU: `python -m megarl.gpu_test.triton_kernels` prints what that finds, as JSON lines.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import ModuleType

import torch

from megarl.gpu_test.comparison import Pair, compared
from megarl.gpu_test.runner import Check

TRITON_LENGTHS = (5, 8, 3)
HEADS, NOPE, ROPE, VALUE = 3, 16, 8, 8  # the kernels take powers of two
TRITON_TOLERANCE = 1e-5


def triton_checks(device: str) -> Iterator[Check]:
    for name, case in TRITON.items():
        yield compared(f"triton: {name}", lambda case=case: case(device), TRITON_TOLERANCE)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of pairs that lie side by side, whose outputs lie in halves: `apply_rotary_pos_emb_interleave` of
    transformers' modeling_deepseek_v3.py.

    x: [tokens, heads, width]; cos, sin: [tokens, width].
    """
    first, second = x[..., 0::2], x[..., 1::2]
    halves = torch.cat([first, second], -1)
    turned = torch.cat([-second, first], -1)
    return halves * cos[:, None] + turned * sin[:, None]


def positions(lengths: tuple[int, ...], rank: int, size: int) -> torch.Tensor:
    """Of a context parallel rank's tokens: of each sequence's 2 x size chunks it has one from each end."""
    parts = []
    for length in lengths:
        chunks = torch.arange(length).chunk(2 * size) if size > 1 else [torch.arange(length)]
        parts += [chunks[rank], chunks[2 * size - 1 - rank]] if size > 1 else chunks
    return torch.cat(parts)


def _angles(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(length)[:, None] * torch.logspace(0, -2, ROPE // 2)[None]
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def _rotary(device: str, rank: int, size: int) -> Iterator[Pair]:
    """Queries, keys and values of packed sequences."""
    from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

    if device == "cpu":
        first_configurations(fused)
    lengths = TRITON_LENGTHS if size == 1 else tuple(2 * size * length for length in TRITON_LENGTHS)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    cos, sin = (table.to(device) for table in _angles(max(lengths)))
    places = positions(lengths, rank, size).to(device)
    generator = torch.Generator().manual_seed(7)

    def made(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(shape, generator=generator).to(device)
        return values.clone().requires_grad_(), values.clone().requires_grad_()

    tokens = len(places)
    query, query_too = made(tokens, HEADS, NOPE + ROPE)
    pairs, pairs_too = made(tokens, HEADS, NOPE + VALUE)
    shared, shared_too = made(tokens, 1, ROPE)
    tables = cos[:, None, None], sin[:, None, None]
    # The kernel writes into its input: a copy of the leaf.
    found = fused.fused_apply_mla_rope_for_q(query.clone(), *tables, NOPE, ROPE, ends, rank, size)
    key, value = fused.fused_apply_mla_rope_for_kv(
        pairs, shared, *tables, ROPE, NOPE, VALUE, ends, rank, size
    )
    turned = rotated(query_too[..., NOPE:], cos[places], sin[places])
    expected = torch.cat([query_too[..., :NOPE], turned], -1)
    key_turned = rotated(shared_too, cos[places], sin[places]).expand(-1, HEADS, -1)
    key_too, value_too = torch.cat([pairs_too[..., :NOPE], key_turned], -1), pairs_too[..., NOPE:]
    yield Pair("queries", found, expected)
    yield Pair("keys", key, key_too)
    yield Pair("values", value, value_too)
    weights = [torch.randn(part.shape, generator=generator).to(device) for part in (found, key, value)]
    for parts in ((found, key, value), (expected, key_too, value_too)):
        torch.autograd.backward(parts, [weight.clone() for weight in weights])
    yield Pair("gradient of queries", query.grad, query_too.grad)
    yield Pair("gradient of keys and values", pairs.grad, pairs_too.grad)
    yield Pair("gradient of the rotary key", shared.grad, shared_too.grad)


TRITON: dict[str, Callable[[str], Iterator[Pair]]] = {
    "rotary embedding of latent attention": lambda device: _rotary(device, 0, 1),
    "the same, the second of two context parallel ranks": lambda device: _rotary(device, 1, 2),
}


def first_configurations(module: ModuleType) -> None:
    """Autotuned kernels of a module take the first of their configurations: there is nothing to time where they are interpreted."""
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(module).values():
        if isinstance(kernel, Autotuner):
            kernel.configs = kernel.configs[:1]


def main() -> None:
    from megarl.shadow.device import PACKAGES

    sys.path.insert(0, str(PACKAGES))
    # Its Python code lies there too, without the library that it loads: its import fails, as where it is not installed.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    import triton

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 has to be set"
    for check in triton_checks("cpu"):
        print(json.dumps(asdict(check)))


if __name__ == "__main__":
    main()
