"""Step `kernels`: each kernel of the GPU path compared with the same in torch, forward and backward, in bfloat16 against float32.

Transformer Engine's kernels are the ones that models use here (megarl/megatron/layer_spec.py); the sizes are small models'.

The only Triton kernel of megatron-core 0.19.2 in use is the rotary embedding of latent attention (`apply_rope_fusion` in
megarl/megatron/transformer_config.py); megarl's own are those of the head, of the weight sync, of sampling and of a base in float8. On a GPU they are compiled; with
TRITON_INTERPRET=1, set before anything imports Triton, they are interpreted on a CPU: `python -m megarl.gpu_test.kernels` prints those
checks as JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch

from megarl import platform
from megarl.gpu_test import family_kernels, slices
from megarl.gpu_test.pairs import (
    BF16,
    LENGTHS,
    Case,
    Compared,
    attention,
    compared,
    ends_of,
    made,
    queries_keys_values,
    with_gradients,
)
from megarl.gpu_test.runner import Check
from megarl.gpu_test.steps import machine_here

FLOAT8 = 1e-1  # e4m3 has 4 bits


def run(folder: Path) -> Iterator[Check]:
    versions = machine_here().versions
    yield from checks("cuda", has_te="transformer-engine" in versions)
    yield from fla_checks("cuda", has_fla="fla-core" in versions)
    yield from triton_checks("cuda")


def checks(device: str, *, has_te: bool) -> Iterator[Check]:
    cases = {**TORCH, **(TRANSFORMER_ENGINE | family_kernels.TRANSFORMER_ENGINE if has_te else {})}
    for name, (case, tolerance) in cases.items():
        yield compared(name, lambda case=case: case(device), tolerance)
    if not has_te:
        yield Check("Transformer Engine", None, "not installed: its kernels are not looked at")


def fla_checks(device: str, *, has_fla: bool) -> Iterator[Check]:
    if not has_fla:
        yield Check("flash-linear-attention", None, "not installed: its kernels are not looked at")
        return
    for name, (case, tolerance) in family_kernels.FLA.items():
        yield compared(name, lambda case=case: case(device), tolerance)


def _te_attention(device: str, heads: int, groups: int, width: int, value_width: int) -> Iterator[Compared]:
    import transformer_engine.pytorch as te

    tokens = sum(LENGTHS)
    leaves = queries_keys_values(
        device, (tokens, heads, width), (tokens, groups, width), (tokens, groups, value_width)
    )
    _, inputs, references = zip(*leaves, strict=True)
    ends = ends_of(LENGTHS, device)
    module = te.DotProductAttention(
        heads, (width, value_width), num_gqa_groups=groups, attention_dropout=0.0, qkv_format="thd",
        attn_mask_type="padding_causal",
    )  # fmt: skip
    found = module(
        *inputs, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )  # fmt: skip
    expected = attention(*references)
    yield from with_gradients(found.view(expected.shape), expected, leaves)


@contextlib.contextmanager
def _in_float8(enabled: bool) -> Iterator[None]:
    """Products in float8 blocks within, as in layers with `megarl.megatron.float8`."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    with te.fp8_autocast(enabled=enabled, fp8_recipe=Float8BlockScaling()):
        yield


def _te_norm_linear(device: str, float8: bool = False) -> Iterator[Compared]:
    """RMSNorm and the product behind it, in one module."""
    import transformer_engine.pytorch as te

    x, x_too = made(device, 256, 512, seed=4)
    module = te.LayerNormLinear(
        512, 768, eps=1e-6, bias=False, normalization="RMSNorm", params_dtype=torch.bfloat16, device=device
    )
    norm = module.layer_norm_weight.detach().float().requires_grad_()
    weight = module.weight.detach().float().requires_grad_()
    with _in_float8(float8):
        found = module(x)
    scaled = x_too * torch.rsqrt(x_too.square().mean(-1, keepdim=True) + 1e-6) * norm
    expected = scaled @ weight.T
    leaves = [
        ("the input", x, x_too), ("the norm", module.layer_norm_weight, norm), ("the weight", module.weight, weight),
    ]  # fmt: skip
    yield from with_gradients(found, expected, leaves)


def _te_norm(device: str) -> Iterator[Compared]:
    import transformer_engine.pytorch as te

    x, x_too = made(device, 300, 128, seed=5)
    module = te.RMSNorm(128, eps=1e-6, params_dtype=torch.bfloat16, device=device)
    found = module(x)
    expected = x_too * torch.rsqrt(x_too.square().mean(-1, keepdim=True) + 1e-6)
    yield from with_gradients(found, expected, [("the input", x, x_too)])


def _te_experts(device: str, float8: bool = False) -> Iterator[Compared]:
    """Products of several experts at once; one of them has no token."""
    import transformer_engine.pytorch as te

    splits = [64, 0, 32, 160] if float8 else [64, 0, 33, 159]
    x, x_too = made(device, sum(splits), 256, seed=6)
    module = te.GroupedLinear(len(splits), 256, 320, bias=False, params_dtype=torch.bfloat16, device=device)
    weights = [getattr(module, f"weight{number}") for number in range(len(splits))]
    copies = [weight.detach().float().requires_grad_() for weight in weights]
    with _in_float8(float8):
        found = module(x, splits)
    expected = torch.cat([part @ copy.T for part, copy in zip(x_too.split(splits), copies, strict=True)])
    experts = ((f"expert {number}", weights[number], copies[number]) for number in (0, 2, 3))
    yield from with_gradients(found, expected, [("the input", x, x_too), *experts])


def _te_rotary(device: str) -> Iterator[Compared]:
    """Megatron-core's rotary embedding of packed sequences; its other one is in torch."""
    platform.install()
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb_thd

    tokens, width = sum(LENGTHS), 64
    x, x_too = made(device, tokens, 4, width, seed=7)
    angles = torch.arange(max(LENGTHS))[:, None] * torch.logspace(0, -3, width // 2)[None]
    table = torch.cat([angles, angles], -1)[:, None, None].float().to(device)
    ends = ends_of(LENGTHS, device)
    found = fused_apply_rotary_pos_emb_thd(x, ends, table)
    places = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    chosen = table[places, 0]
    one, other = x_too.chunk(2, -1)
    expected = x_too * chosen.cos() + torch.cat([-other, one], -1) * chosen.sin()
    yield from with_gradients(found, expected, [("the input", x, x_too)])


def _te_adam(device: str) -> Iterator[Compared]:
    from transformer_engine.pytorch.optimizers import FusedAdam

    found, expected = (torch.nn.Parameter(made(device, 1000, seed=8)[1].detach().clone()) for _ in range(2))
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, torchs = FusedAdam([found], **settings), torch.optim.AdamW([expected], **settings)
    for step in range(3):
        for parameter in (found, expected):
            parameter.grad = made(device, 1000, seed=20 + step)[1].detach()
        ours.step()
        torchs.step()
    yield Compared("weights", found, expected)


def _flash(device: str) -> Iterator[Compared]:
    """torch's own attention, which models without Transformer Engine use."""
    leaves = queries_keys_values(device, *[(1, 8, 200, 64)] * 3)
    _, inputs, (query, key, value) = zip(*leaves, strict=True)
    found = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    future = torch.ones(200, 200, dtype=torch.bool, device=device).triu(1)
    scores = (query @ key.transpose(2, 3) / 8.0).masked_fill(future, -torch.inf)
    expected = scores.softmax(-1) @ value
    yield from with_gradients(found, expected, leaves)


def _checksum(device: str) -> Iterator[Compared]:
    """Bit for bit: both ends of a sync on GPUs compare them."""
    from megarl.weight_sync.packets import multilinear

    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        values = torch.arange(33 * 19).reshape(33, 19).to(dtype)
        for name, part in (("whole", values), ("cut", values[3:, 2:7])):
            sums = (multilinear(one).cpu()[None] for one in (part.to(device), part))
            yield Compared(f"{name} {dtype}", *map(slices.two_numbers, sums))


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
    "RMSNorm and a product in float8": (lambda device: _te_norm_linear(device, True), FLOAT8),
    "products of experts in float8": (lambda device: _te_experts(device, True), FLOAT8),
    "rotary embedding": (_te_rotary, BF16),
    "Adam": (_te_adam, 1e-5),
}


# Triton kernels.

TRITON_LENGTHS = (5, 8, 3)
HEADS, NOPE, ROPE, VALUE = 4, 16, 8, 8  # the kernels take powers of two
TRITON_TOLERANCE = 1e-5


def triton_checks(device: str) -> Iterator[Check]:
    for name, (case, tolerance) in TRITON.items():
        yield compared(f"triton: {name}", lambda case=case: case(device), tolerance)


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
    """Positions of a context parallel rank's tokens: of each sequence's 2 x size chunks it has one from each end."""
    parts = []
    for length in lengths:
        chunks = torch.arange(length).chunk(2 * size) if size > 1 else [torch.arange(length)]
        parts += [chunks[rank], chunks[2 * size - 1 - rank]] if size > 1 else chunks
    return torch.cat(parts)


def _angles(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(length)[:, None] * torch.logspace(0, -2, ROPE // 2)[None]
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def _rotary(device: str, rank: int, size: int) -> Iterator[Compared]:
    """Queries, keys and values of packed sequences."""
    from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

    if device == "cpu":
        two_heads_a_block(fused)
    lengths = TRITON_LENGTHS if size == 1 else tuple(2 * size * length for length in TRITON_LENGTHS)
    ends = ends_of(lengths, device)
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
    yield Compared("queries", found, expected)
    yield Compared("keys", key, key_too)
    yield Compared("values", value, value_too)
    weights = [torch.randn(part.shape, generator=generator).to(device) for part in (found, key, value)]
    for parts in ((found, key, value), (expected, key_too, value_too)):
        torch.autograd.backward(parts, [weight.clone() for weight in weights])
    yield Compared("gradient of queries", query.grad, query_too.grad)
    yield Compared("gradient of keys and values", pairs.grad, pairs_too.grad)
    yield Compared("gradient of the rotary key", shared.grad, shared_too.grad)


def _slices(device: str) -> Iterator[Compared]:
    """Bit for bit, as checksums are; on a GPU more lists are compared, and larger slices, which have several tiles."""
    sizes = [(4, 1)] if device == "cpu" else [(100, 1), (50, 16), (10, 512)]
    for number, times in sizes:
        for seed in range(number):
            for name, found, expected in slices.compared(slices.drawn(seed, device, times), device):
                yield Compared(f"{name} {seed} x {times}", found, expected)
            for name, found, expected in slices.compared(slices.drawn_computed(seed, device), device):
                yield Compared(f"{name} of computed weights {seed}", found, expected)


def murmur3(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3_x86_32 (Appleby, public domain) of 64 bits of a seed, a position and a column: int64 [seeds, columns].

    Products wrap at 64 bits, and their lower 32 are right.
    """
    low = 0xFFFFFFFF

    def rotated(x: torch.Tensor, bits: int) -> torch.Tensor:
        return ((x << bits) | (x >> (32 - bits))) & low

    state = torch.zeros(len(seeds), 1, dtype=torch.int64, device=seeds.device)
    for word in (seeds[:, None] & low, seeds[:, None] >> 32 & low, positions[:, None] & low, columns[None]):
        mixed = rotated(word * 0xCC9E2D51 & low, 15) * 0x1B873593 & low
        state = rotated(state ^ mixed, 13) * 5 + 0xE6546B64 & low
    state = state ^ 16
    state = (state ^ state >> 16) * 0x85EBCA6B & low
    state = (state ^ state >> 13) * 0xC2B2AE35 & low
    return state ^ state >> 16


def _draws(device: str) -> Iterator[Compared]:
    """Tokens by seed and their log-probs. The tolerance is relative to the largest token id, so that none may differ by 1."""
    from megarl.rollout.sglang.sampling import draw

    sizes = [(3, 5000)] if device == "cpu" else [(1, 151936), (8, 151936), (256, 151936), (5, 129281)]
    for rows, vocabulary in sizes:
        generator = torch.Generator().manual_seed(rows)
        logits = (torch.randn(rows, vocabulary, generator=generator) * 3).to(device)
        logits[:, ::7] = -torch.inf
        temperatures = torch.linspace(0.5, 2, rows)[:, None].to(device)
        seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator).to(device)
        places = torch.arange(rows, device=device) * 31
        columns = torch.arange(vocabulary, device=device)
        uniform = murmur3(seeds, places, columns).double() / (2**32 - 1)
        noise = -(-uniform.log()).clamp(2.0**-32, torch.finfo(torch.float64).max).log()
        for given in (logits, logits.bfloat16()):
            scaled = (given.float() / temperatures).double()
            expected = (scaled + noise).argmax(-1)
            log_probs = scaled.log_softmax(-1).gather(1, expected[:, None])[:, 0]
            found = draw(given, temperatures, seeds, places)
            name = f"{rows} x {vocabulary}, {str(given.dtype).removeprefix('torch.')}"
            yield Compared(f"tokens of {name}", found[0], expected)
            yield Compared(f"log-probs of {name}", found[1], log_probs)


def _head(device: str, dtype: torch.dtype) -> Iterator[Compared]:
    """Log-probabilities, entropies and gradients compared with the same from all logits at once, in float32: several chunks, rows that pad
    the vocabulary, and a gradient buffer that is not empty, to which the products add."""
    import torch.distributed as dist

    from megarl.megatron.fused_head import HeadShare, fused_log_probs

    tokens, width, rows, padded, temperature = 37, 64, 9001, 9088, 1.25
    drawn = torch.Generator().manual_seed(11)
    hidden = torch.randn(tokens, width, generator=drawn).to(dtype).to(device).requires_grad_()
    weight = torch.full((padded, width), torch.nan)
    weight[:rows] = torch.randn(rows, width, generator=drawn) * 0.3
    parameter = torch.nn.Parameter(weight.to(dtype).to(device))
    labels = torch.randint(0, rows, (tokens,), generator=drawn).to(device)
    gradients = torch.randn(tokens, 2, generator=drawn).to(device)
    buffer = torch.full((padded, width), 0.5, device=device)
    for name, value in {"main_grad": buffer, "grad_added_to_main_grad": False}.items():
        setattr(parameter, name, value)  # as Megatron's data parallel gradients do
    alone = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]
    share = HeadShare(0, rows, temperature, 16, alone, with_entropy=True)
    found = fused_log_probs(hidden, parameter, labels, share)
    found.backward(gradients)

    hidden_too = hidden.detach().float().requires_grad_()
    weight_too = parameter.detach()[:rows].float().requires_grad_()
    log_p = (hidden_too @ weight_too.T / temperature).log_softmax(-1)
    own = log_p.gather(1, labels[:, None])
    expected = torch.cat([own, -(log_p.exp() * log_p).sum(-1, keepdim=True)], 1)
    expected.backward(gradients)
    yield Compared("log-probabilities", found[:, 0], expected[:, 0])
    yield Compared("entropies", found[:, 1], expected[:, 1])
    yield Compared("gradient of hidden states", hidden.grad, hidden_too.grad)
    yield Compared("gradient of the weight", buffer[:rows] - 0.5, weight_too.grad)
    yield Compared("gradient of padding", buffer[rows:], torch.full_like(buffer[rows:], 0.5))


def _exact_weights(device: str) -> Iterator[Compared]:
    """Weights made of float8 blocks, one and several at once, compared with the weights that torch makes of them on a CPU."""
    from megarl.models.float8 import FP8, dequantise_all, in_blocks, scale_at_once

    block = (128, 128)
    for shape in ((40, 300),) if device == "cpu" else ((40, 300), (4096, 7168)):
        generator = torch.Generator().manual_seed(shape[0])
        values = [(torch.randn(shape, generator=generator) * 100).to(FP8) for _ in range(3)]
        scales = [torch.rand(in_blocks(shape, block), generator=generator) for _ in values]
        for dtype, number in ((torch.bfloat16, 3), (torch.bfloat16, 1), (torch.float32, 3)):
            found = torch.empty((number, *shape), dtype=dtype, device=device)
            on_device = [[tensor.to(device) for tensor in kind[:number]] for kind in (values, scales)]
            scale_at_once(on_device[0], on_device[1], block, found)
            expected = dequantise_all(values[:number], scales[:number], block, dtype)
            yield Compared(f"{number} of {shape} {dtype}", found.cpu(), expected)


TRITON: dict[str, tuple[Case, float]] = {
    "rotary embedding of latent attention": (lambda device: _rotary(device, 0, 1), TRITON_TOLERANCE),
    "the same, the second of two context parallel ranks": (
        lambda device: _rotary(device, 1, 2),
        TRITON_TOLERANCE,
    ),
    "log-probabilities and entropies of a head, float32": (
        lambda device: _head(device, torch.float32),
        TRITON_TOLERANCE,
    ),
    "the same, bfloat16": (lambda device: _head(device, torch.bfloat16), BF16),
    "slices of a weight sync": (_slices, 0.0),
    "tokens drawn by seed": (_draws, 1e-6),
    "weights of a base in float8": (_exact_weights, 0.0),
}


def two_heads_a_block(module: ModuleType) -> None:
    """Autotuned kernels of a module take this one of their configurations: there is nothing to time where they are interpreted."""
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(module).values():
        if isinstance(kernel, Autotuner):
            kernel.configs = [one for one in kernel.configs if one.kwargs == {"BLOCK_H": 2}]


def main() -> None:
    from megarl import platform
    from megarl.shadow.device import PACKAGES

    sys.path.insert(0, str(PACKAGES))
    # Transformer Engine's Python code lies there too, without the library that it loads: its import fails, as where it is not installed.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    platform.install()  # before a case imports megatron-core, which has to find Triton
    import triton

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 has to be set"
    for check in triton_checks("cpu"):
        print(json.dumps(asdict(check)))


if __name__ == "__main__":
    main()
