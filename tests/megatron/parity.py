"""Two optimizer steps of a Hugging Face model as the oracle, and of Megatron in a layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import PreTrainedModel

from megarl.checkpoints.hf.load import load_hf_weights
from megarl.config.schema.commands import OptimConfig
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, gather_parameters, local_parameters, wrap_for_training
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.muon import whole_matrices
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.packing import PackedBatch, arrange_sequences
from megarl.megatron.parallel import coords, init_parallel
from megarl.megatron.step import train_step
from megarl.models import ModelConfig, read_model_config
from tests.ranks import RankPool

TOLERANCE = 1e-5
VOCAB = 500  # Megatron pads it to 512, or to 768 where two ranks share it
LENGTHS = (5, 31, 12, 40, 7, 23, 17, 9)
NUM_TARGETS = sum(LENGTHS) - len(LENGTHS)


OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), clip_grad=0.5)


@dataclass(frozen=True)
class Case:
    """A model's folder and Hugging Face's results."""

    folder: str
    expected: list[tuple[float, float]]  # (loss, gradient norm) of each step
    optim: OptimConfig = OPTIM


def sequences(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def train_hugging_face(
    model: PreTrainedModel,
    optim: OptimConfig = OPTIM,
    gradients: Callable[[PreTrainedModel], float] | None = None,
) -> list[tuple[float, float]]:
    """Two steps over all sequences, one at a time, with torch's own AdamW. `gradients`: replaces `loss_and_gradients`."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():  # biases of several experts have two dimensions
        (others if parameter.dim() == 1 or name.endswith("bias") else decayed).append(parameter)
    adam = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": optim.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
    )
    history = []
    for _ in range(2):
        adam.zero_grad()
        total = (gradients or loss_and_gradients)(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad)
        adam.step()
        history.append((total, norm.item()))
    return history


def loss_and_gradients(model: PreTrainedModel) -> float:
    """The mean loss of all targets; adds its gradients to the parameters' gradients, one sequence at a time."""
    total = 0.0
    for tokens in sequences():
        ids = torch.tensor([tokens])
        logits = model(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / NUM_TARGETS
        loss.backward()
        total += loss.item()
    return total


def batches(
    layout: ParallelLayout, depth: int = 0, lengths: Sequence[int] = LENGTHS, each: int | None = None
) -> list[PackedBatch]:
    """This data parallel rank's micro-batches of `sequences`. `depth`: the number of multi-token prediction layers. `each`: as in `batches_of`."""
    tokens = sequences(lengths)
    masks = [[False] + [True] * (len(ids) - 1) for ids in tokens]
    return batches_of(pa.table({"input_ids": tokens, "loss_mask": masks}), layout, depth, each)


def batches_of(
    table: pa.Table, layout: ParallelLayout, depth: int = 0, each: int | None = None
) -> list[PackedBatch]:
    """This data parallel rank's micro-batches of a table's rows. `each`: sequences per micro-batch; None: as many micro-batches as stages, or 2."""
    place = coords()
    rows = list(range(place.dp, table.num_rows, layout.dp))
    each = each or -(-len(rows) // max(2, layout.pp))
    return [
        arrange_sequences(
            table,
            rows[start : start + each],
            depth=depth,
            tp=layout.tp,
            cp=layout.cp,
            cp_rank=place.cp,
            sequence_parallel=layout.sp,
        ).on_device()
        for start in range(0, len(rows), each)
    ]


def half_counted(lengths: Sequence[int]) -> pa.Table:
    """Sequences with a mask in which about half of the tokens count."""
    generator = np.random.default_rng(4)
    return pa.table(
        {
            "input_ids": [generator.integers(0, VOCAB, length) for length in lengths],
            "loss_mask": [generator.random(length) < 0.6 for length in lengths],
        }
    )


def loss_of(log_probs: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(log_probs[:, 0] * batch.mask).sum() / NUM_TARGETS
    return loss, {"loss": loss}


def load_model(
    rank: int, folder: str, layout: ParallelLayout, *, base_block: int | None = None, **options: Any
) -> tuple[ModelConfig, list]:
    """The config of the model at `folder`, and this rank's chunks with its weights; float32 unless `options` say otherwise."""
    init_parallel(layout, rank, layout.world)
    config = read_model_config(folder)
    chunks = build_model(config, layout, base_block=base_block, **{"dtype": torch.float32, **options})
    load_hf_weights(folder, config, layout, rank, local_parameters(chunks), base_block=base_block)
    return config, chunks


def take_steps(
    chunks: list, optimizer: Any, scheduler: Any, layout: ParallelLayout, count: int = 2
) -> list[tuple[float, float]]:
    """(Global loss, gradient norm) of `count` steps."""
    head, history = lm_head(vocab_size=VOCAB, chunk_tokens=16), []
    for _ in range(count):
        result = train_step(chunks, optimizer, scheduler, batches(layout), head, loss_of)
        assert result.ok
        history.append((result.stats["loss"], result.grad_norm))
    return history


def _train(
    rank: int, world: int, case: Case, sizes: dict[str, Any], options: dict[str, Any]
) -> list[tuple[float, float]]:
    """As many steps on this rank as `case.expected` has. Returns: (global loss, gradient norm) of each."""
    layout = ParallelLayout(world=world, **sizes)
    wrapping = {"use_distributed_optimizer": options.pop("distributed", True)}
    wrapping["overlap_grad_reduce"] = options.pop("overlap", False)
    wrapping["fsdp"] = options.pop("fsdp", None)
    _, chunks = load_model(rank, case.folder, layout, **options)
    biases = expert_biases(chunks)
    chunks = wrap_for_training(chunks, matrices=whole_matrices(case.optim), **wrapping)
    optimizer, scheduler = build_optimizer(chunks, case.optim)
    history = take_steps(chunks, optimizer, scheduler, layout, len(case.expected))
    for name, bias in expert_biases(chunks).items():
        assert torch.equal(bias, biases[name]), f"{name} is no parameter, and was changed"
    return history


@dataclass(frozen=True)
class Gathered:
    """A rank after its steps: (loss, norm) of each, the bytes of its weights, and how many elements were out of date before the gathering."""

    history: list[tuple[float, float]]
    weights: dict[str, bytes]
    incomplete: int


def train_gathering(rank: int, world: int, case: Case, sizes: dict[str, Any], late: bool) -> Gathered:
    """Two steps with several buckets of weights, which are gathered in the next step's forward pass (`late`) or after each step."""
    layout = ParallelLayout(world=world, **sizes)
    _, chunks = load_model(rank, case.folder, layout)
    chunks = wrap_for_training(
        chunks,
        overlap_grad_reduce=True,
        overlap_param_gather=late,
        overrides={"bucket_size": 8192},
        matrices=whole_matrices(case.optim),
    )
    assert layout.pp > 1 or len(chunks[0].bucket_groups) > 2
    optimizer, scheduler = build_optimizer(chunks, case.optim)
    history = take_steps(chunks, optimizer, scheduler, layout)
    before = {name: tensor.clone() for name, tensor in local_parameters(chunks).items()}
    gather_parameters(chunks)
    weights = local_parameters(chunks)
    return Gathered(
        history,
        {name: tensor.numpy().tobytes() for name, tensor in weights.items()},
        sum(int((tensor != before[name]).sum()) for name, tensor in weights.items()),
    )


def expert_biases(chunks: list) -> dict[str, torch.Tensor]:
    """The biases that routers add to their scores only for the choice of experts."""
    tensors = local_parameters(chunks)
    return {name: tensor.clone() for name, tensor in tensors.items() if name.endswith("expert_bias")}


def check(
    ranks: RankPool,
    case: Case,
    world: int,
    sizes: dict[str, Any],
    tolerance: float = TOLERANCE,
    after: float | None = None,
    **options: Any,
) -> None:
    """Check losses and norms. `after`: the tolerance after the first update; None: `tolerance`."""
    for history in ranks.run(_train, case, sizes, options, world=world):
        for step, (found, expected) in enumerate(zip(history, case.expected, strict=True)):
            bound = after if step and after is not None else tolerance
            assert found == pytest.approx(expected, rel=bound), step
