"""Cases of the Triton kernels of the head, interpreted on a CPU: `python -m tests.megatron.interpreted_head interpret` (with
TRITON_INTERPRET=1) prints {case: result} as JSON.

They have a process of their own: Triton reads the variable when it is imported, and other packages would notice that it can be imported.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.layout.grid import ParallelLayout
from megarl.megatron import fused_head
from megarl.megatron.build import build_model, local_parameters, wrap_for_training
from megarl.megatron.fused_head import HeadShare, fused_log_probs
from megarl.megatron.heads import log_probs, outputs
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.parallel import destroy_parallel, init_parallel
from megarl.megatron.step import train_step
from megarl.models import read_model_config
from tests.kernel_cases import print_cases
from tests.megatron.parity import LENGTHS, VOCAB, batches
from tests.megatron.states import OPTIM

ALONE = dist.ProcessGroup(0, 1)
HIDDEN, TOKENS = 32, 7
BLOCK = 64  # so that small vocabularies have several blocks, the last one incomplete

# Real and padded rows, tokens of a chunk, temperature: one chunk and several, of equal size and not; complete and incomplete blocks.
SHAPES = {
    "one chunk": (130, 256, 1000, 1.0),
    "remainder": (131, 192, 3, 1.3),
    "a token each": (65, 128, 1, 0.7),
    "whole blocks": (128, 128, TOKENS, 0.5),
}


def head(rows: int, padded: int, dtype: torch.dtype, scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, output weight and labels. Padding rows would dominate every softmax if they were included."""
    drawn = torch.Generator().manual_seed(rows)
    hidden = torch.randn(TOKENS, HIDDEN, generator=drawn).to(dtype)
    weight = torch.full((padded, HIDDEN), 50.0)
    weight[:rows] = torch.randn(rows, HIDDEN, generator=drawn) * scale
    labels = torch.randint(0, rows, (TOKENS,), generator=drawn)
    labels[:2] = torch.tensor([0, rows - 1])
    return hidden, weight.to(dtype), labels


def upstream(columns: int) -> Tensor:
    return torch.randn(TOKENS, 2, generator=torch.Generator().manual_seed(8))[:, :columns]


def passed(run: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Outputs, and the gradients of both inputs."""
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    output = run(hidden, weight)
    output.backward(upstream(output.shape[1]).to(output.dtype))
    return output.detach(), hidden.grad, weight.grad


def fused(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, chunk: int, t: float, entropy: bool
) -> tuple[Tensor, ...]:
    share = HeadShare(0, rows, t, chunk, ALONE, entropy)
    return passed(lambda h, w: fused_log_probs(h, w, labels, share), hidden, weight)


def by_torch(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, chunk: int, t: float, entropy: bool
) -> tuple[Tensor, ...]:
    """Results of the code that runs on a CPU."""
    settings = {"vocab_size": rows, "temperature": t, "chunk_tokens": chunk, "tp_group": ALONE}
    run = lambda h, w: log_probs.token_log_probs(h, w, labels, with_entropy=entropy, **settings)  # noqa: E731
    return passed(run, hidden, weight)


def whole(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, chunk: int, t: float, entropy: bool
) -> tuple[Tensor, ...]:
    """Unsharded logits in float64, and torch's autograd."""

    def run(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = (hidden @ weight[:rows].t() / t).log_softmax(-1)
        own = log_p.gather(1, labels[:, None])
        return torch.cat([own, -(log_p.exp() * log_p).sum(-1, keepdim=True)], 1) if entropy else own

    return passed(run, hidden.double(), weight.double())


def apart(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest difference, relative to each tensor's largest number; infinite if a number is not finite."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        difference = (one.double() - other.double()).abs().max() / other.double().abs().max()
        errors.append(float(difference) if one.isfinite().all() else float("inf"))
    return max(errors)


def shapes(dtype: torch.dtype) -> dict[str, list[float]]:
    """By shape, the kernels' differences from unsharded logits in float64 and from torch's code: in float32 with and without entropy; in
    bfloat16 and float16 with entropy for half of the shapes, different ones in the two types."""
    if dtype == torch.float32:
        kinds = dict.fromkeys(SHAPES, (True, False))
    else:
        kinds = {
            name: ((number % 2 == 0) == (dtype == torch.bfloat16),) for number, name in enumerate(SHAPES)
        }
    found = {}
    for name, (rows, padded, chunk, t) in SHAPES.items():
        for entropy in kinds[name]:
            case = (*head(rows, padded, dtype), rows, chunk, t, entropy)
            one = fused(*case)
            assert one[0].dtype == torch.float32 and one[1].dtype == one[2].dtype == dtype
            assert not one[2][rows:].any()
            label = f"{name}, {'with' if entropy else 'without'} entropy"
            found[label] = [apart(one, other(*case)) for other in (whole, by_torch)]
    return found


def float32() -> dict[str, list[float]]:
    return shapes(torch.float32)


def bfloat16() -> dict[str, list[float]]:
    return shapes(torch.bfloat16)


def float16() -> dict[str, list[float]]:
    return shapes(torch.float16)


def extreme() -> dict[str, Any]:
    """Logits of 10,000, 0 and -10,000 and a padding row of NaN, as in test_logprobs; and probabilities around one in a thousand million."""
    hidden, weight = torch.tensor([[1e4], [-1e4], [0.0]]), torch.tensor([[1.0], [0.0], [-1.0], [torch.nan]])
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    share = HeadShare(0, 3, 1.0, 2, ALONE, with_entropy=True)
    output = fused_log_probs(hidden, weight, torch.tensor([0, 0, 1]), share)
    output.sum().backward()
    gradients = hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    large = head(130, 256, torch.float32, scale=300.0)
    case = (*large, 130, 4, 1.0, True)
    reach = float((large[0] @ large[1][:130].t()).abs().max())
    return {
        "output": output.tolist(),
        "finite": bool(gradients),
        "largest logit": reach,
        "apart": apart(fused(*case), whole(*case)),
    }


def infinite() -> list[bool]:
    """A logit of -infinity has no probability, no moment and no gradient; a NaN logit reaches only the outputs and gradients of its own
    token."""
    found = []
    for hidden in (
        torch.tensor([[1.0, -torch.inf], [1.0, 1.0]]),
        torch.tensor([[torch.nan, 1.0], [1.0, 1.0]]),
    ):
        weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.5, 1.0]])
        logits = torch.where(weight[None] == 0, 0.0, hidden[:, None] * weight).sum(-1)
        statistics, share = logits.new_empty(2, 4), HeadShare(0, 3, 1.0, 2, ALONE, with_entropy=True)
        labels = torch.tensor([0, 1])
        expected = logits.log_softmax(-1)
        fused_head._reduce(logits, labels, statistics, share)
        output, norms = fused_head.combined(statistics[None], with_entropy=True)
        fused_head._differentiate(logits, labels, norms, torch.ones(2, 2), share)
        p = expected.exp()
        entropy = -torch.where(p == 0, 0.0, p * expected).sum(-1)
        own = expected[range(2), labels]
        found.append(torch.allclose(output, torch.stack([own, entropy], 1), equal_nan=True))
        found.append(logits.isnan().all(1).tolist() == p.isnan().all(1).tolist())
    return found


def second_pass() -> float:
    """Logits that the forward pass kept are gone after a backward pass; a second backward pass still has the same gradients."""
    hidden, weight, labels = head(130, 256, torch.float32)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    output = fused_log_probs(hidden, weight, labels, HeadShare(0, 130, 1.0, 4, ALONE, with_entropy=True))
    passes = [
        torch.autograd.grad(output, (hidden, weight), upstream(2), retain_graph=again)
        for again in (True, False)
    ]
    return apart(passes[1], passes[0])


def products() -> dict[str, int]:
    """Matrix products of a forward and backward pass: a kept chunk has no fourth product. Without a backward pass no chunk is kept."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
            return func(*args, **(kwargs or {}))

    hidden, weight, labels = head(65, 128, torch.float32)
    found = {}
    for chunk in (TOKENS, 4, 3):
        with Products() as seen:
            fused(hidden, weight, labels, 65, chunk, 1.0, True)
        found[str(chunk)] = seen.count
    return found


def largest() -> dict[str, int]:
    """Bytes of the largest tensor that any operation returns, and of the largest in float32, for a bfloat16 weight with a gradient buffer."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    found = {"any": 0, "float32": 0}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    found["any"] = max(found["any"], leaf.nbytes)
                    if leaf.dtype == torch.float32:
                        found["float32"] = max(found["float32"], leaf.nbytes)
            return result

    parameter = torch.nn.Parameter(torch.randn(304, 2).bfloat16())
    parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(304, 2), False
    hidden = torch.randn(TOKENS, 2).bfloat16().requires_grad_()
    labels, gradients = torch.zeros(TOKENS, dtype=torch.int64), upstream(2)
    with Sizes():
        fused_log_probs(hidden, parameter, labels, HeadShare(0, 300, 1.0, 5, ALONE, True)).backward(gradients)
    return found


def ranks_of_two() -> list[float]:
    """Differences of two tensor parallel ranks on gloo from unsharded logits: both shares have real rows; one share is only padding."""
    found = []
    for rows in (130, 100):
        hidden, weight, labels = head(rows, 256, torch.float32)
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if not child:
                status = 1
                try:
                    _rank_of_two(1, rows, Path(folder))
                    status = 0
                finally:
                    os._exit(status)
            _rank_of_two(0, rows, Path(folder))
            assert os.waitpid(child, 0)[1] == 0
            ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]
        assert torch.equal(ranks[0][0], ranks[1][0])
        both = (ranks[0][0], ranks[0][1] + ranks[1][1], torch.cat([ranks[0][2], ranks[1][2]]))
        assert not both[2][rows:].any()
        found.append(apart(both, whole(hidden, weight, labels, rows, 1, 1.3, True)))
    return found


def _rank_of_two(rank: int, rows: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    hidden, weight, labels = head(rows, 256, torch.float32)
    start, real = log_probs.vocab_share(weight.chunk(2)[rank], rows, dist.group.WORLD)
    share = HeadShare(start, real, 1.3, 4, dist.group.WORLD, with_entropy=True)
    torch.save(
        passed(lambda h, w: fused_log_probs(h, w, labels, share), hidden, weight.chunk(2)[rank]),
        folder / f"{rank}.pt",
    )
    dist.destroy_process_group()


def gradient_buffers() -> dict[str, Any]:
    """A weight's gradient is added to its buffer; autograd gets a dummy that nothing reads, or no tensor."""
    hidden, weight, labels = head(130, 256, torch.bfloat16)
    share = HeadShare(0, 130, 1.0, 4, ALONE, with_entropy=True)
    *_, expected = fused(hidden, weight.float().bfloat16(), labels, 130, 4, 1.0, True)
    found = {}
    for embedding in (False, True):
        parameter = torch.nn.Parameter(weight.clone())
        parameter.main_grad = torch.ones_like(weight, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        if embedding:
            parameter.zero_out_wgrad = True
        fused_log_probs(hidden, parameter, labels, share).backward(upstream(2))
        given = parameter.grad is not None and parameter.grad.shape == parameter.shape
        found["embedding" if embedding else "weight"] = {
            "apart": apart((parameter.main_grad - 1,), (expected,)),
            "added": parameter.grad_added_to_main_grad,
            "given": given,
        }
    return found


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Have the kernels compute heads on a CPU."""

    def apply(hidden, weight, labels, start, rows, temperature, chunk_tokens, tp_group, with_entropy):
        share = HeadShare(
            start, rows, temperature, chunk_tokens, tp_group, with_entropy, torch.is_grad_enabled()
        )
        return fused_log_probs(hidden, weight, labels, share)

    with mock.patch.object(log_probs._TokenLogProbs, "apply", apply):
        yield


def updates() -> dict[str, dict[str, float]]:
    """Two steps of a model with Megatron's data parallel gradients, whose buckets are reduced during the backward pass: differences of
    losses, gradient norms and weights from torch's code, with tied and untied embeddings."""
    folder = os.environ["MODEL"]
    with tempfile.TemporaryDirectory() as store:
        init_parallel(ParallelLayout(world=1), 0, 1, init_method=f"file://{store}/store")
    found = {}
    for tied in (False, True):
        steps = {"torch": _trained(folder, tied)}
        with on_a_gpu(), mock.patch.object(fused_head, "BLOCK", 512):
            steps["kernels"] = _trained(folder, tied)
        (numbers, weights), (others, others_weights) = steps["kernels"], steps["torch"]
        found["tied" if tied else "own"] = {
            "numbers": apart((torch.tensor(numbers),), (torch.tensor(others),)),
            "weights": max(
                apart((weight,), (others_weights[key],)) for key, weight in weights.items() if weight.any()
            ),
        }
    destroy_parallel()
    return found


def _trained(folder: str, tied: bool) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    config = replace(read_model_config(folder), vocab_size=VOCAB, tie_word_embeddings=tied)
    layout = ParallelLayout(world=1)
    chunks = wrap_for_training(
        build_model(config, layout, dtype=torch.float32, seed=3), overlap_grad_reduce=True
    )
    optimizer, scheduler = build_optimizer(chunks, OPTIM)
    head, history = outputs.lm_head(vocab_size=VOCAB, chunk_tokens=16, with_entropy=True), []

    def loss_of(output: Tensor, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -((output[:, 0] + 0.3 * output[:, 1]) * batch.mask).sum() / 100
        return loss, {"loss": loss}

    for _ in range(2):
        result = train_step(chunks, optimizer, scheduler, batches(layout, lengths=LENGTHS[:4]), head, loss_of)
        history.append((result.stats["loss"], result.grad_norm))
    return history, {name: weight.clone() for name, weight in local_parameters(chunks).items()}


INTERPRETED = (
    float32, bfloat16, float16, extreme, infinite, second_pass, products, largest, ranks_of_two,
    gradient_buffers, updates,
)  # fmt: skip


@contextmanager
def _small_blocks() -> Iterator[None]:
    # Transformer Engine's Python code is installed without the library that it loads. Have its import fail as if it were not installed.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    with mock.patch.object(fused_head, "BLOCK", BLOCK):
        yield


def main() -> None:
    print_cases(INTERPRETED, around=_small_blocks())


if __name__ == "__main__":
    main()
