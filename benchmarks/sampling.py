"""What sampling a decode step's tokens by seed takes on a GPU, counted without one: launches, bytes, and memory beside the logits.

SGLang's own sampler, with log-probs and a seed for each request, runs on its CUDA branch as a shadow (docs/planning.md): its tensors have
shapes and no values. Beside it megarl's kernels (megarl/rollout/sglang/sampling.py) in its place.

    python benchmarks/sampling.py --out sampling.json

- launches: operations of torch that compute something on the device, and Triton kernels.
- bytes: tensors of [requests, vocabulary] that an operation reads or writes, each once. What kernels read again is not in it.
- memory: the peak beside the logits.
- op by op: SGLang's noise (`multinomial_with_seed`) as it is written. compiled: its operations after the hash are one kernel that
  reads the hash and the log-probs and writes tokens. That is the best that torch.compile can make of them, and is assumed here: no
  compiler has run.

No time is measured. `least_ms` is bytes over an H100's 3.35 TB/s: no way can be faster.
"""

import argparse
import os
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

from facts import announce, write_report

from megarl.rollout.sglang.before_import import sglang_environment
from megarl.shadow import device

VOCABULARY = 151936  # Qwen2.5's
BANDWIDTH = 3.35e12  # bytes/s: the HBM of an H100 SXM (NVIDIA's data sheet)
WAYS = ("SGLang, op by op", "SGLang, compiled", "megarl")


def shadow() -> None:
    """Give this process a CUDA device that is there by name only, and SGLang's packages."""
    os.environ.update(sglang_environment("cuda", 1))
    device.load()
    from megarl.shadow import cuda, engine_kernels

    cuda.install(cuda.Card(), lambda: None)
    engine_kernels.install()


def sampler() -> Any:
    """SGLang's sampler of an engine on one GPU, without the engine."""
    from sglang.srt.layers import sampler as module
    from torch import nn

    made = module.Sampler.__new__(module.Sampler)
    nn.Module.__init__(made)
    made.rl_on_policy_target = None
    made.enable_deterministic = made.use_log_softmax_logprob = made.use_ascend_backend = False
    made.output_logprob_processor = module.OutputLogprobProcessor()
    return made


def counter(size: int) -> Any:
    """A mode that counts launches, and the bytes of tensors of `size` elements that they read and write."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Counter(TorchDispatchMode):
        launches = nbytes = 0

        def kernel(self, *tensors: Any) -> None:
            self.launches += 1
            self.nbytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.numel() == size)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            outputs = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
            aten, operation = torch.ops.aten, func.overloadpacket
            if (
                func.is_view
                or operation in (aten.empty, aten.new_empty)
                or not any(one.is_cuda for one in outputs)
            ):
                return out
            inputs = tree_leaves((args, kwargs))
            if operation is aten.copy_:  # its output is not read
                inputs = inputs[1:]
            elif operation is aten.index:  # reads a number of each row
                inputs = []
            self.kernel(*inputs, *outputs)
            return out

    return Counter()


def measure(requests: int, way: str) -> dict[str, Any]:
    """One decode step."""
    import torch
    from sglang.srt.layers import sampler as module
    from triton.runtime.jit import JITFunction

    from megarl.rollout.sglang import sampling
    from megarl.shadow.mode import FakeMode, Shadow

    count = counter(requests * VOCABULARY)

    def launch(kernel: JITFunction, *args: Any, **options: Any) -> None:
        # The second kernel reads a logit of each row.
        count.kernel(*(() if kernel is sampling.kernels().choose else args))

    def compiled(log_probs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        columns = torch.arange(log_probs.shape[1], device="cuda")
        count.kernel(module.murmur_hash32(seed.to(torch.uint64), positions, columns), log_probs)
        return torch.empty(len(log_probs), 1, dtype=torch.int64, device="cuda")

    with FakeMode(), Shadow() as shadow, torch.no_grad():
        logits = torch.empty(requests, VOCABULARY, device="cuda")
        temperatures = torch.ones(requests, 1, device="cuda")
        seeds, positions = (torch.ones(requests, dtype=torch.int64, device="cuda") for _ in range(2))
        output = SimpleNamespace(next_token_logits=logits)
        info = SimpleNamespace(
            temperatures=temperatures, sampling_seed=seeds, is_all_greedy=False, need_top_p_sampling=False, need_top_k_sampling=False,
            need_min_p_sampling=False, has_custom_logit_processor=False, sampling_mask_batch_indices=None,
            sampling_support_logprobs_capture_indices=None, grammars=None,
        )  # fmt: skip
        arguments = sampler(), output, info, True, [0] * requests, [None] * requests, positions
        before = shadow.tracker.current
        noise = compiled if way == "SGLang, compiled" else module.multinomial_with_seed
        with (
            mock.patch.object(module, "multinomial_with_seed", noise),
            mock.patch.object(JITFunction, "run", launch),
            shadow.tracker.phase("sample") as phase,
            count,
        ):
            if way == "megarl":
                sampling.sample(module.Sampler.forward, *arguments)
            else:
                module.Sampler.forward(*arguments)
    assert not shadow.waits, shadow.waits
    return {
        "way": way,
        "requests": requests,
        "launches": count.launches,
        "bytes": count.nbytes,
        "bytes_a_logit": round(count.nbytes / logits.numel(), 1),
        "memory": phase.peak - before,
        "least_ms": round(count.nbytes / BANDWIDTH * 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--out", help="write figures as JSON")
    options = parser.parse_args()
    facts = announce(("torch", "sglang"))
    warnings.simplefilter("ignore")
    shadow()
    print(f"a vocabulary of {VOCABULARY:,}; a shadow: nothing is computed, no time is measured\n")
    print(f"{'way':18}{'requests':>9}{'launches':>9}{'MB':>9}{'a logit':>8}{'memory MB':>10}{'least ms':>9}")
    results = [measure(requests, way) for requests in options.requests for way in WAYS]
    for row in results:
        print(
            f"{row['way']:18}{row['requests']:9}{row['launches']:9}{row['bytes'] / 1e6:9.0f}{row['bytes_a_logit']:8.1f}"
            f"{row['memory'] / 1e6:10.2f}{row['least_ms']:9.3f}"
        )
    write_report(options.out, **facts, vocabulary=VOCABULARY, bandwidth=BANDWIDTH, results=results)


if __name__ == "__main__":
    main()
