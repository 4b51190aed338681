"""Launches, bytes that are read and written, and peak memory of the actor's head, forward and backward: the kernels of a GPU beside torch's code.

Nothing is timed and no GPU is there: both run as a shadow (megarl/shadow), whose tensors have shapes and lifetimes. A launch is an operation of
torch that computes something on the device, or a Triton kernel; it reads and writes each of its tensors once (Triton's kernels: the logits).
Memory is in addition to hidden states, weight and gradient buffer. The gradient of a weight that is not in the gradient buffer is added to it,
as Megatron's hook does.

    python benchmarks/head.py --out head.json
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

from facts import announce, write_report

from megarl.shadow import device

# Rows of a rank's share of the vocabulary, width, tokens whose logits count, tensor parallel ranks.
CASES = {
    "Qwen2.5-0.5B, 4,096 tokens": (151936, 896, 4096, 1),
    "Qwen2.5-7B, 4,096 tokens": (152064, 3584, 4096, 1),
    "Qwen2.5-7B, 32,768 tokens, tensor parallel 4": (152064, 3584, 32768, 4),
}


@dataclass
class Figures:
    """One way of one case: forward and backward."""

    launches: int = 0
    collectives: int = 0
    moved_gb: float = 0.0
    peak_gb: float = 0.0
    tflop: float = 0.0


def measure(vocab: int, width: int, tokens: int, tp: int, fused: bool) -> Figures:
    """Of rank 0, in bfloat16 and with entropies."""
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from triton.runtime.jit import JITFunction

    from megarl.megatron.heads.log_probs import CHUNK_TOKENS, _TokenLogProbs, token_log_probs
    from megarl.shadow import collectives
    from megarl.shadow.mode import FakeMode, Shadow

    found, aten = Figures(), torch.ops.aten
    memory_alone = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.detach)

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tensors = {
                id(leaf): leaf
                for leaf in tree_leaves((args, kwargs, result))
                if isinstance(leaf, torch.Tensor)
            }
            if func.namespace == "c10d":
                found.collectives += 1
            elif func.namespace == "aten" and not func.is_view and func.overloadpacket not in memory_alone:
                found.launches += 1
                found.moved_gb += sum(tensor.nbytes for tensor in tensors.values()) / 1e9
            return result

    def launch(kernel: JITFunction, *args: Any, **options: Any) -> None:
        found.launches += 1
        logits = {"reduce_logits": 1, "differentiate_logits": 2}.get(kernel.fn.__name__, 0)
        found.moved_gb += logits * args[0].nbytes / 1e9

    collectives.join(0, tp)
    group = dist.group.WORLD
    assert group is not None
    with FakeMode(), Shadow() as shadow:
        make = lambda *shape, **options: torch.empty(*shape, device="cuda", **options)  # noqa: E731
        share = vocab // tp
        hidden = make(tokens, width, dtype=torch.bfloat16).requires_grad_()
        weight = torch.nn.Parameter(make(share, width, dtype=torch.bfloat16))
        weight.main_grad, weight.grad_added_to_main_grad = make(share, width), False
        labels, grad = make(tokens, dtype=torch.int64), make(tokens, 2)
        with shadow.tracker.phase("head") as phase, patch.object(JITFunction, "run", launch), Counted():
            if fused:
                settings = {"vocab_size": vocab, "temperature": 1.0, "chunk_tokens": None, "tp_group": group}
                output = token_log_probs(hidden, weight, labels, with_entropy=True, **settings)
            else:
                output = _TokenLogProbs.apply(
                    hidden, weight, labels, 0, share, 1.0, CHUNK_TOKENS, group, True
                )
            output.backward(grad)
            if not weight.grad_added_to_main_grad:
                weight.main_grad.add_(weight.grad)
            weight.grad = None
        found.peak_gb = (phase.peak - phase.before) / 1e9
        found.tflop = sum(shadow.flops["head"].values()) / 1e12
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    options = parser.parse_args()
    device.load()
    from megarl.shadow import cuda, transformer_engine

    running: list[Any] = []
    current: Callable[[], Any] = lambda: running[0] if running else None  # noqa: E731
    cuda.install(cuda.Card(), current)
    transformer_engine.install(current)
    facts = announce(("torch", "megatron-core"))
    results = []
    for case in options.cases:
        for way, fused in (("torch", False), ("kernels", True)):
            figures = asdict(measure(*CASES[case], fused))
            results.append({"case": case, "way": way, **figures})
            print(f"{case}, {way}: " + ", ".join(f"{name} {value:,.4g}" for name, value in figures.items()))
    write_report(options.out, **facts, results=results)


if __name__ == "__main__":
    main()
