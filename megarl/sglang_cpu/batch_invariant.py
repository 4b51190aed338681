"""Matrix products on a CPU in which the bits of a row do not depend on the other rows.

A request's results must not depend on which other requests run at the same time or on how much of its prompt is cached, since both
are matters of timing. In float32 SGLang's operations on a CPU treat each token by itself, with four exceptions: matrix products,
attention (batched_attention.py handles it), sums over more than two ranks, and sigmoids.

For up to 15 rows MKL uses other kernels, which sum in another order; which ones depends on the sizes of the weight. From 16 rows on a
row's bits are the same for any number of rows and any position among them (MKL 2024.2, AVX-512, one thread; tried up to 4096 rows with
1 to 18992 columns of up to 11008 terms). So products of fewer rows are padded with rows of zeros. `enable` checks this, and attention,
on the machine at hand.

SGLang's own switch (`enable_deterministic_inference`) turns it on: on a GPU the switch replaces torch's kernels, here it replaces
them by these (0.5.21).
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megarl.sglang_cpu.batched_attention import attend_prompt, pad

MIN_ROWS = 16
TWO_VECTORS = 32  # elements, of AVX-512
BACKEND = "torch_native"
_TRIED_SIZES = ((64, 64), (256, 1024), (1024, 256), (4096, 64))  # terms, columns
_TRIED_WIDTHS = (16, 64, 128, 144)  # of attention heads
_TRIED_ROWS = (1, 5, 15, 17, 64, 200)
Kernel = Callable[..., torch.Tensor]


class Overrides:
    """The operators by which `enable` has replaced torch's in this process; None: it was not called."""

    library: torch.library.Library | None = None  # torch takes them back when it is freed


def offer_backend() -> None:
    """Let SGLang take its switch together with the attention backend of a CPU.

    Engines of gpt-oss ask for `intel_amx` (megarl/rollout/sglang/start.py). SGLang (0.5.21) takes `torch_native` in its place where there is
    no AMX, but only after its check of this switch.
    """
    from sglang.srt.arg_groups import choices
    from sglang.srt.utils import cpu_has_amx_support

    backends = [BACKEND] if cpu_has_amx_support() else [BACKEND, "intel_amx"]
    choices.add_deterministic_attention_backend_choices(backends)
    choices.add_radix_supported_deterministic_attention_backend_choices(backends)


def enable() -> None:
    """Make the results of a row in this process independent of the other rows.

    Raises:
        RuntimeError: on this machine they are not.
    """
    if Overrides.library is None:
        Overrides.library = override_operators()
        check_products()
        check_attention()


def obstacle() -> str | None:
    """Why this machine's CPU cannot be deterministic; None: it can. Checked as in an engine's process, with one thread."""
    threads, library = torch.get_num_threads(), None
    torch.set_num_threads(1)
    try:
        library = override_operators() if Overrides.library is None else None
        check_products()
        check_attention()
    except RuntimeError as reason:
        return str(reason)
    finally:
        if library is not None:
            library._destroy()
        torch.set_num_threads(threads)
    return None


def override_operators() -> torch.library.Library:
    """Override torch's products and sigmoids by padded ones, for as long as the returned library exists."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for function, names in _OVERRIDES.items():
            for name in names:
                library.impl(name, partial(function, _torch_kernel(name)), "CPU")
    return library


def _torch_kernel(name: str) -> Kernel:
    """torch's own CPU kernel of an operator."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return partial(torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed, keys)


def _is_small(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch's rounding of a @ b depends on the number of rows: few rows, or one column, for which it calls gemv."""
    return a.shape[-2] < MIN_ROWS or b.shape[-1] == 1


def _is_weighted(beta: float, alpha: float) -> bool:
    """Whether a sum must be computed in steps: MKL's rounding of scaled products depends on the rows, for up to 47 of them."""
    return alpha != 1 or beta not in (0, 1)


def _padded(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros after the rows of `a` and the columns of `b`, so that their product is not small."""
    return pad(a, max(MIN_ROWS, a.shape[-2]), a.shape[-1]), pad(b, b.shape[-2], max(2, b.shape[-1]))


def _product(kernel: Kernel, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`mm` or `bmm`."""
    if not _is_small(a, b):
        return kernel(a, b)
    return kernel(*_padded(a, b))[..., : a.shape[-2], : b.shape[-1]]


def _product_into(kernel: Kernel, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(a @ b) if _is_small(a, b) else kernel(a, b, out=out)


def _sum(
    kernel: Kernel, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """`addmm` or `baddbmm`: beta * c + alpha * (a @ b)."""
    if _is_weighted(beta, alpha):
        product = alpha * (a @ b)
        return product + beta * c if beta else product
    if not _is_small(a, b):
        return kernel(c, a, b, beta=beta, alpha=alpha)
    rows, columns = a.shape[-2], b.shape[-1]
    a, b = _padded(a, b)
    if c.dim() > 1:  # else a bias
        c = pad(c.expand(*c.shape[:-2], rows, columns), a.shape[-2], b.shape[-1])
    return kernel(c, a, b, beta=beta, alpha=alpha)[..., :rows, :columns]


def _sum_in_place(
    kernel: Kernel, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if not _is_small(a, b) and not _is_weighted(beta, alpha):
        return kernel(c, a, b, beta=beta, alpha=alpha)
    compute = torch.baddbmm if a.dim() == 3 else torch.addmm
    return c.copy_(compute(c, a, b, beta=beta, alpha=alpha))


def _sigmoid(kernel: Kernel, x: torch.Tensor) -> torch.Tensor:
    """torch computes the last elements of a tensor, less than two vectors of them, by another exp than the others."""
    rest = -x.numel() % TWO_VECTORS
    if not rest:
        return kernel(x)
    flat = torch.nn.functional.pad(x.reshape(-1), (0, rest))
    return kernel(flat)[: x.numel()].view(x.shape)


_OVERRIDES = {
    _product: ("mm", "bmm"),
    _product_into: ("mm.out", "bmm.out"),
    _sum: ("addmm", "baddbmm"),
    _sum_in_place: ("addmm_", "baddbmm_"),
    _sigmoid: ("sigmoid",),
}


def check_products() -> None:
    """Check the module's claim about matrix products on this machine.

    Raises:
        RuntimeError: a row's bits depend on the number of rows.
    """
    generator = torch.Generator().manual_seed(0)
    for terms, columns in _TRIED_SIZES:
        x = torch.randn(max(_TRIED_ROWS), terms, generator=generator)
        weight = torch.randn(columns, terms, generator=generator)
        full = x @ weight.t()
        for rows in _TRIED_ROWS:
            for first in (0, len(x) - rows):
                if not torch.equal(x[first : first + rows] @ weight.t(), full[first : first + rows]):
                    raise _refusal(
                        f"matrix products ({terms} terms, {columns} columns) round {rows} rows otherwise than {len(x)}"
                    )


def check_attention() -> None:
    """Check the claims of batched_attention.py on this machine.

    Raises:
        RuntimeError: a token's bits depend on the length of the prompt, or on the part of it that was cached.
    """
    generator = torch.Generator().manual_seed(0)
    for width in _TRIED_WIDTHS:
        query, keys, values = torch.randn(3, 300, 2, width, generator=generator).unbind()
        full = attend_prompt(query, keys, values, None)
        for cached, length in ((0, 97), (0, 150), (1, 190), (1, 256), (250, 300), (96, 97), (299, 300)):
            found = attend_prompt(query[cached:length], keys[:length], values[:length], None)
            if not torch.equal(found, full[cached:length]):
                raise _refusal(
                    f"attention (heads of {width}) rounds tokens {cached} to {length} otherwise alone than among 300"
                )


def _refusal(reason: str) -> RuntimeError:
    return RuntimeError(
        f"rollout.deterministic=true cannot be kept on this CPU: its {reason}; set it to false"
    )


def sum_in_order(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce in place that adds the ranks' parts in the order of their ranks.

    gloo adds each section of the tensor in another order, so that an element's bits depend on where it is: with more than two
    ranks, since two can be added in either order.
    """
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return tensor.copy_(total)


def _all_reduce(original: Kernel, group: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Around SGLang's own all-reduce."""
    if Overrides.library is None or group.world_size <= 2 or not tensor.is_cpu:
        return original(group, tensor)
    return sum_in_order(tensor, group.device_group)


HOOKS = {
    "sglang.srt.batch_invariant_ops.enable_batch_invariant_mode": ("REPLACE", enable),
    "sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce": ("AROUND", _all_reduce),
}
