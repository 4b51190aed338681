"""Flash-linear-attention's own Python code, whose Triton kernels are not launched: gated delta nets' convolution, norm and rule.

Written from version 0.6.0 of fla-core. Its functions allocate what their kernels write; the kernels' operations are counted here.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megarl.shadow.cuda import Card
from megarl.shadow.mode import Shadow

KERNEL = "gated_delta_rule"  # under which operations are counted
CHUNK = 64


def install(card: Card, current: Callable[[], Shadow | None]) -> None:
    """Let `fla` import, if it is there, and count the operations of its rule.

    Args:
        current: the shadow that runs now; None: none does.
    """
    if importlib.util.find_spec("fla") is None:
        return
    import triton

    major, minor = card.capability
    target = SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)
    facts = {"multiprocessor_count": card.multiprocessors, "max_shared_mem": 232448}
    # Asked for the card's kind, by which blocks are chosen.
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            utils=SimpleNamespace(get_device_properties=lambda device: facts),
        )
    )
    from fla.ops.gated_delta_rule import chunk
    from fla.ops.utils import cache

    cache.CachedAutotuner.run = lambda self, *args, **kwargs: None
    rule = chunk.ChunkGatedDeltaRuleFunction
    rule.forward = staticmethod(_counted(rule.forward, forward_operations, current))
    rule.backward = staticmethod(_counted(rule.backward, backward_operations, current))


def _counted(
    function: Callable[..., Any],
    operations: Callable[[int, int], int],
    current: Callable[[], Shadow | None],
) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(ctx: Any, *args: Any) -> Any:
        result = function(ctx, *args)
        shadow = current()
        if shadow is not None:
            out = result[0]
            if operations is forward_operations:
                ctx.widths = (args[0].shape[-1], *out.shape[1:])
            keys, tokens, heads, values = ctx.widths
            shadow.count_flops(KERNEL, tokens * heads * operations(keys, values))
        return result

    return counted


def forward_operations(keys: int, values: int) -> int:
    """Operations of the products of a token and head, with keys and values of these widths.

    With the chunk: keys with keys, what keys and values write, queries with keys, what is read; with the state: what is written to it, what
    of this was there already, what is read.
    """
    return 2 * CHUNK * (3 * keys + 2 * values) + 3 * 2 * keys * values


def backward_operations(keys: int, values: int) -> int:
    """The same in the backward pass: what keys and values write and the states are computed again (chunk_gated_delta_rule_bwd), before the
    gradients of the state (chunk_bwd_dv_local, chunk_gated_delta_rule_bwd_dhu), of queries and keys (chunk_bwd_dqkwg), and of what
    keys and values write (prepare_wy_repr_bwd)."""
    again = 2 * CHUNK * (keys + values) + 2 * 2 * keys * values
    of_state = 2 * CHUNK * (keys + values) + 3 * 2 * keys * values
    of_queries = 2 * CHUNK * (3 * keys + values) + 3 * 2 * keys * values
    of_writes = 2 * CHUNK * (5 * keys + 2 * values) + 2 * 2 * CHUNK * CHUNK
    return again + of_state + of_queries + of_writes
