"""What a layer costs beside its matrices: kernels that are launched, and bytes that are read and written between the matrices.

Counted from the operations of a layer's forward pass:

- Generating (vLLM's and SGLang's layers): norm, projections, rotation, cache write, attention in two kernels, output; latent attention has
  its down projections, their norms and two absorbed matrices beside; an MLP is two matrices and their gate; experts are router, scores,
  choice, sorting, two grouped matrices, gate and sum.
- Training (Megatron-core with Transformer Engine's kernels): the same with permutations, exchanges and residuals, of which autograd and
  the modules' own Python make more launches. Grouped matrices are a launch for each local expert, from C++.
- Bytes: a fused norm reads and writes its tensor once; made of torch's operations it goes through it in float32: up, square, mean,
  scale, down, weight (36 bytes for 4). Rotations (22 for 4) and gated units (10 for 6 of their product's elements) likewise.
"""

from megarl.costs.flops import LayerFlops
from megarl.models import ModelConfig

_DECODE = {"attention": 10, "latent": 6, "mlp": 4, "experts": 14}
_TRAIN = {"attention": 18, "latent": 10, "mlp": 6, "experts": 40}
_GROUPED = 0.5  # launches of both grouped matrices for a local expert, as parts of a launch from Python
_NORM, _ROTATION, _GATE = (4, 36), (4, 22), (6, 10)  # bytes of an element in bfloat16: fused, not fused
_RESIDUAL = 6  # two read, one written
_ROUTED = 12  # of a token's copy: permuted, sorted and put back


def decode_kernels(config: ModelConfig, layer: LayerFlops) -> int:
    """Of a layer in an engine's step."""
    return _parts(_DECODE, config, layer)


def launches(config: ModelConfig, layer: LayerFlops, local_experts: int) -> float:
    """Of a layer's forward pass in training, in launches from Python."""
    return _parts(_TRAIN, config, layer) + (_GROUPED * local_experts if layer.is_moe else 0.0)


def _parts(counts: dict[str, int], config: ModelConfig, layer: LayerFlops) -> int:
    total = counts["attention"] + (counts["latent"] if config.mla is not None else 0)
    return total + counts["mlp"] * layer.shared + counts["experts"] * layer.is_moe


def between_bytes(config: ModelConfig, layer: LayerFlops, itemsize: int, fused: bool) -> float:
    """Of a token in a layer's forward pass, between its matrices and attention."""
    norm, rotation, gate = (pair[not fused] for pair in (_NORM, _ROTATION, _GATE))
    hidden, heads, mla = config.hidden_size, config.num_attention_heads, config.mla
    total = 2.0 * hidden * (norm + _RESIDUAL)
    if mla is None:
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
