"""The families of gated delta nets and gated attention, Qwen3-Next and Qwen3.5: how they read their facts from a Hugging Face config."""

from dataclasses import replace
from typing import Any

from megarl.models.config import (
    DECODER,
    FULL_ATTENTION,
    DeltaNetConfig,
    ModelConfig,
    MoEConfig,
    decoder_facts,
    num_experts,
    refuse_unsupported,
)
from megarl.models.fields import Fields, short

_DELTA = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    # SGLang 0.5.21 takes every layer for a mixture.
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}


def qwen3_next(hf: Fields) -> ModelConfig:
    """Qwen3-Next: gated delta nets, and every so many layers attention with gates on its output; experts and a shared one with a gate."""
    # SGLang 0.5.21 never ties the head to the embedding.
    accepted = {**_ACCEPTED, "output_gate_type": (None,), "tie_word_embeddings": (False,)}
    refuse_unsupported(hf, DECODER | FULL_ATTENTION | accepted)
    hf.require("norm_topk_prob")
    facts = decoder_facts(hf, rotary=0.25)
    return ModelConfig(
        family="qwen3_next",
        moe=replace(_mixture(hf), norm_topk_prob=hf.flag("norm_topk_prob")),
        # The published config says nothing of the one layer that the files have; exports of megarl without the layer write the field.
        num_mtp_layers=hf.count("num_nextn_predict_layers", 1, least=0, most=1),
        **_hybrid(hf, facts),
        **facts,
    )


def qwen3_5(hf: Fields) -> ModelConfig:
    """Qwen3.5: Qwen3-Next's layers with other tensors for the inputs of its delta nets, dense or with experts.

    Published models come with a vision tower, whose fields are in `vision_config` and the language model's in `text_config`; the language
    model alone is the one that is trained and served, and reads text.
    """
    is_nested = not hf.text("model_type").endswith("_text")
    text = _language_model(hf) if is_nested else hf
    has_experts = "moe" in hf.text("model_type")
    accepted = {
        **_ACCEPTED,
        "mamba_ssm_dtype": ("float32", None),
        "mtp_use_dedicated_embeddings": (False, None),
        # transformers 5.12.1 always divides by the chosen experts' sum, and always has silu before the product with the gates.
        "norm_topk_prob": (True,),
        "output_gate_type": (None, "silu", "swish"),
    }
    refuse_unsupported(text, DECODER | FULL_ATTENTION | accepted)
    if has_experts:
        text.require("moe_intermediate_size")
    width = {"intermediate_size": text.values.get("moe_intermediate_size")} if has_experts else {}
    facts = decoder_facts(Fields(_plain_rotary(text) | width, text.file), rotary=0.25)
    share = text.number("partial_rotary_factor", 0.25)
    if facts["rotary_percent"] != share:
        raise ValueError(
            f"{text.file}: partial_rotary_factor={share:g} (0.25 without the field), which SGLang reads, is not that of rope_parameters, "
            f"{facts['rotary_percent']:g}, which transformers reads"
        )
    return ModelConfig(
        family="qwen3_5_moe" if has_experts else "qwen3_5",
        moe=_mixture(text) if has_experts else None,
        num_mtp_layers=text.count("mtp_num_hidden_layers", 0, least=0, most=1),
        is_nested=is_nested,
        **_hybrid(text, facts),
        **(facts | {"hf": hf.values, "architecture": next(iter(hf.texts("architectures")), "")}),
    )


def _language_model(hf: Fields) -> Fields:
    """The fields of the language model in a config with a vision tower's; the fields outside say how its weights are quantised.

    Raises:
        ValueError: there are none, or they are of another model, or tie the head differently from the fields outside.
    """
    hf.require("text_config")
    # SGLang's name for a folder without its vision tower, which an exported one would lack.
    refuse_unsupported(hf, {"language_model_only": (False, None)})
    text, kind = hf.object("text_config"), hf.text("model_type")
    if text.text("model_type", f"{kind}_text") != f"{kind}_text":
        raise ValueError(
            f"{text.file} model_type={short(text.values['model_type'])} is not supported; supported: {kind}_text"
        )
    if hf.flag("tie_word_embeddings", False) != text.flag("tie_word_embeddings", False):
        raise ValueError(
            f"{hf.file}: tie_word_embeddings={hf.flag('tie_word_embeddings', False)} must be the same in text_config, where it is "
            f"{text.flag('tie_word_embeddings', False)}: transformers reads the outer field, SGLang the inner one"
        )
    outside = {key: hf.values[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in hf}
    return Fields({**outside, **text.values}, text.file)


def _plain_rotary(text: Fields) -> dict[str, Any]:
    """The fields without the sections of M-RoPE: parts of a head that rotate by the positions of a picture's rows and columns, which are the
    same number in a text.

    Raises:
        ValueError: the sections are not three counts that make up the part of a head that rotates.
    """
    rope = text.object("rope_parameters")
    sections = rope.values.get("mrope_section")
    if sections is not None:
        share = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 0.25))
        pairs = int(text.count("head_dim") * share) // 2
        counts = (
            isinstance(sections, list)
            and len(sections) == 3
            and all(type(n) is int and n >= 0 for n in sections)
        )
        if not counts or sum(sections) != pairs:
            raise ValueError(
                f"{rope.file} mrope_section must be three counts with the sum {pairs}, half of a head's rotating dimensions, found {short(sections)}"
            )
    plain = {
        key: value for key, value in rope.values.items() if key not in ("mrope_section", "mrope_interleaved")
    }
    return text.values | ({"rope_parameters": plain} if plain else {})


def _hybrid(hf: Fields, facts: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields that both families have alike.

    Raises:
        ValueError: a needed field is missing; the number of value heads is no multiple of the number of key heads.
    """
    hf.require("head_dim", "num_key_value_heads", *(f"linear_{name}" for name in _DELTA))
    key_heads, value_heads, key_dim, value_dim, conv = (hf.count(f"linear_{name}") for name in _DELTA)
    if value_heads % key_heads:
        raise ValueError(
            f"{hf.file}: linear_num_value_heads must be a multiple of linear_num_key_heads, found {value_heads} and {key_heads}"
        )
    layers = _delta_net_layers(hf, facts["num_layers"])
    return {
        "qkv_bias": False,
        "qk_norm": True,
        "delta_net": DeltaNetConfig(layers, key_heads, value_heads, key_dim, value_dim, conv),
        "output_gate": True,
        "zero_centered_norms": True,
    }


def _mixture(hf: Fields) -> MoEConfig:
    experts = "num_local_experts" if "num_local_experts" in hf.values else "num_experts"  # transformers 5, 4
    hf.require(experts, "num_experts_per_tok", "moe_intermediate_size")
    return MoEConfig(
        num_experts=num_experts(hf, experts),
        top_k=hf.count("num_experts_per_tok", most=num_experts(hf, experts)),
        ffn_hidden_size=hf.count("moe_intermediate_size"),
        shared_ffn_hidden_size=hf.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _delta_net_layers(hf: Fields, layers: int) -> tuple[int, ...]:
    """The numbers of the layers that `layer_types` (transformers), or else `full_attention_interval` (SGLang 0.5.21), gives no attention.

    Raises:
        ValueError: the two fields do not say the same.
    """
    interval = hf.count("full_attention_interval", 4)
    by_interval = [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)
    ]
    types = hf.texts("layer_types") or by_interval
    if types != by_interval:
        raise ValueError(
            f"{hf.file}: layer_types must have full_attention in every layer of full_attention_interval={interval} (4 without the field) "
            "and linear_attention in the others: SGLang reads that field alone"
        )
    return tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")
