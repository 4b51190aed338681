"""Step `kernels`: each kernel of the GPU path beside the same in torch, forward and backward, in bfloat16 beside float32.

Transformer Engine's are those that models are made of here (megarl/megatron/layer_spec.py); the sizes are those of small models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from megarl.gpu_test import triton_kernels
from megarl.gpu_test.comparison import Pair, compared
from megarl.gpu_test.machine import machine_here
from megarl.gpu_test.runner import Check

BF16 = 2e-2  # of the largest number: bfloat16 has 8 bits, sums are of some hundred products
LENGTHS = (70, 1, 129, 56)
Case = Callable[[str], Iterator[Pair]]


def run(folder: Path) -> Iterator[Check]:
    yield from checks("cuda", has_te="transformer-engine" in machine_here().versions)
    yield from triton_kernels.checks("cuda")


def checks(device: str, *, has_te: bool) -> Iterator[Check]:
    cases = {**TORCH, **(TRANSFORMER_ENGINE if has_te else {})}
    for name, (case, tolerance) in cases.items():
        yield compared(name, lambda case=case: case(device), tolerance)
    if not has_te:
        yield Check("Transformer Engine", None, "not installed: its kernels are not looked at")


def made(device: str, *shape: int, seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf in bfloat16 on the device, and one of the same numbers in float32."""
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16().to(device)
    return values.clone().requires_grad_(), values.float().requires_grad_()


def with_gradients(
    found: torch.Tensor, expected: torch.Tensor, leaves: Iterable[tuple[str, torch.Tensor, torch.Tensor]]
) -> Iterator[Pair]:
    """An output and, after a backward pass, the gradients of its leaves, each with what it is compared with."""
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(99)).to(expected.device)
    found.backward(weight.to(found.dtype))
    expected.backward(weight)
    yield Pair("output", found, expected)
    for name, leaf, other in leaves:
        yield Pair(f"gradient of {name}", leaf.grad, other.grad)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of packed sequences by its formula, in float32; [tokens, heads, width] each."""
    outputs, first = [], 0
    times = query.shape[1] // key.shape[1]
    for length in LENGTHS:
        q, k, v = (part[first : first + length].transpose(0, 1) for part in (query, key, value))
        k, v = k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)
        scores = q @ k.transpose(1, 2) / query.shape[2] ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        outputs.append((scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        first += length
    return torch.cat(outputs)


def _te_attention(device: str, heads: int, groups: int, width: int, value_width: int) -> Iterator[Pair]:
    import transformer_engine.pytorch as te

    tokens = sum(LENGTHS)
    query, query_too = made(device, tokens, heads, width, seed=1)
    key, key_too = made(device, tokens, groups, width, seed=2)
    value, value_too = made(device, tokens, groups, value_width, seed=3)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    module = te.DotProductAttention(
        heads, (width, value_width), num_gqa_groups=groups, attention_dropout=0.0, qkv_format="thd",
        attn_mask_type="padding_causal",
    )  # fmt: skip
    found = module(
        query, key, value, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )  # fmt: skip
    expected = attention(query_too, key_too, value_too)
    found = found.view(expected.shape)
    names = ("queries", "keys", "values")
    leaves = zip(names, (query, key, value), (query_too, key_too, value_too), strict=True)
    yield from with_gradients(found, expected, leaves)


def _te_norm_linear(device: str) -> Iterator[Pair]:
    """RMSNorm and the product behind it, in one module."""
    import transformer_engine.pytorch as te

    x, x_too = made(device, 256, 512, seed=4)
    module = te.LayerNormLinear(
        512, 768, eps=1e-6, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, device=device
    )
    norm = module.layer_norm_weight.detach().float().requires_grad_()
    weight = module.weight.detach().float().requires_grad_()
    found = module(x)
    scaled = x_too * torch.rsqrt(x_too.square().mean(-1, keepdim=True) + 1e-6) * norm
    expected = scaled @ weight.T
    leaves = [
        ("the input", x, x_too), ("the norm", module.layer_norm_weight, norm), ("the weight", module.weight, weight),
    ]  # fmt: skip
    yield from with_gradients(found, expected, leaves)


def _te_norm(device: str) -> Iterator[Pair]:
    import transformer_engine.pytorch as te

    x, x_too = made(device, 300, 128, seed=5)
    module = te.RMSNorm(128, eps=1e-6, params_dtype=torch.bfloat16, device=device)
    found = module(x)
    expected = x_too * torch.rsqrt(x_too.square().mean(-1, keepdim=True) + 1e-6)
    yield from with_gradients(found, expected, [("the input", x, x_too)])


def _te_experts(device: str) -> Iterator[Pair]:
    """Products of several experts at once; one of them has no token."""
    import transformer_engine.pytorch as te

    splits = [64, 0, 33, 159]
    x, x_too = made(device, sum(splits), 256, seed=6)
    module = te.GroupedLinear(len(splits), 256, 320, bias=False, params_dtype=torch.bfloat16, device=device)
    weights = [getattr(module, f"weight{number}") for number in range(len(splits))]
    copies = [weight.detach().float().requires_grad_() for weight in weights]
    found = module(x, splits)
    expected = torch.cat([part @ copy.T for part, copy in zip(x_too.split(splits), copies, strict=True)])
    experts = ((f"expert {number}", weights[number], copies[number]) for number in (0, 2, 3))
    yield from with_gradients(found, expected, [("the input", x, x_too), *experts])


def _te_rotary(device: str) -> Iterator[Pair]:
    """Megatron-core's rotary embedding of packed sequences; its other one is in torch."""
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb_thd

    tokens, width = sum(LENGTHS), 64
    x, x_too = made(device, tokens, 4, width, seed=7)
    angles = torch.arange(max(LENGTHS))[:, None] * torch.logspace(0, -3, width // 2)[None]
    table = torch.cat([angles, angles], -1)[:, None, None].float().to(device)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=device)
    found = fused_apply_rotary_pos_emb_thd(x, ends, table)
    places = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    chosen = table[places, 0]
    one, other = x_too.chunk(2, -1)
    expected = x_too * chosen.cos() + torch.cat([-other, one], -1) * chosen.sin()
    yield from with_gradients(found, expected, [("the input", x, x_too)])


def _te_adam(device: str) -> Iterator[Pair]:
    from transformer_engine.pytorch.optimizers import FusedAdam

    found, expected = (torch.nn.Parameter(made(device, 1000, seed=8)[1].detach().clone()) for _ in range(2))
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, torchs = FusedAdam([found], **settings), torch.optim.AdamW([expected], **settings)
    for step in range(3):
        for parameter in (found, expected):
            parameter.grad = made(device, 1000, seed=20 + step)[1].detach()
        ours.step()
        torchs.step()
    yield Pair("weights", found, expected)


def _flash(device: str) -> Iterator[Pair]:
    """torch's own attention, which models without Transformer Engine have."""
    query, query_too = made(device, 1, 8, 200, 64, seed=9)
    key, key_too = made(device, 1, 8, 200, 64, seed=10)
    value, value_too = made(device, 1, 8, 200, 64, seed=11)
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    future = torch.ones(200, 200, dtype=torch.bool, device=device).triu(1)
    scores = (query_too @ key_too.transpose(2, 3) / 8.0).masked_fill(future, -torch.inf)
    expected = scores.softmax(-1) @ value_too
    names = ("queries", "keys", "values")
    leaves = zip(names, (query, key, value), (query_too, key_too, value_too), strict=True)
    yield from with_gradients(found, expected, leaves)


def _checksum(device: str) -> Iterator[Pair]:
    """Bit for bit: both ends of a sync compare them."""
    from megarl.weight_sync.packets import checksum

    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        values = torch.arange(33 * 19).reshape(33, 19).to(dtype)
        for name, part in (("whole", values), ("cut", values[3:, 2:7])):
            # 64 bits, as two halves that float64 has exactly.
            found, expected = (int(checksum(one)) for one in (part.to(device), part))
            halves = ([number >> 32, number & 0xFFFFFFFF] for number in (found, expected))
            yield Pair(f"{name} {dtype}", *(torch.tensor(pair, dtype=torch.float64) for pair in halves))


TORCH: dict[str, tuple[Case, float]] = {
    "torch's attention": (_flash, BF16),
    "checksums of a weight sync": (_checksum, 0.0),
}
TRANSFORMER_ENGINE: dict[str, tuple[Case, float]] = {
    "attention, grouped queries": (lambda device: _te_attention(device, 8, 2, 64, 64), BF16),
    "attention, latent: queries 192 wide, values 128": (
        lambda device: _te_attention(device, 4, 4, 192, 128),
        BF16,
    ),
    "RMSNorm": (_te_norm, BF16),
    "RMSNorm and a product": (_te_norm_linear, BF16),
    "products of experts": (_te_experts, BF16),
    "rotary embedding": (_te_rotary, BF16),
    "Adam": (_te_adam, 1e-5),
}
