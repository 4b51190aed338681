"""Floating point operations of a token, from the weight table and the model's facts.

A matrix of [rows, columns] takes 2 rows x columns for a token (a multiplication and an addition each), forward; backward
takes the same for the token's gradient, and once more for the weight's if that is trained (Narayanan et al. 2021,
arXiv:2104.04473, appendix). A gated delta net takes the products of its chunks and of its state (`_of_state`). Attention
takes 2 (query and key width + value width) for each head and each pair of a query and a key. A token counts the routed experts that it takes. Norms, activations and rotations are left out.

Indexers of sparse attention compute in texts of more tokens than they choose keys, forward alone: their projections, and 2 query width for each of
their heads and each key that a query chooses from. Attention then takes as many as with all keys, as the trainer computes it.
Where indexers are trained, their loss takes these scores again, for all keys before each query, and twice as much for the gradients of queries and
keys; and their projections once more for the gradients of their weights (`LayerFlops.learning`).
"""

from dataclasses import dataclass, replace
from math import prod

from megarl.models import ModelConfig
from megarl.models.layers import INDEXER, is_delta_net, prediction_weights
from megarl.models.shards import Shapes
from megarl.models.table import kinds_of_layers, layer_tensors

_UP = tuple(f"self_attn.{name}.weight" for name in ("q_proj", "q_b_proj", "kv_b_proj"))  # of latent attention
_CHUNK = 64  # tokens of a delta net that are computed together, by flash-linear-attention's kernels and by megarl's
_ROUTERS = ("mlp.gate.weight", "mlp.router.weight")


@dataclass(frozen=True)
class LayerFlops:
    """A layer with all its parts.

    Attributes:
        dense: weights of all matrices but routed experts. experts: weights of all routed experts. active: weights of a token's routed experts.
        pair: operations of attention for a query and a key. decode_pair: the same when a token is generated, where latent
            attention works on the latent keys and values themselves.
        is_moe: whether it has routed experts. shared: whether also shared ones, or an ordinary MLP.
        state: operations of a gated delta net for a token, other than those of its matrices.
        mlp: weights of the shared experts or the MLP, a part of the dense ones; up: of latent attention's projections to heads, likewise.
        window: tokens, itself among them, that a token attends to; None: all before it.
        index: weights of an indexer's matrices. index_pair: its operations for a query and a key. topk: keys that a query attends to, chosen by the
            layer's indexer or an earlier one's; None: all.
    """

    dense: int
    experts: int
    active: int
    pair: int
    decode_pair: int
    is_moe: bool
    shared: bool
    mlp: int = 0
    up: int = 0
    state: int = 0
    window: int | None = None
    index: int = 0
    index_pair: int = 0
    topk: int | None = None

    def decoded(self, context: float) -> float:
        """Keys that a generated token attends to in a text of `context` tokens, by an engine's kernels."""
        return min(context, self.window or self.topk or context)

    def decode(self, context: float) -> float:
        """Operations of a generated token other than those of matrices: attention, and an indexer's."""
        chosen = self.topk is not None and context > self.topk
        indexing = 2 * self.index + self.index_pair * context if chosen else 0
        return self.decode_pair * self.decoded(context) + indexing

    def indexing(self, pairs: float) -> float:
        """Operations of a token's choice of keys, averaged over a text in which it would attend to `pairs` tokens."""
        length = 2 * pairs - 1
        if self.topk is None or length <= self.topk:
            return 0.0
        chosen_from = pairs - self.topk * (self.topk + 1) / (2 * length)  # the first queries have no choice
        return 2 * self.index + self.index_pair * chosen_from

    def learning(self, pairs: float) -> float:
        """Operations of a token for the loss and the gradients of the layer's indexer, averaged over a text as in `indexing`."""
        if not self.index or self.topk is None or 2 * pairs - 1 <= self.topk:
            return 0.0
        return 2 * self.index + 3 * self.index_pair * pairs

    def attended(self, pairs: float) -> float:
        """Tokens that a token attends to in this layer, averaged over a text; without a window they would be `pairs` (`causal_pairs`)."""
        length, window = 2 * pairs - 1, self.window
        if window is None or length <= window:
            return pairs
        return window - window * (window - 1) / (2 * length)

    def forward(self, pairs: float) -> float:
        """Operations of a token that attends to `pairs` tokens, or to fewer within a window."""
        computed = 2 * (self.dense + self.active) + self.state + self.pair * self.attended(pairs)
        return computed + self.indexing(pairs)


@dataclass(frozen=True)
class ModelFlops:
    """A full model: its layers, and the weights of its head (rows of logits, or the value head)."""

    layers: tuple[LayerFlops, ...]
    head: int

    def forward(self, pairs: float) -> float:
        """Operations of a token that attends to `pairs` tokens, itself included."""
        return sum(layer.forward(pairs) for layer in self.layers) + 2 * self.head

    @property
    def active(self) -> int:
        """Weights of matrices that a token is multiplied with."""
        return sum(layer.dense + layer.active for layer in self.layers) + self.head

    @property
    def pair_share(self) -> float:
        """Operations of attention for a pair of tokens in all layers, divided by a token's operations in all matrices."""
        return sum(layer.pair for layer in self.layers) / (2 * self.active)


def model_flops(config: ModelConfig, head: str = "lm") -> ModelFlops:
    """A model with the head "lm" or "value"."""
    layers: dict[int, LayerFlops] = {}
    for alike in kinds_of_layers(config):
        weights = _weights(config, layer_tensors(config, alike[0]))
        layers |= {layer: _layer(config, layer, weights) for layer in alike}
    rows = config.vocab_size if head == "lm" else 1
    return ModelFlops(tuple(layers[layer] for layer in range(config.num_layers)), rows * config.hidden_size)


def prediction_flops(config: ModelConfig) -> tuple[LayerFlops, ...]:
    """The layers of multi-token prediction with the projections before them; each takes the model's head once more."""
    own = {weight.name: weight.shape for weight in prediction_weights(config)}
    numbers = range(config.num_layers, config.num_layers + config.num_mtp_layers)
    return tuple(
        _layer(config, layer, _weights(config, own | layer_tensors(config, layer))) for layer in numbers
    )


@dataclass(frozen=True)
class _Weights:
    """Weights of a layer's matrices: the attributes of LayerFlops of these names."""

    dense: int
    experts: int
    mlp: int
    up: int
    index: int


def _weights(config: ModelConfig, shapes: Shapes) -> _Weights:
    """The weights of a layer, from its tensors' shapes by their names in it."""
    dense = experts = mlp = up = index = 0
    for name, shape in shapes.items():
        if len(shape) != 2:
            continue
        if name.startswith(INDEXER):
            index += prod(shape)
            continue
        if ".experts." in name:
            experts += prod(shape)
            continue
        dense += prod(shape)
        if name.startswith("mlp.") and name not in _ROUTERS:
            mlp += prod(shape)
        elif config.mla is not None and name in _UP:
            up += prod(shape)
    return _Weights(dense, experts, mlp, up, index)


def _layer(config: ModelConfig, layer: int, weights: _Weights) -> LayerFlops:
    # Every expert has the same share.
    active = 0 if not weights.experts else weights.experts * config.moe.top_k // config.moe.num_experts
    own = (weights.experts > 0, weights.mlp > 0, weights.mlp, weights.up)
    if is_delta_net(config, layer):
        return LayerFlops(weights.dense, weights.experts, active, 0, 0, *own, state=_of_state(config))
    window = config.window if layer in config.window_layers else None
    made = LayerFlops(weights.dense, weights.experts, active, *_pairs(config), *own, window=window)
    if (facts := config.indexer) is None:
        return made
    # Scores of heads, and their sum; a layer that takes another one's choice has none.
    of_pair = 2 * facts.heads * (facts.head_dim + 1) if weights.index else 0
    return replace(made, index=weights.index, index_pair=of_pair, topk=facts.topk)


def _of_state(config: ModelConfig) -> int:
    """A token's operations: keys and queries with the chunk's keys, the writes of its values and keys, the reads within the chunk, and three
    products with the state, one of which changes it."""
    net = config.delta_net
    assert net is not None
    within = _CHUNK * (2 * 2 * net.key_dim + 2 * (net.key_dim + net.value_dim) + 2 * net.value_dim)
    return net.value_heads * (within + 3 * 2 * net.key_dim * net.value_dim)


def causal_pairs(length: float) -> float:
    """Tokens that a token attends to, averaged over a sequence of `length` tokens."""
    return (length + 1) / 2


def _pairs(config: ModelConfig) -> tuple[int, int]:
    heads, mla = config.num_attention_heads, config.mla
    if mla is None:
        pair = 2 * heads * 2 * config.head_dim
        return pair, pair
    queries = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latent = 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
    return 2 * heads * (queries + mla.v_head_dim), 2 * heads * latent
