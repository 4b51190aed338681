"""Costs of a layer other than its matrices: launched kernels, and bytes read and written between the matrices."""

from megarl.costs.flops import LayerFlops
from megarl.models import ModelConfig

# Counted from the operations of a layer's forward pass:
#
# - Generating (vLLM's and SGLang's layers): norm, projections, rotation, cache write, attention in two kernels, output; latent attention
#   also has its down projections, their norms and two absorbed matrices; an MLP is two matrices and their gate; experts are router,
#   scores, choice, sorting, two grouped matrices, gate and sum.
# - Training (Megatron-core with Transformer Engine's kernels): the same with permutations, exchanges and residuals; autograd and the
#   modules' own Python add more launches. Grouped matrices are a launch for each local expert, from C++.
# - Bytes: a fused norm reads and writes its tensor once; one made of torch's operations goes through it in float32: up, square, mean,
#   scale, down, weight (36 bytes for 4). Rotations (22 for 4) and gated units (10 for 6 of their product's elements) likewise.

# - A gated delta net generates by norm, two projections, convolution, rule with its gates, norm with a gate, output; in training the heads are
#   put in order and copied, each of the rule's kernels is one, and the device is asked whether both lists of bounds are equal.

_DECODE = {"attention": 10, "delta_net": 8, "latent": 6, "mlp": 4, "experts": 14}
_TRAIN = {"attention": 18, "delta_net": 36, "latent": 10, "mlp": 6, "experts": 40}
_GROUPED = 0.5  # launches of both grouped matrices for a local expert, as parts of a launch from Python
_NORM, _ROTATION, _GATE = (4, 36), (4, 22), (6, 10)  # bytes of an element in bfloat16: fused, not fused
_RESIDUAL = 6  # two read, one written
_ROUTED = 12  # of a token's copy: permuted, sorted and put back


def decode_kernels(config: ModelConfig, layer: LayerFlops) -> int:
    """Kernels of a layer in an engine's step."""
    return _parts(_DECODE, config, layer)


def launches(config: ModelConfig, layer: LayerFlops, local_experts: int) -> float:
    """Kernel launches from Python in a layer's forward pass in training."""
    return _parts(_TRAIN, config, layer) + (_GROUPED * local_experts if layer.is_moe else 0.0)


def _parts(counts: dict[str, int], config: ModelConfig, layer: LayerFlops) -> int:
    total = counts["delta_net" if layer.state else "attention"]
    total += counts["latent"] if config.mla is not None else 0
    return total + counts["mlp"] * layer.shared + counts["experts"] * layer.is_moe


def between_bytes(config: ModelConfig, layer: LayerFlops, itemsize: int, fused: bool) -> float:
    """Bytes of a token in a layer's forward pass, between its matrices and attention."""
    norm, rotation, gate = (pair[not fused] for pair in (_NORM, _ROTATION, _GATE))
    hidden, heads, mla = config.hidden_size, config.num_attention_heads, config.mla
    total = 2.0 * hidden * (norm + _RESIDUAL)
    if layer.state:
        net = config.delta_net
        assert net is not None
        repeated = net.value_heads * net.key_dim
        # Convolution, norm, repetition, copies, the rule's kernels; gates in float32 and their product.
        total += 4 * (2 * net.keys + net.values) + 20 * net.keys + 4 * repeated + 8 * net.values
        total += 4 * (repeated + 3 * net.values) + 30 * net.values
    elif mla is None:
        queries = (heads + config.num_query_groups) * config.head_dim
        total += queries * rotation
        total += queries * norm if config.qk_norm else 0.0
    else:
        queries = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        latent = (mla.q_lora_rank or 0) + mla.kv_lora_rank
        # Queries and keys are put together of a part that is rotated and one that is not.
        total += latent * norm + 2 * queries * rotation
    if layer.shared:
        total += (config.moe.shared_ffn_hidden_size if layer.is_moe else config.ffn_hidden_size) * gate
    if layer.is_moe:
        total += config.moe.top_k * (hidden * _ROUTED + config.moe.ffn_hidden_size * gate)
    return total * itemsize / 2


# Quantising a tensor reads it in bfloat16, and writes a byte an element for each orientation. Inputs of linear layers are quantised in the
# forward pass, for all of a layer's experts by a kernel each; the rows of these are filled up, and cut again. Weights, which are quantised once
# a pass, do not count.
_READ, _WRITTEN = 2, 1  # bytes
_LAUNCHES = {"attention": 2, "latent": 3, "mlp": 2, "experts": 4}
_EXPERT = 0.5  # of the kernels of a local expert, as parts of a launch from Python


def quantising_bytes(config: ModelConfig, layer: LayerFlops, trained: bool) -> float:
    """Bytes that quantising the inputs of a layer's linear layers reads and writes, for a token. `trained`: along columns, too."""
    hidden, mla = config.hidden_size, config.mla
    if mla is None:
        inputs = hidden + config.num_attention_heads * config.head_dim
    else:  # queries and keys are projected down from the same input
        inputs = 2 * hidden + (mla.q_lora_rank or 0) + mla.kv_lora_rank
        inputs += config.num_attention_heads * mla.v_head_dim
    if layer.shared:
        assert not layer.is_moe or config.moe is not None
        inputs += hidden + (config.moe.shared_ffn_hidden_size if layer.is_moe else config.ffn_hidden_size)
    if layer.is_moe:
        inputs += config.moe.top_k * (hidden + config.moe.ffn_hidden_size)
    return inputs * (_READ + _WRITTEN * (1 + trained))


def quantising_launches(config: ModelConfig, layer: LayerFlops, local_experts: int) -> float:
    """Kernel launches from Python that quantising takes in a layer's forward pass."""
    count = _LAUNCHES["attention"] + (_LAUNCHES["latent"] if config.mla is not None else 0)
    count += _LAUNCHES["mlp"] * layer.shared
    return count + (_LAUNCHES["experts"] + _EXPERT * local_experts if layer.is_moe else 0.0)
