"""Seconds of a Megatron model's passes by formulas: operations and bytes over assumed parts of a GPU's peaks.

Nothing is measured. A pass counts its matrices, its attention and the bytes between them, or the time in which Python launches all
their kernels if that is longer; then a layer's messages to other ranks, one after the other. Matrices take at least as long as reading
their weights; experts' matrices are computed in full tiles of tokens; gradients of weights are added up in float32 for every
micro-batch. Experts have equally many tokens. Left out: adapters' own matrices, input and output of the data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import log2

from megarl.costs.flops import LayerFlops, ModelFlops, causal_pairs
from megarl.costs.hardware import Assumptions, Hardware
from megarl.costs.layer_kernels import between_bytes, launches, quantising_bytes, quantising_launches
from megarl.costs.muon import MOMENTUM
from megarl.costs.tensors import CORE_ATTENTION, FULL
from megarl.layout.grid import ParallelLayout, sums_of_stages
from megarl.models import ModelConfig, head_chunk_tokens

GRADIENT, STATES = 4, 12  # bytes of a trained weight: its gradient, and master copy and two moments
TILE = 128  # rows of an expert's tokens that a kernel takes at a time
# In forward operations: scores are made again (Dao 2023, arXiv:2307.08691, section 3.1.2).
BACKWARD_ATTENTION = 2.5
# Of a gated delta net's rule, whose kernels compute states once more (megarl/shadow/fla/__init__.py counts it), with keys as wide as values.
BACKWARD_RULE = 2.9
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
    which all of it is launched. `summed`: of gradients that are added to other micro-batches'. `again`: of what the backward pass
    computes again. `backward`: of attention in its own backward pass, as a multiple of its forward pass. `index`: of an indexer's choice, which
    has no backward pass. `learnt`: of its loss and gradients, where it is trained."""

    matrices: float
    attention: float
    between: float
    sent: float
    launched: float
    summed: float = 0.0
    again: float = 0.0
    backward: float = BACKWARD_ATTENTION
    index: float = 0.0
    learnt: float = 0.0

    @property
    def forward(self) -> float:
        return max(self.matrices + self.attention + self.index + self.between, self.launched) + self.sent


@dataclass(frozen=True)
class Passes:
    """A Megatron model that goes through texts.

    Attributes:
        trained: one of TRAINED, None where it is only evaluated. recompute, recompute_modules: as megatron's.
        itemsize: bytes of a weight and of an activation.
        on_host: whether optimizer states are on the host, and pass through the device.
        fsdp: what data and context parallel ranks share by Megatron-FSDP, as megatron's; None: optimizer states alone.
        fused: whether norms, rotations and gated units are one kernel each (Transformer Engine's).
        float8, bf16_ends: as in `ModelUse`.
        muon: operations of a rank for Muon's part of an optimizer step, and the bytes that it gathers from tensor parallel peers; the most of
            any stage. None: AdamW updates everything.
        predicted: layers of multi-token prediction that are trained, after the last one.
        detached: whether their loss has no gradient for the head.
        indexers: whether indexers are trained.
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
    float8: bool = False
    bf16_ends: tuple[int, int] = (0, 0)
    fsdp: str | None = None
    muon: tuple[float, float] | None = None
    predicted: tuple[LayerFlops, ...] = ()
    detached: bool = True
    indexers: bool = False

    @property
    def in_float8(self) -> list[bool]:
        """Of each layer, whether it computes in float8."""
        (first, last), count = self.bf16_ends, len(self.flops.layers)
        return [self.float8 and first <= layer < count - last for layer in range(count)]

    def layer(self, layer: LayerFlops, tokens: float, length: float, float8: bool = False) -> LayerSeconds:
        """Seconds of a micro-batch of `tokens`, over its context parallel ranks, in texts of `length`."""
        layout, gpu, assumed = self.layout, self.machine.gpu, self.machine.assumed
        item = 1 if float8 else self.itemsize
        ranks, read = layout.tp * layout.cp, gpu.hbm * assumed.hbm
        peak = gpu.products(float8) * (assumed.float8 if float8 else 1.0)
        weights = layer.dense / layout.tp
        dense = max(2 * layer.dense * tokens / ranks / (peak * assumed.matmul), weights * item / read)
        experts, local = 0.0, 0
        if layer.is_moe:
            moe = self.config.moe
            local = moe.num_experts // layout.ep
            own = layer.experts / (layout.ep * layout.etp)
            rows = tokens / ranks * layout.ep * layout.etp * moe.top_k / moe.num_experts
            operations = 2 * layer.active * tokens / ranks * _whole_tiles(rows)
            experts = max(operations / (peak * assumed.experts), own * item / read)
            weights += own
        pairs = layer.pair * layer.attended(causal_pairs(length)) * tokens / ranks
        between, count = (
            between_bytes(self.config, layer, self.itemsize, self.fused),
            launches(self.config, layer, local),
        )
        if float8:
            between += quantising_bytes(self.config, layer, self.trained is not None)
            count += quantising_launches(self.config, layer, local)
        found = LayerSeconds(
            dense + experts,
            (pairs + layer.state * tokens / ranks) / (gpu.bf16 * assumed.attention),
            between * tokens / ranks / read,
            self._sent(layer, tokens),
            count * assumed.dispatch,
            2 * GRADIENT * weights / read if self.trained == "weights" else 0.0,
            backward=BACKWARD_RULE if layer.state else BACKWARD_ATTENTION,
            index=layer.indexing(causal_pairs(length)) * tokens / ranks / (gpu.bf16 * assumed.matmul),
            learnt=self._learnt(layer, tokens, length) if self.indexers else 0.0,
        )
        if self.recompute is None:
            return found
        if self.recompute == "full":
            return replace(found, again=found.forward)
        return replace(found, again=self._modules_again(layer, found, dense, experts, tokens))

    def _learnt(self, layer: LayerFlops, tokens: float, length: float) -> float:
        """Seconds of an indexer's loss and gradients; the probabilities of pairs are summed over tensor parallel ranks' heads, in float32."""
        layout, gpu, assumed = self.layout, self.machine.gpu, self.machine.assumed
        pairs = causal_pairs(length)
        operations = layer.learning(pairs) * tokens / (layout.tp * layout.cp)
        if not operations or layout.tp == 1:
            return operations / (gpu.bf16 * assumed.matmul)
        summed = 2 * GRADIENT * pairs * tokens / layout.cp * (layout.tp - 1) / layout.tp
        sent = summed / self.machine.ring(layout.tp, 1) + self.machine.latency(layout.tp)
        return operations / (gpu.bf16 * assumed.matmul) + sent

    def _modules_again(
        self, layer: LayerFlops, forward: LayerSeconds, dense: float, experts: float, tokens: float
    ) -> float:
        """Seconds of the parts of a layer that are computed again: their matrices, and with an MLP of tensor parallel parts and with experts
        also their messages; of norms, gated units and rotations at most the seconds of everything between matrices.

        Args:
            forward: the layer's. dense, experts: seconds of its matrices.
        """
        modules, total = set(self.recompute_modules), 0.0
        mlp, up = dense * layer.mlp / layer.dense, dense * layer.up / layer.dense
        total += forward.attention + forward.index if "core_attn" in modules else 0.0
        total += up if "mla_up_proj" in modules else 0.0
        if layer.is_moe and "moe" in modules:
            total += (
                experts
                + mlp
                + self._sent_to_experts(layer, tokens)
                + self._sent_around(tokens) * layer.shared
            )
        elif ("shared_experts" if layer.is_moe else "mlp") in modules and layer.shared:
            total += mlp + self._sent_around(tokens)
        if modules - {"core_attn"}:
            total += forward.between
        return min(total, forward.forward)

    def _sent(self, layer: LayerFlops, tokens: float) -> float:
        """Seconds of the forward pass's messages: hidden states between tensor parallel parts, keys and values, tokens to experts."""
        tp, cp = self.layout.tp, self.layout.cp
        # Around attention and around an ordinary MLP.
        total = (1 + layer.shared) * self._sent_around(tokens)
        if cp > 1:
            each = self._key_bytes if layer.pair else self._head_bytes / cp
            moved = tokens / cp * each / self.machine.link(tp * cp)
            total += (cp - 1) * (moved + self.machine.latency(tp * cp))
        return total + self._sent_to_experts(layer, tokens)

    def _sent_around(self, tokens: float) -> float:
        """Seconds in which hidden states are gathered and scattered (or, without sequence parallelism, summed) around tensor parallel parts."""
        layout, machine = self.layout, self.machine
        if layout.tp == 1:
            return 0.0
        hidden = tokens / layout.cp * self.config.hidden_size * self.itemsize
        moved = hidden * (layout.tp - 1) / layout.tp / machine.ring(layout.tp, 1)
        return 2 * (moved + machine.latency(layout.tp))

    def _sent_to_experts(self, layer: LayerFlops, tokens: float) -> float:
        """Seconds in which tokens go to experts and come back."""
        layout, link = self.layout, self.machine.link
        if not layer.is_moe or layout.ep * layout.etp == 1:
            return 0.0
        hidden = tokens / layout.cp * self.config.hidden_size * self.itemsize
        routed = hidden / layout.tp * self.config.moe.top_k * layout.etp
        here = min(layout.ep, max(1, self.machine.per_node // layout.etp))  # of the group, on a node
        near, far = (here - 1) / layout.ep, (layout.ep - here) / layout.ep
        slower = max(routed * near / link(1), routed * far / link(self.machine.per_node + 1))
        return 2 * (slower + self.machine.latency(layout.ep * layout.etp))

    @cached_property
    def _key_bytes(self) -> float:
        """Keys and values of a token on a tensor parallel rank."""
        config, mla = self.config, self.config.mla
        if mla is None:
            return config.num_query_groups / self.layout.tp * 2 * config.head_dim * self.itemsize
        width = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        return config.num_attention_heads / self.layout.tp * width * self.itemsize

    @property
    def _head_bytes(self) -> float:
        """A gated delta net's projection and output of a token on a tensor parallel rank, whose heads context parallel ranks exchange for tokens."""
        net = self.config.delta_net
        assert net is not None
        return (2 * net.keys + 3 * net.values) / self.layout.tp * self.itemsize

    def stages(self, tokens: float, length: float) -> list[float]:
        """Seconds of each pipeline stage for a micro-batch: forward, and backward if the model is trained."""
        layout = self.layout
        kinds = list(zip(self.flops.layers, self.in_float8, strict=True))
        known = {kind: self.layer(kind[0], tokens, length, kind[1]) for kind in set(kinds)}
        end = self._head_seconds(tokens, self.trained == "weights")
        if self.fsdp is not None:
            return [self._shared_seconds([known[kind] for kind in kinds], end)]
        for layer in self.predicted:
            end += self._both(self.layer(layer, tokens, length))
            end += self._head_seconds(tokens, not self.detached)
        border = 0.0
        if layout.pp > 1:  # hidden states come from the stage before, their gradients from the one after
            hidden = tokens / layout.cp / (layout.tp if layout.sp else 1) * self.config.hidden_size
            border = hidden * self.itemsize / self.machine.link(layout.world // layout.pp + 1)
            border *= layout.num_chunks * (1 if self.trained is None else 2)
        both = {kind: self._both(layer) for kind, layer in known.items()}
        found = [layers + border for layers in sums_of_stages(layout, [both[kind] for kind in kinds])]
        found[-1] += end
        return found

    def _head_seconds(self, tokens: float, learns: bool) -> float:
        """Seconds of logits and their losses, once more in the backward pass except for one chunk; or of a value, which takes next to none.

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
        """Forward, and backward for trained layers."""
        return layer.forward + self._backward(layer)

    def _backward(self, layer: LayerSeconds) -> float:
        """Seconds of the backward pass, with recomputation; 0 for a model that is not trained."""
        if self.trained is None:
            return 0.0
        computed = (self.times - 1) * layer.matrices + layer.backward * layer.attention
        computed += 2 * layer.between + layer.summed
        # Autograd launches twice as many kernels, from C++: in about the time that the forward pass's take from Python.
        return max(computed, layer.launched) + layer.sent + layer.again + layer.learnt

    def _shared_seconds(self, layers: list[LayerSeconds], head: float) -> float:
        """A micro-batch's passes with Megatron-FSDP, whose traffic is that of ZeRO's stages 2 and 3 (Rajbhandari et al. 2020, arXiv:1910.02054,
        section 7): in every backward pass gradients are scattered to the ranks that sum them, in float32; with shared weights these are gathered
        for every forward pass and again for every backward pass.

        Each layer's travel while others are computed (`overlap_param_gather`, `overlap_grad_reduce`), but the first gathering of a pass and the
        last scattering have nothing to hide behind. The head's passes are part of the backward pass, where there is one.
        """
        gathered = self._between_replicas(self.itemsize) if self.fsdp == FULL else 0.0
        scattered = self._between_replicas(GRADIENT) if self.trained == "weights" else 0.0
        forward, backward = sum(layer.forward for layer in layers), sum(map(self._backward, layers))
        if self.trained is None:
            return _in_turn(forward + head, gathered, len(layers))
        backward = _in_turn(backward + head, gathered + scattered, len(layers))
        return _in_turn(forward, gathered, len(layers)) + backward

    def reduce_seconds(self) -> float:
        """Seconds in which an optimizer step's gradients travel to the ranks that own their states, and the weights back (fully trained ones);
        with Megatron-FSDP gradients travel with each micro-batch, and shared weights do, too."""
        if self.fsdp == FULL:
            return 0.0
        return self._between_replicas(self.itemsize + (GRADIENT if self.fsdp is None else 0))

    def _between_replicas(self, size: float) -> float:
        """Seconds in which `size` bytes of each weight go once around its data and context parallel ranks; without latencies."""
        layout, total = self.layout, 0.0
        dense = max(self.stage_weights[0]) / layout.tp + self.flops.head / layout.tp
        experts = max(self.stage_weights[1]) / (layout.ep * layout.etp)
        groups = (
            (dense, layout.dp * layout.cp, layout.tp),
            (experts, layout.expert_dp, layout.ep * layout.etp),
        )
        for weights, ranks, stride in groups:
            total += weights * size * (ranks - 1) / ranks / self.machine.ring(ranks, stride)
        return total

    def adam_seconds(self) -> float:
        """Seconds in which a rank reads the gradients and states of its part and writes states and weights; where states are on the host, at
        least as long as they take to come, while others go back. Muon's products are added, and the
        data that tensor parallel ranks gather for them."""
        layout = self.layout
        dense = max(self.stage_weights[0]) / layout.tp / (layout.dp * layout.cp)
        experts = max(self.stage_weights[1]) / (layout.ep * layout.etp * layout.expert_dp)
        # Nearly all weights are matrices of layers.
        states = STATES if self.muon is None else STATES - MOMENTUM
        moved = (dense + experts) * (GRADIENT + 2 * states + self.itemsize)
        seconds = moved / (self.machine.gpu.hbm * self.machine.assumed.hbm)
        if self.muon is not None:
            operations, gathered = self.muon
            seconds += operations / (self.machine.gpu.bf16 * self.machine.assumed.matmul)
            return seconds + (gathered / self.machine.ring(layout.tp, 1) if gathered else 0.0)
        states = STATES if self.itemsize < 4 else STATES - 4  # float32 weights are their own copies
        return max(seconds, (dense + experts) * states / self.machine.host) if self.on_host else seconds

    @cached_property
    def stage_weights(self) -> tuple[list[float], list[float]]:
        """By pipeline stage the weights of its layers without their experts, and those of the experts."""
        layers, layout = self.flops.layers, self.layout
        dense = sums_of_stages(layout, [layer.dense for layer in layers])
        experts = sums_of_stages(layout, [layer.experts for layer in layers])
        dense[-1] += sum(layer.dense for layer in self.predicted)
        experts[-1] += sum(layer.experts for layer in self.predicted)
        return dense, experts


def _in_turn(computed: float, sent: float, layers: int) -> float:
    """Seconds of `layers` equal layers, each of which is computed while the next one's data travels."""
    return max(computed, sent) + min(computed, sent) / layers


def _whole_tiles(rows: float) -> float:
    """How much more is computed if the last tile of an expert's tokens is half empty on the average."""
    return (rows + TILE / 2) / rows
