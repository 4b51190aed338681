"""What megarl knows of one model: facts read from its Hugging Face config, none assumed."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMPANIONS = (
    "hf"  # the folder within a Megatron checkpoint that keeps config, tokenizer and generation config
)


@dataclass(frozen=True)
class MoEConfig:
    """The facts of a model's mixture of experts.

    Attributes:
        top_k: routed experts of a token.
        ffn_hidden_size: width of one routed expert.
        shared_ffn_hidden_size: width of the shared experts together, which every token passes; 0: none.
        dense_layers: numbers, from 0, of the layers that have an ordinary MLP instead.
        scoring: "softmax" (over all experts, before the top k are taken) or "sigmoid".
        norm_topk_prob: whether the chosen experts' scores are divided by their sum.
        expert_bias: whether a bias is added to the scores for the choice alone (DeepSeek-V3's
            `e_score_correction_bias`, float32).
        num_groups, topk_group: experts are chosen within the best `topk_group` of `num_groups` groups; 1, 1: no groups.
        scaling_factor: what the chosen experts' weights are multiplied by.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    dense_layers: tuple[int, ...] = ()
    scoring: str = "softmax"
    norm_topk_prob: bool = True
    expert_bias: bool = False
    num_groups: int = 1
    topk_group: int = 1
    scaling_factor: float = 1.0


@dataclass(frozen=True)
class MLAConfig:
    """The facts of multi-head latent attention; `q_lora_rank` None: queries are projected directly."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """The facts of a decoder-only model. `hf` is the Hugging Face config that they were read from.

    Attributes:
        ffn_hidden_size: width of the dense MLP (of the layers that have one).
        head_dim: of GQA; with MLA the width of a query head, qk_nope_head_dim + qk_rope_head_dim.
        rope_scaling: None, {"rope_type": "llama3", "factor"} or {"rope_type": "yarn", "factor",
            "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}.
        rotary_percent: share of `head_dim` that rotates (GQA only).
        num_mtp_layers: multi-token prediction layers that the model's checkpoint has after its `num_layers`.
        fp8_block: rows and columns of a block of weights that share a scale, in a checkpoint in float8; None: not
            quantised.
    """

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    hf: dict[str, Any] = field(repr=False, compare=False)
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    rotary_percent: float = 1.0
    num_mtp_layers: int = 0
    fp8_block: tuple[int, int] | None = None


def load_hf_config(path: str) -> dict[str, Any]:
    """The parsed `config.json` of a Hugging Face model folder.

    Raises:
        ValueError: no such folder or file, or not JSON.
    """
    folder = Path(path).expanduser()
    file = folder / "config.json"
    if not folder.is_dir():
        raise ValueError(f"model path {path!r} is not a folder; a Hugging Face model folder is needed")
    if not file.is_file():
        raise ValueError(f"model folder {path!r} has no config.json")
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None


def rope_facts(hf: dict[str, Any], path: str, latent: bool = False) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`) keys.

    What Megatron-core 0.19 and SGLang 0.5.21 compute as Hugging Face does: plain RoPE, Llama 3's scaling with its
    published constants (low and high frequency factors 1 and 4, original length 8192), and yarn. `latent`: of latent
    attention, where yarn's `mscale` and `mscale_all_dim` count.

    Raises:
        ValueError: names the type, or the key, that is missing or not supported.
    """
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    theta = float(rope.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    rope.pop("partial_rotary_factor", None)  # see `_rotary_percent`
    if kind == "default":
        return theta, None
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"{path}: rope type {kind!r} is not supported; supported: default, llama3, yarn")
    needed = ("factor", "original_max_position_embeddings")
    missing = [key for key in needed if rope.get(key) is None]
    if missing:
        raise ValueError(f"{path}: rope type {kind!r} lacks {', '.join(missing)}")
    if kind == "yarn":
        return theta, _yarn_facts(rope, path, latent)
    expected = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    _refuse_unknown(rope, {"factor", *expected}, path)
    for key, value in expected.items():
        if float(rope.get(key, value)) != value:
            raise ValueError(f"{path}: rope {key}={rope[key]} is not supported; supported: {value}")
    return theta, {"rope_type": "llama3", "factor": float(rope["factor"])}


def _yarn_facts(rope: dict[str, Any], path: str, latent: bool) -> dict[str, Any]:
    """Without a value: beta_fast 32 and beta_slow 1, as Hugging Face, Megatron and SGLang have it."""
    if not rope.pop("truncate", True):
        raise ValueError(f"{path}: rope truncate=false is not supported; supported: true")
    scales = ("mscale", "mscale_all_dim") if latent else ()
    lengths = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    _refuse_unknown(rope, {*lengths, *scales}, path)
    return {
        "rope_type": "yarn",
        "factor": float(rope["factor"]),
        "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        "beta_fast": float(rope.get("beta_fast") or 32.0),
        "beta_slow": float(rope.get("beta_slow") or 1.0),
        "mscale": float(rope.get("mscale") or 0.0),
        "mscale_all_dim": float(rope.get("mscale_all_dim") or 0.0),
    }


def _refuse_unknown(rope: dict[str, Any], known: Collection[str], path: str) -> None:
    for key, value in rope.items():
        if key not in known and value is not None:
            raise ValueError(
                f"{path}: rope {key}={value!r} is not supported; supported: {', '.join(sorted(known))}"
            )


def _rotary_percent(hf: dict[str, Any], path: str, default: float | None) -> float:
    """From transformers 5 (`rope_parameters`) or 4 keys; `default` None: only whole heads may rotate."""
    rope = hf.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor")
    if default is None:
        refuse_unsupported({"partial_rotary_factor": share}, path, {"partial_rotary_factor": (1, None)})
    return float(share or default or 1.0)


def fp8_block(hf: dict[str, Any], path: str) -> tuple[int, int] | None:
    """Rows and columns of a block of weights that share a scale; None for a model that is not quantised.

    Raises:
        ValueError: a quantisation that is not float8 (e4m3) in blocks of weights, as DeepSeek-V3's checkpoint has it.
    """
    how = hf.get("quantization_config")
    if how is None:
        return None
    accepted = {"quant_method": ("fp8",), "fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}
    for key, values in accepted.items():
        if how.get(key) not in values:
            raise ValueError(
                f"{path}: quantization_config {key}={how.get(key)!r} is not supported; supported: {values[0]!r}"
            )
    block = how.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2:
        raise ValueError(
            f"{path}: quantization_config weight_block_size={block!r} is not supported; supported: two sizes, "
            "as [128, 128]"
        )
    return int(block[0]), int(block[1])


def refuse_unsupported(hf: dict[str, Any], path: str, required: dict[str, Collection[Any]]) -> None:
    """Refuse by name each field of `required` that is present with a value outside its accepted ones."""
    for key, accepted in required.items():
        if key in hf and hf[key] not in accepted:
            raise ValueError(
                f"{path}: config field {key}={hf[key]!r} changes the computation and is not supported; "
                f"supported: {', '.join(repr(value) for value in accepted)}"
            )


def model_dtype(hf: dict[str, Any]) -> str:
    """The weights' type, from transformers 5 (`dtype`) or 4 (`torch_dtype`) keys: "bfloat16", say."""
    return str(hf.get("dtype") or hf.get("torch_dtype") or "float32")


DECODER = {"hidden_act": ("silu",), "attention_dropout": (0, 0.0)}
"""What every family accepts, for `refuse_unsupported`."""

FULL_ATTENTION = {"use_sliding_window": (False,)}
"""What the Qwen families accept besides."""


def refuse_layer_types(hf: dict[str, Any], path: str) -> None:
    """Refuse attention other than to all positions before; transformers 5 always writes `layer_types`."""
    other = sorted(set(hf.get("layer_types") or []) - {"full_attention"})
    if other:
        raise ValueError(f"{path}: layer_types {other} are not supported; supported: full_attention")


def require(hf: dict[str, Any], path: str, *keys: str) -> None:
    """Refuse a config without a value for each of `keys`, all missing ones at once."""
    missing = [key for key in keys if hf.get(key) is None]
    if missing:
        raise ValueError(f"{path}/config.json lacks {', '.join(missing)}")


def decoder_facts(
    hf: dict[str, Any], path: str, *, latent: bool = False, rotary: float | None = None
) -> dict[str, Any]:
    """The ModelConfig fields that every decoder family names alike in its Hugging Face config.

    Args:
        latent: the model has latent attention.
        rotary: the share of a head that rotates where the config names none; None: whole heads rotate in the
            family, and any other share is refused.

    Raises:
        ValueError: a needed field is missing, or the rotary embedding or quantisation is not supported.
    """
    require(
        hf,
        path,
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    theta, scaling = rope_facts(hf, path, latent)
    heads = hf["num_attention_heads"]
    return {
        "architecture": (hf.get("architectures") or [""])[0],
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": hf.get("num_key_value_heads") or heads,
        "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
        "ffn_hidden_size": hf["intermediate_size"],
        "vocab_size": hf["vocab_size"],
        "norm_epsilon": float(hf["rms_norm_eps"]),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_percent": _rotary_percent(hf, path, rotary),
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "max_position_embeddings": hf["max_position_embeddings"],
        "dtype": model_dtype(hf),
        "fp8_block": fp8_block(hf, path),
        "hf": hf,
    }
