"""Manifests as a trainer would write them, from whole Hugging Face tensors.

SGLang's layout is written down here a second time, by hand, so that the tests of this room do not
depend on the weight tables of `megarl.models`.
"""

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Slices:
    """What one TP rank gets: (HF name, local name, local start, values), and its padding by parameter."""

    entries: list[tuple[str, str, list[int], torch.Tensor]] = field(default_factory=list)
    padding: dict[str, int] = field(default_factory=dict)


def rank_slices(state: dict[str, torch.Tensor], config, tp: int, rank: int) -> Slices:
    """The slices of a Qwen2 or Llama model (its state dict and config) for one TP rank of SGLang."""
    slices = Slices()
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, state_head_dim(config)
    q_rows = heads // tp * dim
    kv_rows = max(1, groups // tp) * dim
    kv_rank = rank if groups >= tp else rank // (tp // groups)
    ffn = config.intermediate_size // tp
    rows = -(-config.vocab_size // 64) * 64 // tp
    for name, value in state.items():
        parts = name.split(".")
        kind, tail = parts[-2], parts[-1]
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind in ("embed_tokens", "lm_head"):
            piece = value[rank * rows : (rank + 1) * rows]
            slices.padding[name] = (rows - len(piece)) * value.shape[1]
            if len(piece):
                slices.entries.append((name, name, [0, 0], piece))
        elif kind in ("q_proj", "k_proj", "v_proj"):
            local = name.replace(kind, "qkv_proj")
            start = {"q_proj": 0, "k_proj": q_rows, "v_proj": q_rows + kv_rows}[kind]
            first, count = (rank * q_rows, q_rows) if kind == "q_proj" else (kv_rank * kv_rows, kv_rows)
            slices.entries.append(
                (name, local, [start] + [0] * (value.dim() - 1), value[first : first + count])
            )
        elif kind in ("gate_proj", "up_proj"):
            local = name.replace(kind, "gate_up_proj")
            start = 0 if kind == "gate_proj" else ffn
            slices.entries.append((name, local, [start, 0], value[rank * ffn : (rank + 1) * ffn]))
        elif kind in ("o_proj", "down_proj") and tail == "weight":
            columns = value.shape[1] // tp
            slices.entries.append((name, name, [0, 0], value[:, rank * columns : (rank + 1) * columns]))
        else:
            slices.entries.append((name, name, [0] * value.dim(), value))
    return slices


def state_head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def write_manifests(
    folder: Path, state: dict[str, torch.Tensor], config, tp: int, version: int, num_buckets: int = 2
) -> list[list[Path]]:
    """Write payloads and manifests; returns manifests[bucket][rank]."""
    manifests: list[list[Path]] = [[] for _ in range(num_buckets)]
    for rank in range(tp):
        slices = rank_slices(state, config, tp, rank)
        for bucket in range(num_buckets):
            payload = folder / f"v{version}-b{bucket}-r{rank}.bin"
            entries = []
            with payload.open("wb") as file:
                for tensor, local, start, value in slices.entries[bucket::num_buckets]:
                    data = value.contiguous().view(torch.uint8).numpy().tobytes()
                    entries.append(
                        {
                            "tensor": tensor,
                            "local": local,
                            "start": start,
                            "size": list(value.shape),
                            "dtype": str(value.dtype).removeprefix("torch."),
                            "offset": file.tell(),
                            "nbytes": len(data),
                            "crc32": zlib.crc32(data),
                        }
                    )
                    file.write(data)
            path = folder / f"v{version}-b{bucket}-r{rank}.json"
            content = {
                "version": version,
                "bucket": bucket,
                "last": bucket == num_buckets - 1,
                "payload": str(payload),
                "entries": entries,
                "padding": slices.padding,
            }
            path.write_text(json.dumps(content))
            manifests[bucket].append(path)
    return manifests


def edit(manifest: Path, change) -> None:
    """Apply `change(content)` to a manifest's content in place."""
    content = json.loads(manifest.read_text())
    change(content)
    manifest.write_text(json.dumps(content))
