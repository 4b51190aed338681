"""A tiny Hugging Face model as oracle: its folder, Megatron ranks with its weights, and its own results."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from megarl.layout import Piece
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import build_model, local_parameters, wrap_for_training
from megarl.megatron.packing import PackedBatch, arrange_trajectories
from megarl.megatron.parallel import coords, init_parallel
from megarl.models import read_model_config
from megarl.weight_sync.layouts import megatron_layout
from tests.weight_sync.fusions import single_experts

VOCAB = 300


def save_model(folder: Path, head: str = "lm", tied: bool = False) -> PreTrainedModel:
    """Write a Qwen2 model with random weights (biases, norms and head too) to `folder` and return it."""
    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        num_labels=1,
        pad_token_id=0,
    )
    model = (Qwen2ForCausalLM if head == "lm" else Qwen2ForSequenceClassification)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def make_table(seed: int = 0) -> pa.Table:
    """Ragged trajectories with random masks and weights: prompts 1 to 9 and responses 1 to 14 tokens."""
    generator = np.random.default_rng(seed)
    rows = []
    for prompt, response in [(3, 8), (1, 1), (9, 14), (5, 2), (2, 13), (6, 7), (4, 4), (8, 1)]:
        rows.append(
            {
                "prompt_ids": generator.integers(0, VOCAB, prompt).astype(np.int32),
                "response_ids": generator.integers(0, VOCAB, response).astype(np.int32),
                "response_mask": generator.random(response) < 0.8,
                "advantages": generator.normal(size=response).astype(np.float32),
            }
        )
    return pa.Table.from_pylist(rows)


@dataclass(frozen=True)
class Rank:
    """This process's part of a model in a layout, wrapped for training."""

    layout: ParallelLayout
    chunks: list
    pieces: list[Piece]

    def pack(
        self, table: pa.Table, rows: list[int], fields: tuple[str, ...] = (), share_prompts: bool = False
    ) -> PackedBatch:
        return arrange_trajectories(
            table,
            rows,
            fields,
            tp=self.layout.tp,
            cp=self.layout.cp,
            cp_rank=coords().cp,
            sequence_parallel=self.layout.sp,
            share_prompts=share_prompts,
        ).on_device()

    def gradients(self) -> list[tuple[Piece, torch.Tensor]]:
        """This rank's pieces of each Hugging Face tensor's gradient."""
        local = {
            f"{index}:{name}": parameter.main_grad
            for index, chunk in enumerate(self.chunks)
            for name, parameter in chunk.module.named_parameters()
        }
        return [
            (piece, local[piece.local][piece.local_box.slices].clone())
            for piece in self.pieces
            if piece.local in local  # routers' biases are no parameters
        ]


def place_model(
    rank: int,
    world: int,
    layout: dict,
    folder: str,
    head: str = "lm",
    use_distributed_optimizer: bool = False,
    overlap_grad_reduce: bool = False,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> Rank:
    """Build the model at `folder` in the layout and fill it from its safetensors file. `ddp`: further arguments of
    `wrap_for_training`, `options`: of `build_model`."""
    layout = ParallelLayout(world=world, **layout)
    init_parallel(layout, rank, world)
    config = read_model_config(folder)
    chunks = wrap_for_training(
        build_model(config, layout, head=head, dtype=torch.float32, **options),
        use_distributed_optimizer=use_distributed_optimizer,
        overlap_grad_reduce=overlap_grad_reduce,
        **(ddp or {}),
    )
    mtp = options.get("mtp") is not None
    pieces = megatron_layout(config, layout, head, mtp=mtp).pieces(rank)
    parameters, state = local_parameters(chunks), single_experts(load_file(f"{folder}/model.safetensors"))
    for piece in pieces:
        parameters[piece.local][piece.local_box.slices].copy_(state[piece.tensor][piece.box.slices])
    return Rank(layout, chunks, pieces)


def optimizer_settings() -> SimpleNamespace:
    """The `optim` section of a configuration."""
    return SimpleNamespace(
        optimizer="adam",
        lr=1e-3,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_style="constant",
        lr_decay_steps=None,
        weight_decay=0.0,
        betas=[0.9, 0.95],
        eps=1e-8,
        clip_grad=1e9,  # clipping would scale the gradients that tests compare
        initial_loss_scale=65536.0,
        min_loss_scale=1.0,
        loss_scale_window=1000,
        hysteresis=2,
        optimizer_cpu_offload=False,
    )


def name_in_file(model: PreTrainedModel, name: str) -> str:
    """The name that the model's files have for its parameter `name`; MiniMax-M2's files have Mixtral's names."""
    mixtral = model.config.model_type == "minimax_m2"
    return name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name


def projections_of(model: PreTrainedModel, kind: str) -> tuple[str, ...]:
    """The names in the model's files of an expert's projections that form the parameter `gate_up_proj` or `down_proj`, from its top."""
    if model.config.model_type == "minimax_m2":
        return ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
    return ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)


def gradients_by_file_name(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A Hugging Face model's gradients under the names in its files, which have a tensor for each expert."""
    found = {}
    if model.config.model_type == "gpt_oss":
        return single_experts({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, parameter in model.named_parameters():
        if ".indexer." in name and parameter.grad is None:  # a choice of keys has no gradient
            continue
        layer, fused, kind = name_in_file(model, name).rpartition("experts.")
        if kind not in ("gate_up_proj", "down_proj"):
            found[layer + fused + kind] = parameter.grad
            continue
        parts = projections_of(model, kind)
        for expert, grad in enumerate(parameter.grad):
            for part, rows in zip(parts, grad.chunk(len(parts)), strict=True):
                found[f"{layer}{fused}{expert}.{part}.weight"] = rows
    return found


def check_gradients(
    model: PreTrainedModel, results: list[list[tuple[Piece, torch.Tensor]]], atol: float = 1e-5
) -> None:
    """Every rank's pieces equal the Hugging Face model's gradients, and together the pieces cover all of them.

    Float32's rounding grows with the numbers that are summed: `atol` is relative to a tensor's largest gradient where that is above one.
    """
    expected = gradients_by_file_name(model)
    bounds = {name: atol * max(1.0, grad.abs().max().item()) for name, grad in expected.items()}
    seen = {name: torch.zeros_like(grad, dtype=torch.bool) for name, grad in expected.items()}
    for pieces in results:
        for piece, grad in pieces:
            wanted = expected[piece.tensor][piece.box.slices]
            bound = bounds[piece.tensor]
            torch.testing.assert_close(
                grad, wanted, rtol=1e-4, atol=bound, msg=lambda m, p=piece: f"{p}: {m}"
            )
            seen[piece.tensor][piece.box.slices] = True
    assert not [name for name, covered in seen.items() if not covered.all()]
