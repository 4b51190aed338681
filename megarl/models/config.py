"""The facts of one model, read from its Hugging Face config; none is assumed."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from megarl.models.fields import Fields, short

# Weights are named one by one before they are compared with files; no published model comes near these numbers.
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 1 << 18  # experts of all layers together
_DTYPES = ("float32", "bfloat16", "float16", "float64")
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
        scaling_factor: factor of the chosen experts' weights.
        shared_gate: whether the shared experts' output has a factor of its own for each token, a sigmoid.
        biases: whether the router and the experts' projections have biases.
        clamp: the gated unit is gpt-oss's, x sigmoid(1.702 x) (y + 1) with x = min(gate, clamp) and y = up within -clamp and clamp; None:
            silu(gate) up.
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
    shared_gate: bool = False
    biases: bool = False
    clamp: float | None = None


@dataclass(frozen=True)
class DeltaNetConfig:
    """The facts of gated delta nets (Yang et al., arXiv:2412.06464), which most layers have in place of attention.

    Attributes:
        layers: numbers, from 0, of the layers that have one.
        key_heads: of queries, too. value_heads: a multiple of `key_heads`; each has a state [key_dim, value_dim].
        conv: how many tokens, the current one among them, each channel of queries, keys and values is mixed from.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def keys(self) -> int:
        """Width of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values, and of the output's gates."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class MLAConfig:
    """The facts of multi-head latent attention; `q_lora_rank` None: queries are projected directly."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


SCORE_BYTES = 1 << 27
"""Bytes of a sparse attention's scores, in float32, that a trainer's rank has at one time."""


@dataclass(frozen=True)
class IndexerConfig:
    """The facts of an indexer (DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv:2512.02556, section 2.1), which chooses the keys that a query
    attends to: among `topk` or fewer it has no choice.

    Attributes:
        layers: numbers, from 0, of the layers that have one; others take the choice of the last indexer before. Layers for MTP have one.
        heads, head_dim: of its queries; its keys have one head.
        topk: keys of a query.
        interleaved: whether it rotates pairs of neighbouring dimensions. SGLang then has `wk` and `weights_proj` in one tensor.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    topk: int
    interleaved: bool


# In SGLang's order of preference.
CONTEXT_FIELDS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)


ATTENTION_OVER_ALL_RANKS = ("llama", "qwen2")
"""Families whose classes in SGLang 0.5.21 have no data parallel attention."""

CHANNELS = "compressed-tensors"
"""The `quant_method` of folders whose float8 weights have a scale for each row, as GLM's own FP8 folders have."""

QWEN_HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families of gated delta nets and gated attention, by whose names SGLang 0.5.21 and files call the same parts."""

ENGINE_STATES = {"cpu": 3, "cuda": 5}
"""By device, the states of gated delta nets that SGLang 0.5.21 needs for each request that runs: its own, cached prompts', and on a GPU the
next step's (mem_cache/kv_cache_configurator.py, `_calculate_mamba_ratio`)."""


@dataclass(frozen=True)
class ModelConfig:
    """The facts of a decoder-only model. `hf` is the Hugging Face config that they were read from.

    Attributes:
        ffn_hidden_size: width of the dense MLP (of the layers that have one).
        head_dim: of GQA; with MLA the width of a query head, qk_nope_head_dim + qk_rope_head_dim.
        rope_scaling: None, {"rope_type": "llama3", "factor"} or {"rope_type": "yarn", "factor",
            "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}, and "truncate": False where the bounds of yarn's ramp
            are not rounded.
        rotary_percent: share of `head_dim` that rotates (GQA only).
        indexer: of sparse attention; None: queries attend to all keys before them.
        delta_net: of the layers that have no attention; None: all have.
        output_gate: whether attention's output is multiplied by sigmoids of gates, which come with the queries (GQA only).
        zero_centered_norms: whether norms have 1 + weight for a factor, all but the one of a delta net's output.
        qk_norm_all_heads: the norms of queries and keys (`qk_norm`) are each over all heads together, with a weight for every
            element of every head.
        num_mtp_layers: multi-token prediction layers that the model's checkpoint has after its `num_layers`.
        fp8_block: rows and columns of a block of weights that share a scale, in a checkpoint in float8; None: not
            quantised.
        output_bias: whether the projection of attention's output has a bias.
        sinks: whether each head has a learnt logit in its softmax that no value belongs to.
        window: positions, its own among them, that a query of the layers `window_layers` (numbers from 0) attends to.
        is_nested: whether config.json has the model's fields in `text_config`, beside those of a vision tower.
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
    indexer: IndexerConfig | None = None
    delta_net: DeltaNetConfig | None = None
    output_gate: bool = False
    zero_centered_norms: bool = False
    rotary_percent: float = 1.0
    qk_norm_all_heads: bool = False
    num_mtp_layers: int = 0
    fp8_block: tuple[int, int] | None = None
    output_bias: bool = False
    sinks: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    is_nested: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of config.json that are the language model's."""
        return self.hf["text_config"] if self.is_nested else self.hf

    @property
    def has_qwen_names(self) -> bool:
        """Whether SGLang's attention and the multi-token prediction layer have the names of Qwen3-Next's."""
        return self.family in QWEN_HYBRIDS

    @property
    def mtp_field(self) -> str:
        """The field that counts the model's multi-token prediction layers."""
        is_qwen3_5 = self.family in ("qwen3_5", "qwen3_5_moe")
        return "mtp_num_hidden_layers" if is_qwen3_5 else "num_nextn_predict_layers"

    @property
    def data_parallel_attention(self) -> bool:
        """Whether SGLang serves it with data parallel attention."""
        return self.family not in ATTENTION_OVER_ALL_RANKS

    @property
    def scaled_channels(self) -> bool:
        """Whether the folder's weights are in float8 with a scale for each row, and not for each block (`fp8_block`)."""
        how = self.hf.get("quantization_config")
        return how is not None and how.get("quant_method") == CHANNELS

    @property
    def context_length(self) -> tuple[str, int]:
        """The field of config.json that says how many tokens SGLang serves, and their number.

        As in SGLang's `get_context_length` (0.5.21) it is the first of these fields. A scaling of the rotary embedding multiplies
        it only where it does not name the original length; both kinds that `rope_facts` reads do name it.
        """
        fields = self.fields
        return next((name, int(fields[name])) for name in CONTEXT_FIELDS if fields.get(name) is not None)


def rope_facts(hf: Fields, latent: bool = False) -> tuple[float, dict[str, Any] | None]:
    """Rotary base and scaling, from transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`) keys.

    Supported are the types that Megatron-core 0.19 and SGLang 0.5.21 compute as Hugging Face does: plain RoPE, Llama 3's with its
    published constants (low and high frequency factors 1 and 4, original length 8192), and yarn. `latent`: of latent
    attention, where yarn's `mscale` and `mscale_all_dim` count, and Llama 3's type is refused.

    Raises:
        ValueError: names the type, or the key, that is missing or not supported.
    """
    rope = _rope_fields(hf)
    theta = rope.number("rope_theta", hf.number("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        _refuse_unknown(rope, {"rope_theta"})
        return theta, None
    # Megatron-core's latent attention would rotate as if there were no scaling, SGLang's as if the type were yarn.
    scaled = ("yarn",) if latent else ("llama3", "yarn")
    if kind not in scaled:
        raise ValueError(
            f"{rope.file} type {kind!r} is not supported; supported: {', '.join(('default', *scaled))}"
        )
    needed = ("factor", "original_max_position_embeddings")
    missing = [key for key in needed if key not in rope]
    if missing:
        raise ValueError(f"{rope.file} type {kind!r} lacks {', '.join(missing)}")
    if kind == "yarn":
        return theta, _yarn_facts(rope, latent)
    expected = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    _refuse_unknown(rope, {"factor", *expected})
    for key, value in expected.items():
        if rope.number(key, value) != value:
            raise ValueError(f"{rope.file} {key}={rope.values[key]} is not supported; supported: {value}")
    return theta, {"rope_type": "llama3", "factor": rope.number("factor")}


def _rope_fields(hf: Fields) -> Fields:
    """What a config says of the rotary embedding, under the name that transformers 4 or 5 has for it."""
    return Fields(hf.object("rope_scaling").values | hf.object("rope_parameters").values, f"{hf.file}: rope")


def require_rope(hf: Fields, *keys: str) -> None:
    """Refuse a config that does not say some facts of the rotary embedding (`rope_theta`, `rope_type`): for families whose classes in
    transformers have others than most families where a config is silent.

    Raises:
        ValueError: names the facts that are missing.
    """
    rope = _rope_fields(hf)
    said = {
        "rope_theta": "rope_theta" in rope or "rope_theta" in hf,
        "rope_type": "rope_type" in rope or "type" in rope,
    }
    missing = [key for key in keys if not said[key]]
    if missing:
        raise ValueError(f"{hf.file} lacks {', '.join(missing)} (rope_parameters)")


def _yarn_facts(rope: Fields, latent: bool) -> dict[str, Any]:
    """Scaling facts of yarn; by default beta_fast 32 and beta_slow 1, as Hugging Face, Megatron and SGLang have it."""
    truncate = rope.flag("truncate", True)
    if not truncate and latent:  # Megatron-core has no option for it there
        raise ValueError(f"{rope.file} truncate=false is not supported; supported: true")
    scales = ("mscale", "mscale_all_dim") if latent else ()
    lengths = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    _refuse_unknown(rope, {*lengths, *scales}, "truncate")
    return {
        "rope_type": "yarn",
        "factor": rope.number("factor"),
        "original_max_position_embeddings": rope.count("original_max_position_embeddings"),
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "mscale": rope.number("mscale", 0.0, zero=True),
        "mscale_all_dim": rope.number("mscale_all_dim", 0.0, zero=True),
        **({} if truncate else {"truncate": False}),
    }


def _refuse_unknown(rope: Fields, known: Collection[str], *read: str) -> None:
    """Refuse keys with a value that are not `known`. `read`: further keys that the caller has read."""
    others = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *read}
    for key, value in rope.values.items():
        if key not in known and key not in others and value is not None:
            raise ValueError(
                f"{rope.file} {key}={short(value)} is not supported; supported: {', '.join(sorted(known))}"
            )


def _rotary_percent(hf: Fields, default: float | None) -> float:
    """The share of a head that rotates; `default` None: heads may only rotate in full.

    Transformers 5 takes `rope_scaling` for another name of `rope_parameters`, so the share may be in either.
    """
    outer = hf.number("partial_rotary_factor", default or 1.0)
    share = _rope_fields(hf).number("partial_rotary_factor", outer)
    if share > 1 or (default is None and share != 1):
        supported = "1" if default is None else "shares up to 1"
        raise ValueError(
            f"{hf.file}: config field partial_rotary_factor={share:g} changes the computation and is not supported; "
            f"supported: {supported}"
        )
    return share


def _fp8_block(hf: Fields) -> tuple[int, int] | None:
    """Rows and columns of a block of weights that share a scale; None for a model that is not quantised.

    Raises:
        ValueError: a quantisation that is not float8 (e4m3) in blocks of weights, as DeepSeek-V3's checkpoint has it.
    """
    if "quantization_config" not in hf:
        return None
    how = hf.object("quantization_config")
    where = f"{hf.file}: quantization_config"
    if how.values.get("quant_method") == CHANNELS:
        _check_channels(how)
        return None
    accepted = {
        "quant_method": ("fp8",),
        "fmt": ("e4m3", "float8_e4m3fn", None),
        "activation_scheme": ("dynamic", None),
    }
    for key, values in accepted.items():
        if how.values.get(key) not in values:
            raise ValueError(
                f"{where} {key}={short(how.values.get(key))} is not supported; supported: {values[0]!r}"
            )
    block = how.values.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(
            f"{where} weight_block_size={short(block)} is not supported; supported: two sizes, as [128, 128]"
        )
    return block[0], block[1]


def _check_channels(how: Fields) -> None:
    """Refuse options of compressed-tensors (0.18) other than float8 weights with a scale for each row."""
    refuse_unsupported(how, {"format": ("float-quantized",), "kv_cache_scheme": (None,)})
    refuse_unsupported(how.object("sparsity_config"), {"format": ("dense",)})
    groups = how.object("config_groups")
    for name in groups.values or {"group_0": {}}:
        weights = groups.object(name).object("weights")
        weights.require("num_bits", "type", "strategy")
        accepted = {"num_bits": (8,), "type": ("float",), "strategy": ("channel",)}
        refuse_unsupported(weights, accepted | {"symmetric": (True,), "dynamic": (False,)})


def refuse_unsupported(hf: Fields, required: dict[str, Collection[Any]]) -> None:
    """Refuse by name each field of `required` that is present with a value outside its accepted ones."""
    for key, accepted in required.items():
        if key in hf.values and hf.values[key] not in accepted:
            raise ValueError(
                f"{hf.file}: config field {key}={short(hf.values[key])} changes the computation and is not supported; "
                f"supported: {', '.join(repr(value) for value in accepted)}"
            )


def _dtype(hf: Fields) -> str:
    """The weights' type, from transformers 5 (`dtype`) or 4 (`torch_dtype`) keys: "bfloat16", say."""
    found = hf.text("dtype", hf.text("torch_dtype", "float32"))
    if found not in _DTYPES:
        raise ValueError(f"{hf.file}: dtype={short(found)} is not supported; supported: {', '.join(_DTYPES)}")
    return found


DECODER = {"hidden_act": ("silu",), "attention_dropout": (0, 0.0)}
"""Fields that every family accepts, for `refuse_unsupported`."""

FULL_ATTENTION = {"use_sliding_window": (False,)}
"""Further fields that the Qwen families accept."""


def decoder_facts(hf: Fields, *, latent: bool = False, rotary: float | None = None) -> dict[str, Any]:
    """The ModelConfig fields that every decoder family names alike in its Hugging Face config.

    Args:
        latent: the model has latent attention.
        rotary: the share of a head that rotates where the config names none; None: heads rotate in full in the
            family, and any other share is refused.

    Raises:
        ValueError: a needed field is missing or malformed, or the rotary embedding or quantisation is not
            supported.
    """
    hf.require(
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    theta, scaling = rope_facts(hf, latent)
    hidden, heads = hf.count("hidden_size"), hf.count("num_attention_heads")
    groups = hf.count("num_key_value_heads", heads)
    if heads % groups:
        raise ValueError(
            f"{hf.file}: num_attention_heads must be a multiple of num_key_value_heads, found {heads} and {groups}"
        )
    if "head_dim" not in hf and hidden % heads and not latent:
        raise ValueError(
            f"{hf.file}: without head_dim, hidden_size must be a multiple of num_attention_heads, found {hidden} and {heads}"
        )
    return {
        "architecture": next(iter(hf.texts("architectures")), ""),
        "num_layers": hf.count("num_hidden_layers", most=_MOST_LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "head_dim": hf.count("head_dim", max(1, hidden // heads)),
        "ffn_hidden_size": hf.count("intermediate_size"),
        "vocab_size": hf.count("vocab_size"),
        "norm_epsilon": hf.number("rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_percent": _rotary_percent(hf, rotary),
        "tie_word_embeddings": hf.flag("tie_word_embeddings", False),
        "max_position_embeddings": hf.count("max_position_embeddings"),
        "dtype": _dtype(hf),
        "fp8_block": _fp8_block(hf),
        "hf": hf.values,
    }


def num_experts(hf: Fields, key: str) -> int:
    """How many experts a layer has, from the field `key`."""
    layers = hf.count("num_hidden_layers", most=_MOST_LAYERS)
    return hf.count(key, most=max(1, _MOST_EXPERTS // layers))
