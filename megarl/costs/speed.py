"""Seconds of a Megatron model's passes by formulas: operations and bytes over assumed parts of a GPU's peaks.

Nothing is measured. A pass counts its matrices, its attention and the bytes between them, or the time in which Python launches all
their kernels if that is longer; then a layer's messages to other ranks, one after the other. Matrices take at least as long as reading
their weights; experts' matrices are computed in full tiles of tokens; gradients of weights are added up in float32 for every
micro-batch. Experts have equally many tokens. Left out: adapters' own matrices, input and output of the data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2

from megarl.costs.flops import LayerFlops, ModelFlops, causal_pairs
from megarl.costs.hardware import Assumptions, Hardware
from megarl.costs.tensors import CORE_ATTENTION
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.models import ModelConfig, head_chunk_tokens

# A pipeline's seconds. One forward and one backward pass in turn (1F1B), with `chunks` interleaved model chunks a stage, as in Narayanan
# et al. 2021 (arXiv:2104.04473), sections 2.2.1 and 2.2.2: filling and emptying p stages takes (p - 1) / v times a micro-batch's passes,
# in addition to the m micro-batches themselves. If stages take unequally long, the m micro-batches wait for the slowest; the
# pipeline then takes at most as long as computed here.


def pipeline_seconds(stages: Sequence[float], micro_batches: int, chunks: int = 1) -> float:
    """Seconds from the first pass to the last.

    Args:
        stages: seconds that each stage takes for a micro-batch, forward and backward (or forward alone).
        micro_batches: m. chunks: v.
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / chunks


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Part of the time that a stage waits, if all take equally long: (p - 1) / (m v + p - 1)."""
    return (stages - 1) / (micro_batches * chunks + stages - 1)


# Costs of a layer other than its matrices: launched kernels, and bytes read and written between the matrices. Counted from the operations
# of a layer's forward pass:
#
# - Generating (vLLM's and SGLang's layers): norm, projections, rotation, cache write, attention in two kernels, output; latent attention
#   also has its down projections, their norms and two absorbed matrices; an MLP is two matrices and their gate; experts are router,
#   scores, choice, sorting, two grouped matrices, gate and sum.
# - Training (Megatron-core with Transformer Engine's kernels): the same with permutations, exchanges and residuals; autograd and the
#   modules' own Python add more launches. Grouped matrices are a launch for each local expert, from C++.
# - Bytes: a fused norm reads and writes its tensor once; one made of torch's operations goes through it in float32: up, square, mean,
#   scale, down, weight (36 bytes for 4). Rotations (22 for 4) and gated units (10 for 6 of their product's elements) likewise.

_DECODE = {"attention": 10, "latent": 6, "mlp": 4, "experts": 14}
_TRAIN = {"attention": 18, "latent": 10, "mlp": 6, "experts": 40}
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
    total = counts["attention"] + (counts["latent"] if config.mla is not None else 0)
    return total + counts["mlp"] * layer.shared + counts["experts"] * layer.is_moe


def between_bytes(config: ModelConfig, layer: LayerFlops, itemsize: int, fused: bool) -> float:
    """Bytes of a token in a layer's forward pass, between its matrices and attention."""
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


GRADIENT, STATES = 4, 12  # bytes of a trained weight: its gradient, and master copy and two moments
TRAINED = ("weights", "adapters")
TILE = 128  # rows of an expert's tokens that a kernel takes at a time
# In forward operations: scores are made again (Dao 2023, arXiv:2307.08691, section 3.1.2).
BACKWARD_ATTENTION = 2.5
# How often a logit is read or written by megarl/megatron/fused_head.py: out of a product, into its statistics; backward, into its
# gradient and out of it, into two products. Once more out of a product, where it was not kept.
LOGIT, LOGIT_BACKWARD = 2, 4
HEAD_GRADIENT = (
    8  # bytes of an element of the head's gradient, to which every chunk of tokens adds in float32
)


@dataclass(frozen=True)
class Machine:
    """GPUs, `per_node` of them on each node, and the parts of their peaks that are reached."""

    gpu: Hardware
    assumed: Assumptions
    per_node: int

    def link(self, span: int) -> float:
        """Bytes a second of a GPU within a group whose ranks are among `span` consecutive ones."""
        if span <= self.per_node:
            return self.gpu.nvlink * self.assumed.nvlink
        return self.gpu.nic * self.assumed.nic

    def ring(self, ranks: int, stride: int) -> float:
        """The same where all ranks of a group pass on the same data, `stride` apart: data for another node is divided over
        the network cards of the group's ranks on one node."""
        if ranks * stride <= self.per_node:
            return self.link(1)
        here = max(1, self.per_node // stride)
        return min(self.link(1), here * self.link(self.per_node + 1))

    def latency(self, span: int) -> float:
        """Seconds of a collective among `span` consecutive ranks in addition to its bytes: there and back over a tree of the nodes."""
        nodes = -(-span // self.per_node)
        return self.assumed.latency + 2 * self.assumed.hop * log2(nodes)

    @property
    def links(self) -> Mapping[str, float]:
        """By the names of `megarl.layout.plan.LINKS`; bytes that stay on a device are read and written."""
        return {
            "local": self.gpu.hbm * self.assumed.hbm / 2,
            "intra_node": self.gpu.nvlink * self.assumed.nvlink,
            "inter_node": self.gpu.nic * self.assumed.nic,
        }

    @property
    def host(self) -> float:
        return self.gpu.host * self.assumed.host


@dataclass(frozen=True)
class LayerSeconds:
    """A layer's forward pass on a rank: its matrices, its attention, the operations between them, its messages; and the seconds in
    which all of it is launched. `summed`: of gradients that are added to other micro-batches'."""

    matrices: float
    attention: float
    between: float
    sent: float
    launched: float
    summed: float = 0.0

    @property
    def forward(self) -> float:
        return max(self.matrices + self.attention + self.between, self.launched) + self.sent


@dataclass(frozen=True)
class Passes:
    """A Megatron model that goes through texts.

    Attributes:
        trained: one of TRAINED, None where it is only evaluated. recompute, recompute_modules: as megatron's.
        itemsize: bytes of a weight and of an activation.
        on_host: whether optimizer states are there, and pass through the device.
        fused: whether norms, rotations and gated units are one kernel each (Transformer Engine's).
        predicted: layers of multi-token prediction that are trained, after the last one.
        detached: whether their loss has no gradient for the head.
    """

    config: ModelConfig
    flops: ModelFlops
    layout: ParallelLayout
    machine: Machine
    trained: str | None = None
    recompute: str | None = None
    recompute_modules: tuple[str, ...] = CORE_ATTENTION
    itemsize: int = 2
    on_host: bool = False
    fused: bool = True
    predicted: tuple[LayerFlops, ...] = ()
    detached: bool = True

    def layer(self, layer: LayerFlops, tokens: float, length: float) -> LayerSeconds:
        """Seconds of a micro-batch of `tokens`, over its context parallel ranks, in texts of `length`."""
        layout, gpu, assumed, item = self.layout, self.machine.gpu, self.machine.assumed, self.itemsize
        ranks, read = layout.tp * layout.cp, gpu.hbm * assumed.hbm
        weights = layer.dense / layout.tp
        dense = max(2 * layer.dense * tokens / ranks / (gpu.bf16 * assumed.matmul), weights * item / read)
        experts, local = 0.0, 0
        if layer.is_moe:
            moe = self.config.moe
            local = moe.num_experts // layout.ep
            own = layer.experts / (layout.ep * layout.etp)
            rows = tokens / ranks * layout.ep * layout.etp * moe.top_k / moe.num_experts
            operations = 2 * layer.active * tokens / ranks * _whole_tiles(rows)
            experts = max(operations / (gpu.bf16 * assumed.experts), own * item / read)
            weights += own
        pairs = layer.pair * causal_pairs(length) * tokens / ranks
        return LayerSeconds(
            dense + experts,
            pairs / (gpu.bf16 * assumed.attention),
            between_bytes(self.config, layer, item, self.fused) * tokens / ranks / read,
            self._sent(layer, tokens),
            launches(self.config, layer, local) * assumed.dispatch,
            2 * GRADIENT * weights / read if self.trained == "weights" else 0.0,
        )

    def _sent(self, layer: LayerFlops, tokens: float) -> float:
        """Seconds of the forward pass's messages: hidden states between tensor parallel parts, keys and values, tokens to experts."""
        layout, config, item = self.layout, self.config, self.itemsize
        tp, cp, link = layout.tp, layout.cp, self.machine.link
        hidden = tokens / cp * config.hidden_size * item
        # Gathered and scattered (or, without sequence parallelism, summed) around attention and around an ordinary MLP.
        latency = self.machine.latency
        total = 0.0
        if tp > 1:
            total += (
                2 * (1 + layer.shared) * (hidden * (tp - 1) / tp / self.machine.ring(tp, 1) + latency(tp))
            )
        if cp > 1:
            total += (cp - 1) * (tokens / cp * self._key_bytes / link(tp * cp) + latency(tp * cp))
        if layer.is_moe and layout.ep * layout.etp > 1:
            routed = hidden / tp * config.moe.top_k * layout.etp
            here = min(layout.ep, max(1, self.machine.per_node // layout.etp))  # of the group, on a node
            near, far = (here - 1) / layout.ep, (layout.ep - here) / layout.ep
            total += 2 * max(routed * near / link(1), routed * far / link(self.machine.per_node + 1))
            total += 2 * latency(layout.ep * layout.etp)
        return total

    @cached_property
    def _key_bytes(self) -> float:
        """Keys and values of a token on a tensor parallel rank."""
        config, mla = self.config, self.config.mla
        if mla is None:
            return config.num_query_groups / self.layout.tp * 2 * config.head_dim * self.itemsize
        width = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        return config.num_attention_heads / self.layout.tp * width * self.itemsize

    def stages(self, tokens: float, length: float) -> list[float]:
        """Seconds of each pipeline stage for a micro-batch: forward, and backward if the model is trained."""
        layout = self.layout
        kinds = {*self.flops.layers, *self.predicted}
        known = {layer: self._both(self.layer(layer, tokens, length)) for layer in kinds}
        end = self._head_seconds(tokens, self.trained == "weights")
        for layer in self.predicted:
            end += known[layer] + self._head_seconds(tokens, not self.detached)
        border = 0.0
        if layout.pp > 1:  # hidden states come from the stage before, their gradients from the one after
            hidden = tokens / layout.cp / (layout.tp if layout.sp else 1) * self.config.hidden_size
            border = hidden * self.itemsize / self.machine.link(layout.world // layout.pp + 1)
            border *= layout.num_chunks * (1 if self.trained is None else 2)
        found = []
        for stage in range(layout.pp):
            chunks = layers_of(layout, self.config.num_layers, stage)
            layers = sum(known[self.flops.layers[layer]] for chunk in chunks for layer in chunk)
            found.append(layers + border + (end if stage == layout.pp - 1 else 0.0))
        return found

    def _head_seconds(self, tokens: float, learns: bool) -> float:
        """Logits and their losses, once more in the backward pass but for a chunk's; or a value, which is next to nothing.

        learns: whether the head's weight has a gradient.
        """
        gpu, assumed, weights = self.machine.gpu, self.machine.assumed, self.flops.head / self.layout.tp
        own, trained = tokens / self.layout.cp, self.trained is not None
        rows = weights / self.config.hidden_size
        chunk = head_chunk_tokens(int(rows), self.itemsize, None)
        again = trained * max(0.0, own - chunk)
        computed = 2 * weights * (own * (1 + trained + learns) + again) / (gpu.bf16 * assumed.matmul)
        moved = rows * self.itemsize * (own * (LOGIT + LOGIT_BACKWARD * trained) + again)
        if learns:
            moved += weights * HEAD_GRADIENT * max(1.0, own / chunk)
        return computed + moved / (gpu.hbm * assumed.hbm)

    @property
    def times(self) -> int:
        """Operations of a matrix in all passes, as multiples of the forward pass's."""
        return {None: 1, "adapters": 2, "weights": 3}[self.trained]

    def _both(self, layer: LayerSeconds) -> float:
        """Forward, and backward for trained layers; with recomputation."""
        if self.trained is None:
            return layer.forward
        computed = (self.times - 1) * layer.matrices + BACKWARD_ATTENTION * layer.attention
        computed += 2 * layer.between + layer.summed
        # Autograd launches twice as many kernels, from C++: in about the time of the forward pass's from Python.
        backward = max(computed, layer.launched) + layer.sent
        again = {None: 0.0, "selective": self._modules_again(layer), "full": layer.forward}[self.recompute]
        return layer.forward + backward + again

    def _modules_again(self, layer: LayerSeconds) -> float:
        """Of parts that are computed again: attention's; whole MLPs and projections count as the forward pass, what moves values as nothing
        that is not between matrices already."""
        found = layer.attention if "core_attn" in self.recompute_modules else 0.0
        if {"mlp", "moe", "mla_up_proj", "shared_experts"} & set(self.recompute_modules):
            found += layer.matrices
        if {"layernorm", "moe_act"} & set(self.recompute_modules):
            found += layer.between
        return min(found, layer.forward)

    def reduce_seconds(self) -> float:
        """Gradients of an optimizer step to the ranks that own their states, and the weights back (fully trained ones)."""
        layout, total = self.layout, 0.0
        dense = max(self.stage_weights(lambda layer: layer.dense)) / layout.tp + self.flops.head / layout.tp
        experts = max(self.stage_weights(lambda layer: layer.experts)) / (layout.ep * layout.etp)
        groups = (
            (dense, layout.dp * layout.cp, layout.tp),
            (experts, layout.expert_dp, layout.ep * layout.etp),
        )
        for weights, ranks, stride in groups:
            moved = weights * (GRADIENT + self.itemsize) * (ranks - 1) / ranks
            total += moved / self.machine.ring(ranks, stride)
        return total

    def adam_seconds(self) -> float:
        """Gradients and states read, states and weights written, of a rank's part; where these are on the host, at least as
        long as they take to come, while others go back."""
        layout = self.layout
        dense = max(self.stage_weights(lambda layer: layer.dense)) / layout.tp / (layout.dp * layout.cp)
        experts = max(self.stage_weights(lambda layer: layer.experts)) / (
            layout.ep * layout.etp * layout.expert_dp
        )
        moved = (dense + experts) * (GRADIENT + 2 * STATES + self.itemsize)
        seconds = moved / (self.machine.gpu.hbm * self.machine.assumed.hbm)
        states = STATES if self.itemsize < 4 else STATES - 4  # float32 weights are their own copies
        return max(seconds, (dense + experts) * states / self.machine.host) if self.on_host else seconds

    def stage_weights(self, of: Callable[[LayerFlops], int]) -> list[int]:
        """By pipeline stage the sum over its layers."""
        layers, layout = self.flops.layers, self.layout
        found = [
            sum(of(layers[layer]) for chunk in layers_of(layout, len(layers), stage) for layer in chunk)
            for stage in range(layout.pp)
        ]
        found[-1] += sum(map(of, self.predicted))
        return found


def _whole_tiles(rows: float) -> float:
    """How much more is computed if the last tile of an expert's tokens is half empty on the average."""
    return (rows + TILE / 2) / rows


@dataclass(frozen=True)
class PassTime:
    """Passes over a batch.

    Attributes:
        seconds: of all of them, without `reduce` and `adam`. micro_batches: of one of `updates` mini-batches, on a rank.
        bubble: part of the seconds that stages wait for each other, if they take equally long.
        reduce, adam: gradients and weights between data parallel ranks, optimizer.
    """

    seconds: float
    micro_batches: int
    bubble: float
    updates: int = 1
    reduce: float = 0.0
    adam: float = 0.0

    @property
    def total(self) -> float:
        return self.seconds + self.reduce + self.adam


def pass_time(
    passes: Passes, rows: float, length: float, most: int | None, most_rows: int | None, updates: int = 1
) -> PassTime:
    """`updates` times over a mini-batch.

    Args:
        rows: texts of a mini-batch, over all ranks, of `length` tokens each.
        most, most_rows: tokens, or texts, of a micro-batch.
    """
    layout = passes.layout
    own = max(1.0, rows / layout.dp)
    fit = most_rows if most is None else max(1.0, most // length)
    micro_batches = -(-own // fit)
    if layout.vpp is not None:  # the interleaved schedule takes them in groups
        micro_batches = -(-micro_batches // layout.pp) * layout.pp
    count = int(micro_batches)
    stages = passes.stages(own * length / count, length)
    seconds = pipeline_seconds(stages, count, layout.num_chunks)
    whole = passes.trained == "weights"
    return PassTime(
        updates * seconds,
        count,
        bubble(layout.pp, count, layout.num_chunks),
        updates,
        updates * passes.reduce_seconds() if whole else 0.0,
        updates * passes.adam_seconds() if whole else 0.0,
    )
