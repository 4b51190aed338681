"""The weight tables of a layer: attention, MLPs and experts, with the places of each tensor in Megatron and SGLang 0.5.21.

Megatron has Transformer Engine's parameter names: a norm is often fused with the projection that follows.

- Grouped-query attention: Megatron's `linear_qkv` interleaves by query group [q heads of the group | k | v]; SGLang's `qkv_proj` is
  [q shard | k shard | v shard], key/value heads replicated where the ranks exceed them.
  Norms of queries and keys over all heads (MiniMax-M2) are complete on every rank in Megatron (`megarl.megatron.all_heads_norm`); SGLang cuts
  them with the heads.
- Multi-head latent attention: SGLang's `fused_qkv_a_proj_with_mqa` is [queries | keys, values and the rotary key], complete on every rank.
  Queries and keys rotate pairs of neighbouring dimensions in Hugging Face, Megatron and SGLang alike, so that no rows change their order.
- Indexers of sparse attention: complete on every rank. SGLang has [wk | weights_proj] in one tensor where the indexer rotates neighbouring
  dimensions (GLM-5), and on a GPU alone; megarl's class for CPU engines has it, too.
- Gated MLPs: [gate shard | up shard] in one tensor in both. The shared experts of a mixture, which SGLang does not fuse with the routed
  ones, are cut as a dense MLP is, or complete on every rank of an engine with DeepEP (`SGLangPlace.whole_shared`); the norm before a mixture is a module of its own.
- Routed experts: a rank has a contiguous block of them. In Megatron each expert is a pair of tensors of its own (`linear_fc1.weight0`,
  ...), cut over the expert tensor parallel ranks; in SGLang they are stacked along a first dimension: `w13_weight` [experts, gate shard |
  up shard, hidden] and `w2_weight` [experts, hidden, shard].
- Gated delta nets: Qwen3-Next's `in_proj_qkvz` has for each key head [query | key | its values | their gates], `in_proj_ba` [betas | decays of its
  values], in files as in SGLang. Qwen3.5's files have `in_proj_qkv` [queries | keys | values], `in_proj_z`, `in_proj_b` and `in_proj_a`, which SGLang has
  in two tensors of Qwen3-Next's names. Megatron's `in_proj` has [queries | keys | values | gates | betas | decays] of a rank's heads.
- Gated attention (Qwen3-Next and Qwen3.5): the file's `q_proj` has for each head [query | gate], as SGLang has it; of a query group Megatron has [queries | gates | k | v].
  SGLang calls the modules of attention by their own names alone, without `self_attn`.
"""

from collections.abc import Iterator

from megarl.models.config import ModelConfig
from megarl.models.shards import COLUMNS, ROWS, Weight

INDEXER = "self_attn.indexer."  # names of an indexer's tensors begin with this, after the layer's
SHARED = "mlp.shared_expert"  # names of the shared experts' tensors begin with this, after the layer's
_PROJECTIONS, _MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")  # gate, up, down
_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"


def is_delta_net(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has a gated delta net in place of attention."""
    return config.delta_net is not None and layer in config.delta_net.layers


def attention_weights(config: ModelConfig, layer: int) -> list[Weight]:
    """The table of a layer's norm and attention, or gated delta net."""
    if is_delta_net(config, layer):
        return _delta_net(config)
    return _latent_attention(config, layer) if config.mla is not None else _grouped_attention(config)


def _grouped_attention(config: ModelConfig) -> list[Weight]:
    hidden, dim, groups = config.hidden_size, config.head_dim, config.num_query_groups
    heads = config.num_attention_heads
    queries, keys = heads * dim, groups * dim
    served = "" if config.has_qwen_names else "self_attn."
    gated = {"units": heads, "sections": (dim, dim)} if config.output_gate else {}
    table = [Weight(_NORM, (hidden,), None, "self_attention.linear_qkv.layer_norm_weight", _NORM)]
    for projection, rows in (("q", queries * (1 + config.output_gate)), ("k", keys), ("v", keys)):
        for kind, shape in {"weight": (rows, hidden), "bias": (rows,)}.items():
            if kind == "weight" or config.qkv_bias:
                table.append(
                    Weight(
                        f"self_attn.{projection}_proj.{kind}",
                        shape,
                        ROWS,
                        f"self_attention.linear_qkv.{kind}",
                        f"{served}qkv_proj.{kind}",
                        groups,
                        replicated=projection != "q",
                        **(gated if projection == "q" else {}),
                    )
                )
    table.append(_output(hidden, queries, served))
    if config.output_bias:
        name = "self_attn.o_proj.bias"
        table.append(Weight(name, (hidden,), None, "self_attention.linear_proj.bias", name))
    if config.sinks:
        heads, name = config.num_attention_heads, "self_attn.sinks"
        table.append(Weight(name, (heads,), ROWS, "self_attention.core_attention.softmax_offset", name))
    return table + (_head_norms(config, served) if config.qk_norm else [])


def _head_norms(config: ModelConfig, served: str) -> list[Weight]:
    """The norms of queries and keys: of each head, or of all heads together. `served`: the beginning of their names in SGLang."""
    table = []
    for kind, heads in (("q", config.num_attention_heads), ("k", config.num_query_groups)):
        name, megatron = f"{kind}_norm.weight", f"self_attention.{kind}_layernorm.weight"
        weight = Weight(f"self_attn.{name}", (config.head_dim,), None, megatron, served + name)
        if config.qk_norm_all_heads:
            weight = weight._replace(
                shape=(heads * config.head_dim,), cut=ROWS, groups=heads, replicated=kind == "k", whole=True
            )
        table.append(weight)
    return table


def _output(hidden: int, columns: int, served: str = "self_attn.") -> Weight:
    """The projection of attention's output. `served`: the beginning of its name in SGLang."""
    name = "o_proj.weight"
    return Weight(
        f"self_attn.{name}", (hidden, columns), COLUMNS, "self_attention.linear_proj.weight", served + name
    )


def _delta_net(config: ModelConfig) -> list[Weight]:
    net, hidden = config.delta_net, config.hidden_size
    assert net is not None
    mixed = (net.keys, net.keys, net.values)
    rows: list[tuple[str, tuple[int, ...], str, str, int, tuple[int, ...]]] = [
        *_delta_net_inputs(config),
        ("conv1d.weight", (sum(mixed), 1, net.conv), "conv1d.weight", "conv1d.weight", 1, mixed),
        ("dt_bias", (net.value_heads,), "dt_bias", "dt_bias", 1, ()),
        ("A_log", (net.value_heads,), "A_log", "A_log", 1, ()),
    ]
    output = "linear_attn.out_proj.weight"
    return [
        Weight(_NORM, (hidden,), None, "self_attention.in_proj.layer_norm_weight", _NORM),
        *(
            Weight(
                f"linear_attn.{name}",
                shape,
                ROWS,
                f"self_attention.{megatron}",
                f"linear_attn.{served}",
                units=units,
                sections=sections,
            )
            for name, shape, megatron, served, units, sections in rows
        ),
        Weight(output, (hidden, net.values), COLUMNS, "self_attention.out_proj.weight", output),
        Weight(
            "linear_attn.norm.weight",
            (net.value_dim,),
            None,
            "self_attention.out_norm.weight",
            "linear_attn.norm.weight",
        ),
    ]


def _delta_net_inputs(
    config: ModelConfig,
) -> list[tuple[str, tuple[int, ...], str, str, int, tuple[int, ...]]]:
    """The projections before a delta net: name, shape, Megatron's and SGLang's name, units, sections."""
    net, hidden = config.delta_net, config.hidden_size
    assert net is not None
    qkvz, ba, ours = "in_proj_qkvz.weight", "in_proj_ba.weight", "in_proj.weight"
    if config.family == "qwen3_next":
        each = net.value_heads // net.key_heads
        of_head = (net.key_dim, net.key_dim, each * net.value_dim, each * net.value_dim)
        return [
            (qkvz, (2 * (net.keys + net.values), hidden), ours, qkvz, net.key_heads, of_head),
            (ba, (2 * net.value_heads, hidden), ours, ba, net.key_heads, (each, each)),
        ]
    mixed, heads = (net.keys, net.keys, net.values), (net.value_heads, hidden)
    return [
        ("in_proj_qkv.weight", (sum(mixed), hidden), ours, qkvz, 1, mixed),
        ("in_proj_z.weight", (net.values, hidden), ours, qkvz, 1, ()),
        ("in_proj_b.weight", heads, ours, ba, 1, ()),
        ("in_proj_a.weight", heads, ours, ba, 1, ()),
    ]


def _latent_attention(config: ModelConfig, layer: int) -> list[Weight]:
    mla, heads, hidden = config.mla, config.num_attention_heads, config.hidden_size
    assert mla is not None
    queries, values = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), heads * mla.v_head_dim
    compressed, keys = mla.kv_lora_rank + mla.qk_rope_head_dim, heads * mla.qk_nope_head_dim + values
    rows: list[tuple[str, tuple[int, ...], str | None, str]]
    if mla.q_lora_rank is None:
        rows = [("q_proj", (queries, hidden), ROWS, "linear_q_proj.weight")]
    else:
        rows = [
            ("q_a_proj", (mla.q_lora_rank, hidden), None, "linear_q_down_proj.weight"),
            ("q_a_layernorm", (mla.q_lora_rank,), None, "linear_q_up_proj.layer_norm_weight"),
            ("q_b_proj", (queries, mla.q_lora_rank), ROWS, "linear_q_up_proj.weight"),
        ]
    rows += [
        ("kv_a_proj_with_mqa", (compressed, hidden), None, "linear_kv_down_proj.weight"),
        ("kv_a_layernorm", (mla.kv_lora_rank,), None, "linear_kv_up_proj.layer_norm_weight"),
        ("kv_b_proj", (keys, mla.kv_lora_rank), ROWS, "linear_kv_up_proj.weight"),
    ]
    fused = () if mla.q_lora_rank is None else ("q_a_proj", "kv_a_proj_with_mqa")
    indexer = _indexer(config) if has_indexer(config, layer) else []
    return [
        Weight(_NORM, (hidden,), None, _NORM, _NORM),
        *(
            Weight(
                f"self_attn.{name}.weight",
                shape,
                cut,
                f"self_attention.{megatron}",
                f"self_attn.{'fused_qkv_a_proj_with_mqa' if name in fused else name}.weight",
            )
            for name, shape, cut, megatron in rows
        ),
        _output(hidden, values),
        *indexer,
    ]


def has_indexer(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has an indexer of its own; multi-token prediction layers have numbers after the others'."""
    indexer = config.indexer
    return indexer is not None and (layer in indexer.layers or layer >= config.num_layers)


def _indexer(config: ModelConfig) -> list[Weight]:
    """The table of an indexer. Every rank has all of it."""
    indexer, mla, hidden = config.indexer, config.mla, config.hidden_size
    assert indexer is not None and mla is not None and mla.q_lora_rank is not None
    width = indexer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "wq_b.weight": (indexer.heads * width, mla.q_lora_rank),
        "wk.weight": (width, hidden),
        "weights_proj.weight": (indexer.heads, hidden),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
    }
    together = ("wk.weight", "weights_proj.weight") if indexer.interleaved else ()
    return [
        Weight(
            INDEXER + name,
            shape,
            None,
            f"self_attention.indexer.{name}",
            INDEXER + ("wk_weights_proj.weight" if name in together else name),
        )
        for name, shape in shapes.items()
    ]


def is_mixture(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has routed experts; multi-token prediction layers have numbers after the others'."""
    return config.moe is not None and layer not in config.moe.dense_layers


def _mixture_name(config: ModelConfig) -> str:
    """How names of a mixture's tensors begin, after the layer's; MiniMax-M2 has Mixtral's names."""
    return "block_sparse_moe." if config.family == "minimax_m2" else "mlp."


def expert_projections(config: ModelConfig) -> tuple[str, str, str]:
    """The names of an expert's gate, up and down projection."""
    return _MIXTRAL if config.family == "minimax_m2" else _PROJECTIONS


def name_in_files(config: ModelConfig, name: str) -> str:
    """The logical name of the tensor or module that transformers 5 calls `name` in a model; they differ in MiniMax-M2's mixtures."""
    return name.replace(".mlp.", f".{_mixture_name(config)}") if config.moe is not None else name


def name_in_models(config: ModelConfig, name: str) -> str:
    """The inverse of `name_in_files`."""
    return name.replace(f".{_mixture_name(config)}", ".mlp.") if config.moe is not None else name


def mlp_weights(config: ModelConfig, layer: int) -> list[Weight]:
    """The table of a layer's norm and MLP, or of its router and shared experts."""
    hidden, moe = config.hidden_size, config.moe
    if moe is None or not is_mixture(config, layer):
        norm = Weight(_MLP_NORM, (hidden,), None, "mlp.linear_fc1.layer_norm_weight", _MLP_NORM)
        return [norm, *_gated("mlp.", hidden, config.ffn_hidden_size)]
    name = _mixture_name(config)
    router = f"{name}router" if config.family == "gpt_oss" else f"{name}gate"
    of_gate = "" if config.family == "minimax_m2" else "gate."
    table = [
        Weight(_MLP_NORM, (hidden,), None, "pre_mlp_layernorm.weight", _MLP_NORM),
        Weight(f"{router}.weight", (moe.num_experts, hidden), None, "mlp.router.weight", f"{router}.weight"),
    ]
    if moe.biases:
        table.append(Weight(f"{router}.bias", (moe.num_experts,), None, "mlp.router.bias", f"{router}.bias"))
    if moe.expert_bias:
        bias = f"{name}{of_gate}e_score_correction_bias"
        table.append(Weight(bias, (moe.num_experts,), None, "mlp.router.expert_bias", bias))
    if moe.shared_ffn_hidden_size and not moe.shared_gate:
        table += _gated(f"{SHARED}s.", hidden, moe.shared_ffn_hidden_size)
    if moe.shared_gate:
        local, gate = (
            (f"{SHARED}s.linear_fc1.weight", f"{SHARED}s.linear_fc2.weight"),
            f"{SHARED}_gate.weight",
        )
        table += _gated(f"{SHARED}.", hidden, moe.shared_ffn_hidden_size, local)
        table.append(Weight(gate, (1, hidden), None, f"{SHARED}s.gate_weight", gate))
    return table


def expert_weights(config: ModelConfig, ep: int = 1, rank: int = 0) -> Iterator[list[Weight]]:
    """The tables of the routed experts of expert parallel rank `rank` of `ep`, in order."""
    moe = config.moe
    assert moe is not None
    count = moe.num_experts // ep
    for index in range(count):
        megatron = (f"mlp.experts.linear_fc1.weight{index}", f"mlp.experts.linear_fc2.weight{index}")
        experts = _mixture_name(config) + "experts."
        sglang = (experts + "w13_weight", experts + "w2_weight")
        name = f"{experts}{rank * count + index}."
        sizes = config.hidden_size, moe.ffn_hidden_size
        table = _gated(name, *sizes, megatron, sglang, expert_projections(config))
        yield [*table, *_biases(table)] if moe.biases else table


def _biases(projections: list[Weight]) -> Iterator[Weight]:
    """The biases of an expert's projections; the bias of a projection that is cut by columns is complete on every rank."""
    for weight in projections:
        yield Weight(
            weight.name.removesuffix("weight") + "bias",
            weight.shape[:1],
            ROWS if weight.cut == ROWS else None,
            weight.megatron.replace(".weight", ".bias"),
            f"{weight.sglang}_bias",
        )


def _gated(
    name: str,
    hidden: int,
    ffn: int,
    megatron: tuple[str, str] | None = None,
    sglang: tuple[str, str] | None = None,
    projections: tuple[str, str, str] = _PROJECTIONS,
) -> list[Weight]:
    """The three projections under `name`. `megatron`, `sglang`: the local tensors of gate and up, and of down."""
    gate_name, up_name, down_name = (f"{name}{projection}.weight" for projection in projections)
    up, down = megatron or (name + "linear_fc1.weight", name + "linear_fc2.weight")
    served_up, served_down = sglang or (name + "gate_up_proj.weight", name + "down_proj.weight")
    return [
        Weight(gate_name, (ffn, hidden), ROWS, up, served_up),
        Weight(up_name, (ffn, hidden), ROWS, up, served_up),
        Weight(down_name, (hidden, ffn), COLUMNS, down, served_down),
    ]


def layer_name(config: ModelConfig, layer: int) -> str:
    """How the names of a layer's tensors begin; multi-token prediction layers have numbers after the others'."""
    if config.has_qwen_names and layer >= config.num_layers:
        return f"mtp.layers.{layer - config.num_layers}."
    return f"model.layers.{layer}."


def prediction_name(config: ModelConfig, layer: int) -> str:
    """How the names of `prediction_weights` begin in the multi-token prediction layer of this number."""
    return "mtp." if config.has_qwen_names else layer_name(config, layer)


def prediction_weights(config: ModelConfig) -> list[Weight]:
    """The table of a multi-token prediction layer (MTP), other than an ordinary layer's tensors and the copies of the model's."""
    hidden = config.hidden_size
    if config.has_qwen_names:
        names = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "final_layernorm"}
        norms = [
            Weight(
                f"{name}.weight",
                (hidden,),
                None,
                f"{megatron}.weight",
                f"{'model.' * (name == 'norm')}{name}.weight",
            )
            for name, megatron in names.items()
        ]
        return [*norms, Weight("fc.weight", (hidden, 2 * hidden), ROWS, "eh_proj.weight", "fc.weight")]
    return [
        Weight("enorm.weight", (hidden,), None, "enorm.weight", "enorm.weight"),
        Weight("hnorm.weight", (hidden,), None, "hnorm.weight", "hnorm.weight"),
        Weight(
            "shared_head.norm.weight", (hidden,), None, "final_layernorm.weight", "shared_head.norm.weight"
        ),
        Weight("eh_proj.weight", (hidden, 2 * hidden), ROWS, "eh_proj.weight", "eh_proj.weight"),
    ]
