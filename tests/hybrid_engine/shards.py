"""Simulated ranks: every rank's local tensors as plain dictionaries, made from pieces alone."""

import json
import zlib

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from megarl.layout import Layout


def make_model(folder, family="qwen2", *, tied=False, vocab=300, seed=0, layers=4):
    """A tiny Hugging Face model folder; returns its state dict."""
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
    ranks = []
    for rank in range(layout.num_ranks):
        shapes: dict[str, list[int]] = {}
        for piece in layout.pieces(rank):
            ends = [a + n for a, n in zip(piece.local_box.start, piece.local_box.size, strict=True)]
            shapes[piece.local] = [
                max(pair) for pair in zip(shapes.get(piece.local, ends), ends, strict=True)
            ]
        ranks.append({name: torch.full(shape, torch.nan) for name, shape in shapes.items()})
    return ranks


def apply_manifest(path, tensors) -> int:
    """What the receiver does with a manifest, in plain Python; returns the bytes written."""
    manifest = json.loads(path.read_text())
    payload = np.fromfile(manifest["payload"], dtype=np.uint8)
    written = 0
    for entry in manifest["entries"]:
        raw = payload[entry["offset"] : entry["offset"] + entry["nbytes"]]
        assert zlib.crc32(raw) == entry["crc32"], entry
        box = tuple(slice(a, a + n) for a, n in zip(entry["start"], entry["size"], strict=True))
        values = torch.from_numpy(raw.copy()).view(getattr(torch, entry["dtype"])).view(entry["size"])
        tensors[entry["local"]][box] = values.to(tensors[entry["local"]].dtype)
        written += entry["nbytes"]
    return written
