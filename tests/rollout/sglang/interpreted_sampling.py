"""Cases of the sampling kernels, interpreted on a CPU or compiled: `python -m tests.rollout.sglang.interpreted_sampling interpret` (with
TRITON_INTERPRET=1) or `... compile` prints {case: result} as JSON.

The cases run in a process of their own, like the cases of tests/weight_sync/interpreted_slices.py. The references are SGLang's own functions
with its own hash kernel, which is interpreted too.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from megarl.rollout.sglang import sampling
from tests.kernel_cases import print_cases

NEAR = 1e-6  # relative and absolute tolerance of log-probs


class Rows(NamedTuple):
    """The arguments of `sampling.draw`."""

    logits: torch.Tensor
    temperatures: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    @property
    def scaled(self) -> torch.Tensor:
        return self.logits.float() / self.temperatures


def made(
    rows: int, vocabulary: int, seed: int, scale: float = 3.0, dtype: torch.dtype = torch.float32
) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    temperatures = torch.tensor([1.0, 0.6, 1.7]).repeat(rows)[:rows, None].contiguous()
    seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator)
    return Rows(logits.to(dtype), temperatures, seeds, torch.arange(rows) * 977)


def by_sglang(rows: Rows) -> torch.Tensor:
    from sglang.srt.layers.sampler import multinomial_with_seed

    less_largest = rows.scaled.double() - rows.scaled.amax(-1, keepdim=True)
    return multinomial_with_seed(less_largest, rows.seeds, rows.positions).view(-1)


def differing(name: str, rows: Rows) -> list[str]:
    """How the kernels' tokens and log-probs differ from SGLang's and torch's."""
    before = rows.logits.clone()
    tokens, log_probs = sampling.draw(*rows)
    expected = by_sglang(rows)
    right = torch.log_softmax(rows.scaled.double(), -1).gather(1, expected[:, None])[:, 0]
    found = []
    if not torch.equal(tokens.long(), expected):
        found.append(f"{name}: tokens {tokens.tolist()}, {expected.tolist()}")
    if not torch.allclose(log_probs.double(), right, rtol=NEAR, atol=NEAR):
        found.append(f"{name}: log-probs {log_probs.tolist()}, {right.tolist()}")
    if not torch.equal(rows.logits, before):
        found.append(f"{name}: logits were changed")
    return found


def sizes_and_types() -> list[str]:
    """Vocabularies that are smaller than a block, that fill their blocks exactly, and that have one column more; with one row and with several."""
    block, found = sampling.BLOCK, []
    for seed, (rows, vocabulary) in enumerate(
        ((1, 2), (3, 100), (1, block - 1), (2, block), (3, block + 1), (2, 3 * block + 7), (1, 151936))
    ):
        found += differing(f"{rows} x {vocabulary}", made(rows, vocabulary, seed))
    for dtype in (torch.bfloat16, torch.float16):
        found += differing(str(dtype), made(3, block + 100, 20, dtype=dtype))
    return found


def seeds_and_positions() -> list[str]:
    seeds = torch.tensor([0, 1, -1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63)])
    rows = made(7, 50, 30)._replace(seeds=seeds)
    found = differing("seeds", rows)
    for dtype in (torch.int32, torch.int64):
        positions = torch.tensor([0, 1, 2, 2**16, 2**20, 2**31 - 1, 5], dtype=dtype)
        found += differing(f"positions {dtype}", rows._replace(positions=positions))
    return found


def masked_columns() -> list[str]:
    """Columns that no token may come from: some, all but one, a complete block, and a row's padding, which follows the vocabulary."""
    block = sampling.BLOCK
    rows = made(4, 2 * block + 9, 31)
    logits = rows.logits.clone()
    logits[0, ::2] = -torch.inf
    logits[1] = -torch.inf
    logits[1, block + 5] = -3.0
    logits[2, :block] = -torch.inf
    logits[3, block:] = -torch.inf
    found = differing("masked", rows._replace(logits=logits))
    padded = torch.full((4, 112), 1e9)
    padded[:, :100] = logits[:, :100].nan_to_num(neginf=0.0)
    return found + differing("padded", rows._replace(logits=padded[:, :100]))


def extreme_logits() -> list[str]:
    """A large offset, large differences, one column above all, equal columns."""
    block, found = sampling.BLOCK, []
    rows = made(3, block + 50, 32)
    equal = torch.zeros_like(rows.logits)
    dominated = rows.logits.clone()
    dominated[:, 17] = 1e30
    lowest = torch.full_like(rows.logits, -1e30)
    cases = {
        "offset": rows.logits + 1e4, "below": rows.logits - 1e4, "wide": rows.logits * 1e4,
        "equal": equal, "dominated": dominated, "lowest": lowest, "narrow": rows.logits * 1e-6,
    }  # fmt: skip
    for name, logits in cases.items():
        found += differing(name, rows._replace(logits=logits))
    return found


def scores_that_nearly_tie() -> dict[str, Any]:
    """Two columns far above the others, whose scores differ by no more than a step of float32 at their logits: how often float32 would choose
    wrongly, and whether the kernels, which use float64, did."""
    from sglang.srt.layers import sampler

    number, vocabulary = 40, 30
    rows = made(number, vocabulary, 33)._replace(temperatures=torch.ones(number, 1))
    hashed = sampler.murmur_hash32(rows.seeds, rows.positions, torch.arange(vocabulary)).double()
    noise = -torch.log(-torch.log(hashed / (2**32 - 1)))
    logits = torch.full((number, vocabulary), -60.0)
    logits[:, 3] = 0.5
    logits[:, 29] = (0.5 + noise[:, 3] - noise[:, 29]).float()
    rows = rows._replace(logits=logits)
    scores = logits.double() + noise
    gaps = (scores[:, 3] - scores[:, 29]).abs()
    in_float32 = (logits + noise.float()).argmax(-1)
    return {
        "differing": differing("ties", rows),
        "widest": float(gaps.max()),
        "float32 is wrong": int((in_float32 != by_sglang(rows)).sum()),
    }


def all_magnitudes_of_noise() -> dict[str, float]:
    """The largest error of the float32 noise, over hashes from both ends of their range and from between: where the noise is above -4, and below."""
    from tests.rollout.sglang.noise_kernel import noises

    ends = torch.cat([torch.arange(3000), 2 ** torch.arange(0, 32), 2**32 - 2 ** torch.arange(0, 32)])
    spread = torch.arange(0, 2**32, 2**32 // 50_000)
    hashes = torch.cat([ends, 2**32 - 1 - ends, spread, 2**31 + torch.arange(-3000, 3000)]).clamp(
        0, 2**32 - 1
    )
    size = 1 << (len(hashes) - 1).bit_length()
    hashes = torch.nn.functional.pad(hashes, (0, size - len(hashes)), value=1)
    rough, exact = torch.empty(size), torch.empty(size, dtype=torch.float64)
    noises[(1,)](hashes, rough, exact, size)
    uniform = hashes.double() / (2**32 - 1)
    right = -(-uniform.log()).clamp(2.0**-32, torch.finfo(torch.float64).max).log()
    assert float((exact - right).abs().max()) < 1e-12
    error, usual = (rough - exact).abs(), exact > -4
    return {"usual": float(error[usual].max()), "others": float(error[~usual].max())}


def rows_alone() -> list[str]:
    """A row in a batch of its own has, bit for bit, the token and log-prob that it has among others."""
    rows = made(5, sampling.BLOCK + 300, 34)
    tokens, log_probs = sampling.draw(*rows)
    found = []
    for number in range(5):
        token, log_prob = sampling.draw(*(part[number : number + 1] for part in rows))
        if int(token) != int(tokens[number]) or float(log_prob) != float(log_probs[number]):
            found.append(f"row {number}")
    return found


def chi_square() -> dict[str, float]:
    """The statistic of draws from 4 tokens: for 80 seeds at one position, and for one seed at 80 positions."""
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    number, found = 80, {}
    many, one = torch.arange(number), torch.full((number,), 11)
    for name, seeds, positions in (("seeds", many, one), ("positions", one, many)):
        tokens, _ = sampling.draw(probs.log().repeat(number, 1), torch.ones(number, 1), seeds, positions)
        expected = probs * number
        found[name] = float(((torch.bincount(tokens, minlength=4) - expected) ** 2 / expected).sum())
    return found


@dataclass
class Info:
    """SGLang's `SamplingBatchInfo`, as far as its sampler reads it."""

    temperatures: torch.Tensor
    sampling_seed: torch.Tensor | None
    is_all_greedy: bool = False
    need_top_p_sampling: bool = False
    need_top_k_sampling: bool = False
    need_min_p_sampling: bool = False
    has_custom_logit_processor: bool = False
    sampling_mask_batch_indices: torch.Tensor | None = None
    sampling_support_logprobs_capture_indices: torch.Tensor | None = None
    grammars: None = None
    top_ks: torch.Tensor | None = None
    top_ps: torch.Tensor | None = None
    min_ps: torch.Tensor | None = None


def sampler_of_sglang(backend: str = "pytorch") -> Any:
    from sglang.srt.layers import sampler as module

    made_without_context = module.Sampler.__new__(module.Sampler)
    nn.Module.__init__(made_without_context)
    made_without_context.rl_on_policy_target = None
    made_without_context.enable_deterministic = made_without_context.use_log_softmax_logprob = False
    made_without_context.use_ascend_backend = False
    made_without_context.output_logprob_processor = module.OutputLogprobProcessor()
    context = SimpleNamespace(kernel=SimpleNamespace(sampling_backend=backend))
    module.get_exec = lambda: context
    return made_without_context


class Sampled(NamedTuple):
    tokens: torch.Tensor
    log_probs: torch.Tensor | None
    draws: int
    output: Any


def sampled(
    rows: Rows, *, ours: bool, logprob: bool = True, top: int = 0, ids: Any = None, **changes: Any
) -> Sampled:
    """A call of SGLang's sampler, with megarl's hook or without; how often the kernels drew in it."""
    sampler, number = sampler_of_sglang(), len(rows.logits)
    forward = type(sampler).forward
    output = SimpleNamespace(next_token_logits=rows.logits.clone(), next_token_logprobs=None)
    info = Info(rows.temperatures, **{"sampling_seed": rows.seeds, **changes})
    arguments = sampler, output, info, logprob, [top] * number, [ids] * number, rows.positions
    with mock.patch.object(sampling, "draw", wraps=sampling.draw) as draw:
        tokens = sampling.sample(forward, *arguments) if ours else forward(*arguments)
    return Sampled(tokens, output.next_token_logprobs, draw.call_count, output)


def in_sglangs_sampler() -> dict[str, Any]:
    """Tokens, log-probs and their types with the hook, compared with SGLang's own."""
    number, vocabulary = 24, 900
    rows = made(number, vocabulary, 35)
    ours, theirs = (sampled(rows, ours=ours) for ours in (True, False))
    assert (ours.draws, theirs.draws) == (1, 0)
    assert ours.tokens.dtype == theirs.tokens.dtype and ours.log_probs.dtype == theirs.log_probs.dtype
    assert ours.log_probs.shape == theirs.log_probs.shape and ours.tokens.shape == theirs.tokens.shape
    without = sampled(Rows(*(part[:3] for part in rows)), ours=True, logprob=False)
    assert without.log_probs is None and without.draws == 1
    assert torch.equal(ours.tokens[:3], without.tokens)
    return {
        "equal": float((ours.tokens == theirs.tokens).float().mean()),
        "log-probs": float((ours.log_probs - theirs.log_probs).abs().max()),
    }


def not_a_distribution() -> list[str]:
    """Rows with NaN, with infinity, and without a finite logit, among others, get SGLang's tokens and log-probs."""
    rows = made(6, sampling.BLOCK + 10, 36)
    rows.logits[0, 5] = rows.logits[1, sampling.BLOCK + 1] = torch.nan
    rows.logits[2, 7] = torch.inf
    rows.logits[3] = -torch.inf
    rows.logits[4] = torch.nan
    ours, theirs = (sampled(rows, ours=ours) for ours in (True, False))
    found = []
    if ours.tokens[:5].tolist() != theirs.tokens[:5].tolist() or ours.tokens[:5].any():
        found.append(f"tokens {ours.tokens.tolist()}, {theirs.tokens.tolist()}")
    if not ours.log_probs[:5].isnan().all() or not theirs.log_probs[:5].isnan().all():
        found.append(f"log-probs {ours.log_probs.tolist()}, {theirs.log_probs.tolist()}")
    if ours.tokens[5] != theirs.tokens[5] or abs(ours.log_probs[5] - theirs.log_probs[5]) > 1e-5:
        found.append("the row of numbers")
    return found


def left_to_sglang() -> dict[str, list[int]]:
    """Batches that are left to SGLang's sampler: the number of draws by the kernels, and the number of tokens that differ from SGLang's."""
    rows = made(6, 80, 37)
    top_ks, top_ps = torch.tensor([1 << 30, 5, 1, 20, 2, 3]), torch.tensor([1.0, 0.9, 1.0, 0.5, 0.7, 1.0])
    cuts = {"top_ks": top_ks, "top_ps": top_ps, "min_ps": torch.zeros(6)}
    cases: dict[str, dict[str, Any]] = {
        "top_k": {"need_top_k_sampling": True, **cuts},
        "top_p": {"need_top_p_sampling": True, **cuts},
        "greedy": {"is_all_greedy": True},
        "more log-probs": {"top": 2},
        "log-probs of tokens": {"ids": [1, 2]},
        "a mask": {"sampling_mask_batch_indices": torch.arange(6)},
    }
    found = {}
    from sglang.srt.layers import sampler

    with (
        mock.patch.object(sampler.Sampler, "_build_sampling_mask_output", lambda *args: None),
        mock.patch("sglang.srt.layers.logprob_processor.is_pin_memory_available", lambda *args: False),
    ):
        for name, changes in cases.items():
            ours, theirs = (sampled(rows, ours=ours, **changes) for ours in (True, False))
            found[name] = [ours.draws, int((ours.tokens != theirs.tokens).sum())]
        none = Rows(*(part[:0] for part in rows))
        found["no rows"] = [sampled(none, ours=True).draws, 0]
        found["no seeds"] = [sampled(rows, ours=True, sampling_seed=None).draws, 0]
    return found


INTERPRETED: tuple[Callable[[], Any], ...] = (
    sizes_and_types, seeds_and_positions, masked_columns, extreme_logits, scores_that_nearly_tie, all_magnitudes_of_noise,
    rows_alone, chi_square, in_sglangs_sampler, not_a_distribution, left_to_sglang,
)  # fmt: skip


def compiled() -> dict[str, dict[str, int]]:
    """Each kernel compiled for an H100: the bytes of its machine code, and the counts of its instructions that do not round as IEEE 754 demands."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        "row_stride": "i64", "temperatures": "*fp32", "seeds": "*i64", "positions": "*i64", "maxima": "*fp32", "sums": "*fp32",
        "scores": "*fp64", "columns": "*i32", "tokens": "*i32", "log_probs": "*fp32", "num_columns": "i32", "num_blocks": "i32",
    }  # fmt: skip
    kernels, found = sampling.kernels(), {}
    cases = ((kernels.score_blocks, {"BLOCK": sampling.BLOCK}), (kernels.choose, {"WIDTH": 64}))
    for logits in ("fp32", "bf16"):
        for kernel, constants in cases:
            signature = {name: types.get(name, "constexpr") for name in kernel.arg_names} | {
                "logits": f"*{logits}"
            }
            source = ASTSource(kernel, signature, constexprs=constants)
            code = triton.compile(
                source, target=GPUTarget("cuda", 90, 32), options={"num_warps": sampling.WARPS}
            )
            instructions = Counter(re.findall(r"\b(div\.\S*f32|lg2\.\S+|ex2\.\S+)", code.asm["ptx"]))
            found[f"{kernel.__name__} {logits}"] = {**instructions, "bytes": len(code.asm["cubin"])}
    return found


def hash_of_sglang() -> None:
    """SGLang's hash on a CPU: its kernel for GPUs, interpreted."""
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32_kernel
    from sglang.srt.layers import sampler

    def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        hashed = torch.empty((len(seed), len(columns)), dtype=torch.uint32)
        size = 1 << (len(columns) - 1).bit_length()
        murmur_hash32_kernel[(len(seed), 1)](
            seed.view(torch.int64), positions, columns, hashed, len(seed), len(columns), BLOCK_SIZE=size
        )
        return hashed

    sampler.murmur_hash32 = murmur_hash32


@contextmanager
def _hash_of_sglang() -> Iterator[None]:
    hash_of_sglang()
    yield


def main() -> None:
    print_cases(INTERPRETED, compiled, _hash_of_sglang())


if __name__ == "__main__":
    main()
