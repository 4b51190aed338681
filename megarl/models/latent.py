"""The model families with latent attention (MLA): how each reads its facts from a Hugging Face config; and the mixture that they share
with GLM-4.5's family.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megarl.models.config import (
    DECODER,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    decoder_facts,
    num_experts,
    refuse_unsupported,
)
from megarl.models.fields import Fields, short

MIXTURE = {"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
"""Accepted values of fields that transformers 5 does not write, since its code knows no other values."""


# The norms of latent queries, keys and values take 1e-6 in Hugging Face's code whatever this field says; Megatron's and SGLang's take
# the field.
_LATENT_EPSILON = {"rms_norm_eps": (1e-6,)}


# Without these fields the classes of these families, in transformers and in Kimi's own code, have 8 groups of experts and choose among 4.
_GROUPED = ("deepseek_v3", "deepseek_v32", "kimi_k2")


def _latent(family: str, more: dict[str, tuple[Any, ...]]) -> Callable[[Fields], ModelConfig]:
    """DeepSeek-V3 and R1, and Kimi-K2, which has the same architecture and names of weights under a type of its own: latent attention,
    sigmoid-scored experts in groups after dense layers, a layer for MTP. `more`: accepted values of further fields."""

    def config_from_hf(hf: Fields) -> ModelConfig:
        accepted = {
            "attention_bias": (False,),
            "rope_interleave": (True,),
            "num_key_value_heads": (hf.count("num_attention_heads"), None),
            **more,
        }
        refuse_unsupported(hf, DECODER | MIXTURE | accepted)
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        hf.require(*sizes)
        if family in _GROUPED:
            hf.require("n_group", "topk_group")
        mla = MLAConfig(
            q_lora_rank=hf.count("q_lora_rank") if "q_lora_rank" in hf else None,
            **{size: hf.count(size) for size in sizes},
        )
        facts = decoder_facts(hf, latent=True) | {"head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim}
        return ModelConfig(family=family, qkv_bias=False, qk_norm=False, mla=mla, **mixture(hf), **facts)

    return config_from_hf


def mixture(hf: Fields) -> dict[str, MoEConfig | int]:
    """A mixture of DeepSeek-V3's kind, and MTP layers: sigmoid scores with a bias for the choice, shared experts, dense first layers.

    Raises:
        ValueError: a needed field is missing.
    """
    hf.require(
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "first_k_dense_replace",
        "norm_topk_prob",
        "routed_scaling_factor",
    )
    experts, groups = num_experts(hf, "n_routed_experts"), hf.count("n_group", 1)
    if experts % groups:
        raise ValueError(
            f"{hf.file}: n_routed_experts must be a multiple of n_group, found {experts} and {groups}"
        )
    ffn = hf.count("moe_intermediate_size")
    dense = min(hf.count("first_k_dense_replace", least=0), hf.count("num_hidden_layers"))
    moe = MoEConfig(
        num_experts=experts,
        top_k=hf.count("num_experts_per_tok", most=experts),
        ffn_hidden_size=ffn,
        shared_ffn_hidden_size=ffn * hf.count("n_shared_experts", least=0),
        dense_layers=tuple(range(dense)),
        scoring="sigmoid",
        norm_topk_prob=hf.flag("norm_topk_prob"),
        expert_bias=True,
        num_groups=groups,
        topk_group=hf.count("topk_group", 1, most=groups),
        scaling_factor=hf.number("routed_scaling_factor"),
    )
    return {"moe": moe, "num_mtp_layers": hf.count("num_nextn_predict_layers", 0, least=0, most=100)}


_latent_glm4_moe = _latent(
    # SGLang 0.5.21 never ties this model's head to its embedding.
    "glm4_moe_lite",
    {"tie_word_embeddings": (False,)},
)


def _glm4_moe_lite(hf: Fields) -> ModelConfig:
    """GLM-4.7-Flash: DeepSeek-V3's latent attention, mixture and layer for MTP.

    Its `rms_norm_eps` is 1e-5. The norms of latent queries, keys and values take it, too, as SGLang's do; transformers 5.12.1's take
    1e-6 whatever the config says, as its code for DeepSeek-V3 does.
    """
    _check_dense_layers(hf)
    return _latent_glm4_moe(hf)


def _check_dense_layers(hf: Fields) -> None:
    """Refuse different dense layers in `first_k_dense_replace`, SGLang's field, and `mlp_layer_types`, which transformers 5 writes.

    Raises:
        ValueError: they are not the same layers.
    """
    dense = hf.count("first_k_dense_replace", least=0)
    layers = hf.count("num_hidden_layers")
    types, expected = hf.texts("mlp_layer_types"), ["dense"] * dense + ["sparse"] * (layers - dense)
    if types and types != expected[:layers]:
        raise ValueError(
            f"{hf.file}: mlp_layer_types={short(types)} and first_k_dense_replace={dense} are not the same layers; "
            f"by the second they are {short(expected[:layers])}"
        )


_SPARSE = {
    # What SGLang 0.5.21 computes otherwise than transformers 5.12.1, or by a name of its own.
    "index_init_tokens": (0, None),
    "index_k_norm_type": ("layer", None),
    "index_kpool": (1, None),
    "index_local_tokens": (0, None),
    "learnable_sink": (False, None),
    "mla_nope": (False, None),
    "mlp_bias": (False,),
    "router_fp32": (False, None),
    "tie_word_embeddings": (False,),
}
_UNSHARED = {
    name: (None, *more)
    for name, more in {"index_topk_freq": (1,), "index_topk_pattern": (), "indexer_types": ()}.items()
}
_SPARSE_LATENT = {
    "deepseek_v32": _latent("deepseek_v32", _LATENT_EPSILON | _SPARSE | _UNSHARED),
    "glm_moe_dsa": _latent("glm_moe_dsa", _SPARSE),
}


def _sparse(family: str) -> Callable[[Fields], ModelConfig]:
    """DeepSeek-V3.2 and GLM-5: DeepSeek-V3's architecture, and an indexer that chooses the keys of each query (DeepSeek sparse attention).

    GLM-5's `rms_norm_eps` is 1e-5, with GLM-4.7-Flash's norms of latent vectors.
    """

    def config_from_hf(hf: Fields) -> ModelConfig:
        _check_dense_layers(hf)
        hf.require("q_lora_rank", "index_topk", "index_head_dim", "index_n_heads")
        layers, kinds = hf.count("num_hidden_layers"), hf.texts("layer_types")
        if kinds and kinds != ["deepseek_sparse_attention"] * layers:
            raise ValueError(
                f"{hf.file}: layer_types must say deepseek_sparse_attention for each of the {layers} layers, found {short(kinds)}"
            )
        # Of experts, transformers reads this field for DeepSeek-V3.2.
        experts = (hf.count("n_routed_experts"), None)
        if family == "deepseek_v32":
            refuse_unsupported(hf, {"num_experts": experts, "num_local_experts": experts})
        indexer = IndexerConfig(
            layers=tuple(number for number, shares in enumerate(_shared_choices(hf, layers)) if not shares),
            heads=hf.count("index_n_heads"),
            head_dim=hf.count("index_head_dim"),
            topk=hf.count("index_topk"),
            interleaved=hf.flag("indexer_rope_interleave", False),
        )
        return replace(_SPARSE_LATENT[family](hf), indexer=indexer)

    return config_from_hf


def _shared_choices(hf: Fields, layers: int) -> list[bool]:
    """By layer, whether it takes the keys that the last indexer before it has chosen, as transformers 5.12.1 and SGLang 0.5.21 read the fields.

    Raises:
        ValueError: a malformed pattern; the first layer has no indexer.
    """
    types = hf.texts("indexer_types")
    if not types and (pattern := hf.text("index_topk_pattern", "")):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if not types:
        period, offset = hf.count("index_topk_freq", 1), hf.count("index_skip_topk_offset", 2)
        types = ["shared" if max(layer - offset + 1, 0) % period else "full" for layer in range(layers)]
    if len(types) != layers or set(types) - {"full", "shared"} or types[0] != "full":
        raise ValueError(
            f"{hf.file}: indexer_types (or index_topk_pattern, F and S) must say full or shared for each of the {layers} layers, full for the "
            f"first, found {short(types)}"
        )
    return [kind == "shared" for kind in types]


LATENT = {
    "deepseek_v3": _latent("deepseek_v3", _LATENT_EPSILON),
    "deepseek_v32": _sparse("deepseek_v32"),
    "glm4_moe_lite": _glm4_moe_lite,
    "glm_moe_dsa": _sparse("glm_moe_dsa"),
    "kimi_k2": _latent("kimi_k2", _LATENT_EPSILON),
}
"""The part of `FAMILIES` with latent attention."""
