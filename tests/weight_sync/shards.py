"""Simulated ranks: every rank's local tensors as plain dictionaries, made from the layout's pieces only."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints.hf.load import load_hf_weights
from megarl.layout import Layout, Piece, Plan
from megarl.models import ModelConfig, read_model_config
from megarl.weight_sync.layouts import megatron_layout
from tests.weight_sync.fusions import single_experts


@dataclass(frozen=True)
class TinyModel:
    """A Hugging Face folder, its config, and the tensors of its file (MTP layers included), with a tensor for each expert."""

    folder: Path
    config: ModelConfig
    state: dict[str, torch.Tensor]

    @property
    def decoder(self) -> dict[str, torch.Tensor]:
        """The tensors except the MTP layers' tensors."""
        extra = (f"model.layers.{self.config.num_layers}.", "mtp.")
        return {name: tensor for name, tensor in self.state.items() if not name.startswith(extra)}


def read_tiny_model(folder: Path) -> TinyModel:
    state = single_experts(load_file(folder / "model.safetensors"))
    return TinyModel(folder, read_model_config(str(folder)), state)


def run_plan(
    plan: Plan, sources: Sequence[Mapping[str, torch.Tensor]], targets: Sequence[Mapping[str, torch.Tensor]]
) -> None:
    """Make all copies of a plan, rank by rank, and check that each element is written once, to an empty place."""
    left = list(map(num_empty, targets))
    for copy in plan.copies:
        target = targets[copy.target_rank][copy.target_local][copy.target_box.slices]
        source = sources[copy.source_rank][copy.source_local][copy.source_box.slices]
        target.copy_(source.view(target.shape))
        left[copy.target_rank] -= copy.target_box.numel
    # If an element was copied twice, or to a place that was not empty, fewer elements are filled than were copied.
    assert list(map(num_empty, targets)) == left


def num_empty(tensors: Mapping[str, torch.Tensor]) -> int:
    """The number of elements that were not written: they are NaN."""
    return int(torch.cat([tensor.flatten() for tensor in tensors.values()]).isnan().sum()) if tensors else 0


def make_model(folder, family="qwen2", *, tied=False, vocab=300, seed=0, layers=4):
    """A tiny Hugging Face model folder; returns its state dict."""
    # Imported here, since it takes seconds and interpreted_buckets.py does not need it.
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    config = config_class(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocab,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return {
        name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")
    }


def empty_shards(layout: Layout) -> list[dict[str, torch.Tensor]]:
    """Each rank's local tensors, just large enough for its pieces, full of NaN."""
    return [empty_tensors(layout.pieces(rank)) for rank in range(layout.num_ranks)]


def empty_tensors(pieces: Iterable[Piece]) -> dict[str, torch.Tensor]:
    """The local tensors of a rank that has these pieces, just large enough for them, full of NaN."""
    shapes: dict[str, list[int]] = {}
    for piece in pieces:
        ends = [a + n for a, n in zip(piece.local_box.start, piece.local_box.size, strict=True)]
        known = shapes.get(piece.local)
        shapes[piece.local] = ends if known is None else list(map(max, known, ends))
    # All are views of one block of memory: a rank has hundreds of tensors.
    block = torch.full((sum(map(prod, shapes.values())),), torch.nan)
    parts = block.split([prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def load_all(folder, parallel, head="lm", mtp=False) -> list[dict[str, torch.Tensor]]:
    """Each rank's tensors after reading the checkpoint in `folder`; replicas copy the first rank with the same shards."""
    config = read_model_config(str(folder))
    layout = megatron_layout(config, parallel, head, mtp=mtp)
    ranks: list[dict[str, torch.Tensor]] = []
    for rank, shards in enumerate(layout.shards_of):
        first = layout.shards_of.index(shards)
        if first < rank:
            ranks.append({name: tensor.clone() for name, tensor in ranks[first].items()})
            continue
        parameters = empty_tensors(layout.pieces(rank))
        load_hf_weights(str(folder), config, parallel, rank, parameters, head, mtp=mtp)
        ranks.append(parameters)
    return ranks


# Weights that are in float8 in published folders: `w1`, `w2` and `w3` are MiniMax-M2's experts.
PROJECTIONS = ("_proj.weight", ".wq_b.weight", ".wk.weight", ".w1.weight", ".w2.weight", ".w3.weight")


def quantise(folder: Path, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Write the projections of a checkpoint's layers in float8, in DeepSeek-V3's format, with one block of each all zero.

    Returns: the dequantised tensors by name, computed element by element in float32.
    """
    file, written, means = folder / "model.safetensors", {}, {}
    for name, tensor in load_file(file).items():
        if not name.endswith(PROJECTIONS) or ".weights_proj." in name:
            written[name] = means[name] = tensor
            continue
        tensor = tensor.float()
        tensor[: block[0], : block[1]] = 0
        grid = [-(-extent // size) for extent, size in zip(tensor.shape, block, strict=True)]
        scales = torch.rand(grid) * 1e-3 + 1e-4
        wide = torch.kron(scales, torch.ones(block))[: tensor.shape[0], : tensor.shape[1]]
        written[name] = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        written[name + "_scale_inv"] = scales
        means[name] = written[name].float() * wide
    save_file(written, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        "activation_scheme": "dynamic",
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    return means
