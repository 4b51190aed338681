"""The bytes that a rank of a tiny model holds, and the planned bytes, term by term."""

from typing import Any

import torch

from megarl.config.schema.models import LoraConfig, MuonConfig
from megarl.costs.activations import RankPass, stage_bytes
from megarl.costs.tensors import ModelUse, StageTensors, buffer_bytes, stage_tensors, training_bytes
from megarl.megatron.build import unwrap
from megarl.megatron.heads.outputs import lm_head, value_head
from megarl.megatron.offload import gradients_of, optimizer_of, weights_of
from megarl.megatron.packing import PackedBatch
from megarl.megatron.sparse.indexer import indexers_of
from megarl.megatron.step import train_step, with_predictions
from megarl.models.float8 import SCALES
from megarl.models.lora import adapted_weights
from tests.costs.models import Built, build
from tests.costs.saved import kept_tensors
from tests.megatron.parity import LENGTHS, VOCAB, batches, loss_of

Terms = dict[str, int]


def measure_rank(
    rank: int, world: int, folder: str, sizes: dict[str, Any], options: dict[str, Any]
) -> tuple[Terms, Terms]:
    """This rank's bytes after a training step (for activations, the peak within it), and the planned bytes.

    The plan of activations assumes modules in torch. `options`: arguments of `build`.
    """
    built = build(rank, world, folder, sizes, **options)
    head = value_head if options.get("head") == "value" else lm_head(vocab_size=VOCAB, chunk_tokens=16)
    depth = built.config.num_mtp_layers if options.get("mtp") else 0
    # Sequences of equal length, as the plan assumes; with gated delta nets, of full chunks.
    lengths = LENGTHS if built.config.delta_net is None else (64,) * len(LENGTHS)
    micro_batches = batches(built.layout, depth, lengths, each=2)[:1] * (2 * built.layout.pp)
    loss = with_predictions(_loss, depth, 0.1, "") if depth else _loss
    parameters = [parameter for chunk in unwrap(built.chunks) for parameter in chunk.parameters()]
    with kept_tensors(parameters) as kept:
        assert train_step(built.chunks, built.optimizer, built.scheduler, micro_batches, head, loss).ok
    states = optimizer_of(built.chunks, built.optimizer)
    indexers = sum(buffer.nbytes for chunk in unwrap(built.chunks) for buffer in indexers_of(chunk))
    found = {
        "weights": weights_of(built.chunks).device_bytes() - indexers,
        "gradients": gradients_of(built.chunks).device_bytes(),
        "optimizer": states.device_bytes(),
        "host": states.host_bytes(),
        "buffers": indexers
        + sum(
            4 * buffer.numel()
            for chunk in unwrap(built.chunks)
            for name, buffer in chunk.named_buffers()
            if name.endswith("expert_bias")
        ),
        "activations": kept.peak,
    }
    return found, _planned(built, options, micro_batches)


def _loss(outputs: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return loss_of(outputs.view(batch.num_tokens, -1), batch)


def _planned(built: Built, options: dict[str, Any], micro_batches: list[PackedBatch]) -> Terms:
    config, stage = built.config, built.place.pp
    lora = options.get("lora") or LoraConfig()
    use = ModelUse(
        config,
        built.layout,
        tokens=micro_batches[0].num_tokens,
        evaluated=0,
        head=options.get("head", "lm"),
        itemsize=options.get("dtype", torch.float32).itemsize,
        lora=lora,
        adapted=adapted_weights(config, lora) if lora.rank else None,
        base_block=lora.blocks,
        distributed=options.get("distributed", True),
        on_host=options.get("on_host", False),
        muon=MuonConfig() if options.get("muon") else None,
        recompute=options.get("recompute"),
        fused=False,
        mtp=options.get("mtp", False),
        indexers=options.get("indexers", False),
    )
    tensors = stage_tensors(use, stage)
    _check_names(built, tensors)
    states = training_bytes(use, tensors, stage, built.replica)
    kept = RankPass(use, tensors, micro_batches[0].num_tokens)
    return {
        "weights": states.weights + states.adapters,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "host": states.host,
        "buffers": buffer_bytes(use, stage),
        "activations": stage_bytes(kept, stage, len(micro_batches)),
    }


def _check_names(built: Built, tensors: StageTensors) -> None:
    """The planned tensors have the names and shapes of the model's own tensors, in the model's order."""
    held = {
        f"{index}:{name}": tuple(parameter.shape)
        for index, chunk in enumerate(unwrap(built.chunks))
        for name, parameter in chunk.named_parameters()
        if not name.endswith(SCALES)
    }
    assert {tensor.name: tensor.shape for tensor in (*tensors.weights, *tensors.adapters)} == held
    if not tensors.adapters:  # with adapters the model's own weights are frozen: their order is irrelevant
        assert [tensor.name for tensor in tensors.weights] == list(held)
