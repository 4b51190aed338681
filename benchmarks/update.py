"""Launches, collectives and peak memory of an actor's whole update on a GPU, with the head's kernels and with torch's code in their place.

Nothing is timed and no GPU is there: rank 0 runs as a shadow (megarl/shadow), whose tensors have shapes and lifetimes. An update is what
`update_policy` does for one micro-batch a pipeline stage: forward, backward, reduction, optimizer step; the second of two, as those that follow it.
A launch is an operation of torch that computes something on the device, a Triton kernel, or a call of Transformer Engine's extension, however many
kernels that launches (a grouped product one an expert and more). Memory is in addition to weights, gradient buffers and optimizer states.

"torch's code" is the head as it was before it had kernels, and as it is on a CPU: `_TokenLogProbs` of megarl/megatron/heads/log_probs.py.

    python benchmarks/update.py --out update.json
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from facts import REPOSITORY, announce, write_report

from megarl.shadow import device

TINY = "a tiny Qwen2.5 of 2 layers"
EXPERTS = "Qwen3-30B-A3B, TP4 EP8, norms and experts computed again (recipe:qwen3_30b_a3b_grpo)"
CASES = {
    TINY: "recipes/qwen2.5_7b_dapo.yaml",
    "Qwen2.5-7B, TP4 (recipe:qwen2.5_7b_dapo)": "recipes/qwen2.5_7b_dapo.yaml",
    EXPERTS: "recipes/qwen3_30b_a3b_grpo.yaml",
}
TEXTS = ["What is 3 + 4?", "The result is 7."]  # of the tiny model's tokenizer


@dataclass
class Figures:
    """One way of one case."""

    launches: int = 0
    collectives: int = 0
    peak_gb: float = 0.0
    tflop: float = 0.0


class Counter:
    """Counts launches and collectives while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.found = Figures()
        self._within = 0  # calls of the extension, whose own operations of torch make memory alone

    def wrap(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.found.launches += self.on and not self._within
            self._within += 1
            try:
                return kernel(*args, **kwargs)
            finally:
                self._within -= 1

        return call

    def see(self, func: Any, result: Any) -> None:
        import torch
        from torch.utils._pytree import tree_leaves

        if not self.on or self._within:
            return
        aten = torch.ops.aten
        memory_alone = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.detach)
        if func.namespace == "c10d":
            self.found.collectives += 1
        elif func.namespace == "aten" and not func.is_view and func.overloadpacket not in memory_alone:
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.found.launches += any(tensor.device.type == "cuda" for tensor in tensors)


@contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Let shadows, Triton's launches and Transformer Engine's extension tell the counter."""
    from triton.runtime.jit import JITFunction

    from megarl.shadow.mode import Shadow
    from megarl.shadow.transformer_engine import EXTENSION, VERSION

    dispatch, run, extension = Shadow.__torch_dispatch__, JITFunction.run, sys.modules[EXTENSION]

    def dispatched(shadow: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = dispatch(shadow, func, types, args, kwargs)
        counter.see(func, result)
        return result

    computing = {name for name, found in vars(extension).items() if is_kernel(name, found)}
    assert {"generic_gemm", "multi_tensor_adam"} <= computing, VERSION
    with ExitStack() as stack:
        stack.enter_context(patch.object(Shadow, "__torch_dispatch__", dispatched))
        stack.enter_context(patch.object(JITFunction, "run", counter.wrap(run)))
        for name in computing:
            stack.enter_context(patch.object(extension, name, counter.wrap(getattr(extension, name))))
        yield


def is_kernel(name: str, found: Any) -> bool:
    """Whether an object of the extension's stand-in is a function that computes, and no question about the library."""
    questions = ("get_", "device_supports", "ubuf_", "is_", "__")
    return callable(found) and not isinstance(found, type) and not name.startswith(questions)


@contextmanager
def torch_head() -> Iterator[None]:
    """Have the head compute by torch's code on a GPU, too."""
    from megarl.megatron.fused_head import HeadShare
    from megarl.megatron.heads import log_probs as head

    def log_probs(hidden: Any, weight: Any, labels: Any, share: HeadShare) -> Any:
        how = (
            share.start,
            share.rows,
            share.temperature,
            head.CHUNK_TOKENS,
            share.tp_group,
            share.with_entropy,
        )
        return head._TokenLogProbs.apply(hidden, weight, labels, *how)

    with patch.object(head, "fused_log_probs", log_probs):
        yield


def measure(recipe: str, overrides: list[str], counter: Counter, running: list[Any]) -> Figures:
    """The actor's second update of rank 0."""
    import torch.distributed as dist

    from megarl.megatron.parallel import destroy_parallel
    from megarl.plan.inputs import model_use, read_planned
    from megarl.shadow import collectives, transformer_engine
    from megarl.shadow.mode import FakeMode, Shadow
    from megarl.shadow.roles import build_worker, steps_of

    config, inputs = read_planned(recipe, overrides, None, check=False)
    counter.found = Figures()
    gc.collect()
    collectives.join(0, world := model_use(config, inputs, "actor").layout.world)
    with FakeMode(), Shadow() as shadow:
        running[:] = [shadow]
        with shadow.tracker.phase("build"):
            worker = build_worker(config, "actor", 0, world)
        for step in steps_of(config, inputs, worker, "actor", None):
            shadow.peers.received = step.received
            gc.collect()
            counter.on = step.name == "update"
            with shadow.tracker.phase(step.name) as phase:
                step.run()
            counter.on = False
        counter.found.peak_gb = (phase.peak - phase.before) / 1e9
        counter.found.tflop = sum(shadow.flops["update"].values()) / 1e12
        del worker, step
    running.clear()
    destroy_parallel()
    transformer_engine.forget_workspaces()
    assert not dist.is_initialized()
    return counter.found


def overrides_of(case: str, folder: Path) -> list[str]:
    if case == EXPERTS:
        again = "actor_rollout_ref.actor.megatron.recompute_"
        return [f"{again}granularity=selective", f"{again}modules=[layernorm,moe]"]
    if case != TINY:
        return []
    from examples.tiny_model import make_tiny_model

    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 2, "num_attention_heads": 8}
    make_tiny_model(folder / "model", TEXTS, **sizes)
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    facts = announce(("torch", "megatron-core"))
    device.load()
    from megarl.shadow import collectives, cuda, transformer_engine

    running: list[Any] = []
    current: Callable[[], Any] = lambda: running[0] if running else None  # noqa: E731
    cuda.install(cuda.Card(), current)
    transformer_engine.install(current)
    facts["versions"]["transformer-engine (its Python code)"] = transformer_engine.VERSION
    collectives.leave_no_other_backend(current)
    counter, results = Counter(), []
    with counting(counter), tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            overrides = overrides_of(case, Path(folder))
            for way in ("torch", "kernels"):
                with torch_head() if way == "torch" else ExitStack():
                    figures = asdict(measure(str(REPOSITORY / CASES[case]), overrides, counter, running))
                results.append({"case": case, "way": way, **figures})
                print(
                    f"{case}, {way}: " + ", ".join(f"{name} {value:,.5g}" for name, value in figures.items())
                )
    write_report(options.out, **facts, results=results)


if __name__ == "__main__":
    main()
