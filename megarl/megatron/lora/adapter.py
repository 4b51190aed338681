"""The adapters of one linear layer, dense or of experts: their term of the layer's output, sharded as its weight is.

The places of an adapter's parts follow from the weight table (`megarl.models.lora`):

- if the weight is cut by rows, A is replicated: it sees the layer's input, the rank's own tokens under sequence
  parallelism, and its output (`rank` numbers a token) is gathered, not its input;
- if it is cut by columns, B is replicated: the ranks' parts of A's output are summed before it;
- with experts the dispatcher routes the tokens and also sums the parts of an expert: a parameter replicated on all of the expert's
  ranks has its gradient summed over them.

Written against megatron-core 0.19.2.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from megarl import platform
from megarl.config.schema.models import LoraConfig
from megarl.megatron.cpu.torch_te import rms_norm as rms_norm_in_float32
from megarl.megatron.lora.fp8_base import exact_weight
from megarl.models.computed import LowRankTerm
from megarl.models.lora import AdapterSlot, scaling
from megarl.models.shards import COLUMNS, ROWS

# Dropout draws from random streams of its own, equal on ranks that hold the same numbers and on no others. They are kept with Megatron's
# other streams, so layers that are computed again in the backward pass drop the same elements as before. Megatron's own streams would
# not do: they are the same on all data and context parallel ranks (they start weights there), and one of them serves everything else
# that is random.

ALIGNED = 8  # elements of bfloat16 in 16 bytes
TENSOR, EXPERT, OWN = "lora-tensor-parallel", "lora-expert-tensor-parallel", "lora-own"
"""Streams: equal on the tensor parallel ranks of a layer, on the ranks of an expert, on this rank alone."""


def start_streams(seed: int) -> None:
    """Begin the streams, unless they have begun; after `init_parallel`."""
    tracker = get_cuda_rng_tracker()
    groups = {
        TENSOR: parallel_state.get_tensor_model_parallel_group(),
        EXPERT: parallel_state.get_expert_tensor_parallel_group(),
        OWN: None,
    }
    for name, group in groups.items():
        if name in tracker.get_states():
            continue
        first = torch.distributed.get_rank()
        if group is not None:
            first = torch.distributed.get_process_group_ranks(group)[0]
        tracker.add(name, zlib.crc32(f"{seed} {name} {first}".encode()))


def drop(x: Tensor, share: float, stream: str) -> Tensor:
    """`x` with this share of its elements set to 0, and the others divided by the remaining share."""
    with get_cuda_rng_tracker().fork(stream):
        return torch.nn.functional.dropout(x, share, training=True)


class LayerAdapters(torch.nn.Module):
    """The adapters of one linear layer; `on`: whether they change its output.

    `experts`: numbers of the layer's experts on this rank, which have a weight each; None stands for a dense layer's only weight.
    """

    experts: Sequence[int | None]

    def __init__(
        self, slot: AdapterSlot, lora: LoraConfig, cut: str | None, group: Any, out_features: int
    ) -> None:
        """
        Args:
            slot: of the layer, or of its first expert.
            cut: how the ranks of `group` have cut a weight: ROWS, COLUMNS or None (each has all of it).
            group: None: the tensor parallel ranks.
            out_features: rows of a weight on this rank.
        """
        super().__init__()
        self.on = True
        self._cut, self._group = cut, group
        self._lora, self._scaling = lora, scaling(lora)
        self._heads = _Heads(slot, lora, out_features)
        count = 1 if lora.shared_a else len(slot.tensors)
        self._shapes = {"a": (count * lora.rank, slot.in_features), "b": (slot.num_rows, lora.rank)}
        rows = 0 if cut == ROWS else None
        self._sharded = {"a": 1 if cut == COLUMNS else None, "b": rows, "m": rows}
        if lora.use_dora:
            self._shapes["m"] = (slot.num_rows,)

    @property
    def use_dora(self) -> bool:
        return self._lora.use_dora

    def parameter(self, kind: str, expert: int | None) -> Tensor:
        """The parameter of this kind (a, b or m); for an expert a view of it."""
        raise NotImplementedError

    @torch.no_grad()
    def norms(self, layer: torch.nn.Module, expert: int | None = None) -> Tensor:
        """The norm of each adapted row of W + scaling B A [rows of b]; no gradient flows through it (DoRA, section
        4.3)."""
        squares = self._sum(layer, expert)[self._heads.rows].float().square().sum(1)
        if self._cut == COLUMNS:
            squares = reduce_from_tensor_model_parallel_region(squares, group=self._group)
        return squares.sqrt().to(self.parameter("b", expert).dtype)

    @torch.no_grad()
    def merged(
        self, layer: torch.nn.Module, expert: int | None = None, norms: Tensor | None = None
    ) -> Tensor:
        """A weight of the layer with its adapters [out, in], complete for the layer's computation.

        Args:
            norms: DoRA: `norms(layer, expert)`, which ranks that share columns work out together; None: done here.
        """
        weight = self._sum(layer, expert)
        if self._lora.use_dora:
            magnitudes = self.parameter("m", expert) / (self.norms(layer, expert) if norms is None else norms)
            weight *= self._heads.spread(magnitudes, 1.0)[:, None]
        return weight

    @torch.no_grad()
    def term(self, expert: int | None = None, norms: Tensor | None = None) -> LowRankTerm:
        """What adapters add to a weight of the layer.

        Args:
            norms: with DoRA, as in `merged`.
        """
        magnitudes = None
        if norms is not None:
            magnitudes = self._heads.spread(self.parameter("m", expert) / norms, 1.0)
        a, b = self.parameter("a", expert).detach(), self.parameter("b", expert).detach()
        return LowRankTerm(a, b, self._heads.rows_of_b, self._heads.parts, self._scaling, magnitudes)

    def _sum(self, layer: torch.nn.Module, expert: int | None) -> Tensor:
        """W + scaling B A, a new tensor."""
        weight = exact_weight(layer, weight_name(expert)).detach().clone()
        self._heads.merge(weight, self.parameter("a", expert), self.parameter("b", expert), self._scaling)
        return weight


def weight_name(expert: int | None) -> str:
    """The parameter of a linear layer that is the weight, or the expert's."""
    return "weight" if expert is None else f"weight{expert}"


def adapters_in(chunk: torch.nn.Module) -> Iterator[tuple[str, str, LayerAdapters]]:
    """The adapters of a model: the layer's name, the name of the set that they belong to, and the module."""
    for path, module in chunk.named_modules():
        if isinstance(module, LayerAdapters):
            layer, _, name = path.rpartition(".")
            yield layer, name, module


class Adapter(LayerAdapters):
    """The adapters of one linear layer: parameters `a`, `b` and with DoRA `m` (see `megarl.models.lora`)."""

    experts = (None,)

    def __init__(
        self,
        layer: torch.nn.Module,
        slot: AdapterSlot,
        lora: LoraConfig,
        cut: str | None,
        sequence_parallel: bool,
        dtype: torch.dtype,
    ) -> None:
        """cut: as in `LayerAdapters`."""
        super().__init__(slot, lora, cut, None, layer.weight.shape[0])
        self._sequence_parallel = sequence_parallel
        # Whether other ranks are given the same tokens and columns; they then drop the same.
        self._stream = OWN if cut == COLUMNS or sequence_parallel else TENSOR
        for kind, shape in self._shapes.items():
            # A parameter that each rank has in full and applies to its own tokens only has its gradient summed over the ranks.
            partial = sequence_parallel and cut != (COLUMNS if kind == "a" else ROWS)
            self.register_parameter(kind, _parameter(shape, dtype, self._sharded[kind], partial))

    def parameter(self, kind: str, expert: int | None) -> Tensor:
        return self.get_parameter(kind)

    def forward(self, layer: torch.nn.Module, x: Tensor, output: Tensor) -> Tensor:
        """The layer's output with the adapters' added.

        Args:
            x: [tokens, 1, in], as the layer is given it.
            output: [tokens, 1, out], the layer's own output.
        """
        x = _normed(layer, x)
        if self.training and self._lora.dropout:
            x = drop(x, self._lora.dropout, self._stream)
        hidden = self._shared(linear(x, self.a))
        term = self._heads(hidden, self.b)
        if not self._lora.use_dora:
            return torch.add(output, term, alpha=self._scaling)
        added = term * self._scaling
        ratio = self._heads.spread(self.m / self.norms(layer), fill=1.0)
        # Attention's output has its bias added after the layer, by Megatron.
        added_later = getattr(layer, "skip_bias_add", False) or getattr(layer, "te_return_bias", False)
        bias = None if added_later else getattr(layer, "bias", None)
        plain = output if bias is None or not bias.numel() else output - bias
        return output + (ratio - 1) * plain + ratio * added

    def _shared(self, hidden: Tensor) -> Tensor:
        """A's output where B needs it: of all tokens for a part of the rows, of the rank's own tokens for all rows."""
        if self._cut == ROWS:
            if self._sequence_parallel:
                return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            return copy_to_tensor_model_parallel_region(hidden)
        if self._cut == COLUMNS:
            if self._sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(hidden)
            return reduce_from_tensor_model_parallel_region(hidden)
        return hidden

    @torch.no_grad()
    def start_magnitudes(self, layer: torch.nn.Module) -> None:
        """Magnitudes with which the layer's output equals its output without adapters, as long as B is 0."""
        self.m.copy_(self.norms(layer))


class ExpertAdapter(LayerAdapters):
    """The adapters of a rank's experts in one grouped linear layer.

    The first dimension of the parameters `a` and `b` counts the experts, or groups of them that share an adapter; with DoRA each has
    magnitudes of its own, `m0`, `m1`, ...: Megatron's optimizer exempts parameters of one dimension from weight decay.
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        slots: list[AdapterSlot],
        lora: LoraConfig,
        cut: str | None,
        group: Any,
        group_size: int,
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            slots: by expert.
            cut, group: as in `LayerAdapters`; the expert tensor parallel ranks.
            group_size: neighbouring experts that share an adapter.
        """
        super().__init__(slots[0], lora, cut, group, layer.weight0.shape[0])
        self._group_size, self.experts = group_size, range(len(slots))
        assert len(slots) % group_size == 0, "checked with the layout"
        number = len(slots) // group_size
        for kind in ("a", "b"):
            sharded = self._sharded[kind]
            self._register(
                kind, (number, *self._shapes[kind]), dtype, None if sharded is None else 1 + sharded, layer
            )
        for group_number in range(number if lora.use_dora else 0):
            self._register(f"m{group_number}", self._shapes["m"], dtype, self._sharded["m"], layer)

    def _register(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        sharded: int | None,
        layer: torch.nn.Module,
    ) -> None:
        parameter = _parameter(shape, dtype, sharded, False)
        parameter.allreduce = layer.weight0.allreduce  # its gradients are summed where the weight's are
        self.register_parameter(name, parameter)

    def parameter(self, kind: str, expert: int | None) -> Tensor:
        assert expert is not None
        number = expert // self._group_size
        return self.get_parameter(f"m{number}") if kind == "m" else self.get_parameter(kind)[number]

    def forward(self, layer: torch.nn.Module, x: Tensor, splits: list[int], output: Tensor) -> Tensor:
        """The layer's output with the adapters' added.

        Args:
            x: [tokens, in], sorted by expert.
            splits: how many tokens each expert has.
            output: [tokens, out]; where the weights are cut by columns a part of a sum over the ranks.
        """
        if self.training and self._lora.dropout:
            x = drop(x, self._lora.dropout, OWN if self._cut == COLUMNS else EXPERT)
        counts = [int(count) for count in splits]
        groups = [sum(counts[at : at + self._group_size]) for at in range(0, len(counts), self._group_size)]
        multiply = GroupedLinear(groups, x.device)
        hidden = multiply(x, self._replicated("a", ROWS))
        term = self._heads(hidden, self._replicated("b", COLUMNS), multiply)
        added = torch.add(output, term, alpha=self._scaling)
        if not self._lora.use_dora:
            return added
        parts = enumerate(added.split(counts))
        return torch.cat([self._scaled(layer, expert, part) for expert, part in parts])

    def _scaled(self, layer: torch.nn.Module, expert: int, output: Tensor) -> Tensor:
        """An expert's output with its magnitudes in place of its weight's norms."""
        m = self._replicated(f"m{expert // self._group_size}", COLUMNS)
        return output * self._heads.spread(m / self.norms(layer, expert), fill=1.0)

    def _replicated(self, name: str, replicated_with: str) -> Tensor:
        """A parameter; if the ranks of the group each have all of it, its gradient is the sum of theirs."""
        parameter = self.get_parameter(name)
        if self._cut == replicated_with:
            return copy_to_tensor_model_parallel_region(parameter, group=self._group)
        return parameter

    @torch.no_grad()
    def start_magnitudes(self, layer: torch.nn.Module) -> None:
        """As `Adapter.start_magnitudes`; experts of a group share the mean of theirs."""
        for first in range(0, len(self.experts), self._group_size):
            norms = [self.norms(layer, first + index) for index in range(self._group_size)]
            self.parameter("m", first).copy_(torch.stack(norms).mean(0))


class GroupedLinear:
    """A linear layer for groups of tokens with a weight each.

    In bfloat16 all groups are one launch (`torch.nn.functional.grouped_mm`), if rows begin at multiples of 16 bytes and the GPU has a kernel
    for it; else each group is one. Groups without tokens are left out: on B200 torch's gradients of their weights are not zero
    (pytorch/pytorch#172439).
    """

    def __init__(self, counts: list[int], device: torch.device) -> None:
        """
        Args:
            counts: tokens of each group.
            device: of the tokens.
        """
        self._counts = counts
        kept = [number for number, count in enumerate(counts) if count]
        ends = torch.tensor([counts[number] for number in kept], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
        indices = torch.tensor(kept if len(kept) < len(counts) else [], dtype=torch.int32)
        self._at_once = bool(kept)
        if device.type == "cuda":
            # Elsewhere torch (2.13) takes a group at a time, and waits for the device to learn where groups end.
            self._at_once &= torch.cuda.get_device_capability(device)[0] in (9, 10)
            ends, indices = (
                numbers.pin_memory().to(device, non_blocking=True) for numbers in (ends, indices)
            )
        self._ends, self._kept = ends, indices

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """[tokens, out] of `x` [tokens, in], sorted by group, and `weight` [groups, out, in]."""
        rows = (x.stride(0), weight.stride(1), *weight.shape[1:])  # of gradients, too
        if self._at_once and x.dtype == torch.bfloat16 and not any(size % ALIGNED for size in rows):
            kept = weight.index_select(0, self._kept) if len(self._kept) else weight
            return torch.nn.functional.grouped_mm(x, kept.transpose(1, 2), offs=self._ends)
        parts = zip(x.split(self._counts), weight, strict=True)
        return torch.cat([linear(part, own) for part, own in parts])


class _Heads:
    """From A's output to the layer's rows: which tensor each row of `b` belongs to, and where in the layer it lies."""

    def __init__(self, slot: AdapterSlot, lora: LoraConfig, out_features: int) -> None:
        self._rank, self._shared_a, self._out = lora.rank, lora.shared_a, out_features
        device = platform.device()
        rows = torch.cat([torch.arange(first, first + count) for _, first, count in slot.rows])
        owner = torch.cat([torch.full((count,), number) for number, _, count in slot.rows])
        of = [(owner == number).nonzero().flatten() for number in range(len(slot.tensors))]
        order = torch.cat(of)  # rows of b, tensor by tensor
        natural = bool((order == torch.arange(len(order))).all())
        whole = len(order) == out_features
        self.rows = rows.to(device)  # of the layer, by row of b
        self._of = [_as_slice(own, device) for own in of]
        self._single = len(of) == 1
        self._in_order = natural and whole
        self._place = rows[order].to(device)  # of the layer, by row tensor by tensor
        self._inverse = torch.argsort(self._place) if whole else None

    @cached_property
    def rows_of_b(self) -> Tensor:
        """`LowRankTerm.rows`."""
        places = torch.arange(len(self.rows), dtype=torch.int32, device=self.rows.device)
        if not self._shared_a:
            for number, rows in enumerate(self._of):
                places[rows] += number << 24
        found = torch.full((self._out,), -1, dtype=torch.int32, device=self.rows.device)
        return found.index_copy(0, self.rows, places)

    @property
    def parts(self) -> int:
        """`LowRankTerm.parts`."""
        return 1 if self._shared_a else len(self._of)

    def __call__(
        self, hidden: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = linear
    ) -> Tensor:
        """[..., tensors * rank] -> [..., out]: B's output at the layer's rows, 0 at rows that are not adapted.

        Args:
            b: [..., rows, rank].
            multiply: hidden states with a part of B.
        """
        if self._single:
            parts = multiply(hidden, b)
        else:
            of = [multiply(self._own(hidden, n), b[..., rows, :]) for n, rows in enumerate(self._of)]
            parts = torch.cat(of, -1)
        if self._in_order:
            return parts
        if self._inverse is not None:
            return parts.index_select(-1, self._inverse)
        return parts.new_zeros(*parts.shape[:-1], self._out).index_copy(-1, self._place, parts)

    def _own(self, a: Tensor, number: int, dim: int = -1) -> Tensor:
        return a if self._shared_a else a.narrow(dim, number * self._rank, self._rank)

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """[rows of b] -> [out], `fill` at rows that are not adapted."""
        return values.new_full((self._out,), fill).index_copy(0, self.rows, values)

    def merge(self, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> None:
        """Add scaling B A to W in place; one tensor's product exists in addition to it at a time."""
        for number, rows in enumerate(self._of):
            product = (b[rows] @ self._own(a, number, 0)).mul_(scaling)
            weight.index_add_(0, self.rows[rows], product)


def _as_slice(rows: Tensor, device: torch.device) -> Tensor | slice:
    """Ascending numbers of rows: as a slice if they follow each other, which is taken without a copy."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows.to(device)


def _normed(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """The input that the layer's weight is multiplied with: some layers norm it first, with a frozen weight."""
    weight = getattr(layer, "layer_norm_weight", None)
    if weight is None:
        return x
    if layer.zero_centered_gamma:
        # 1 + weight is float32 in Transformer Engine (2.18): torch's norm in one kernel would need it in the type of x, with fewer bits.
        return rms_norm_in_float32(x, 1 + weight.float(), layer.eps)
    return rms_norm(x, (x.shape[-1],), weight, layer.eps)


def _parameter(
    shape: tuple[int, ...], dtype: torch.dtype, sharded: int | None, partial_gradient: bool
) -> torch.nn.Parameter:
    """Zeros, with the marks by which Megatron reduces gradients and counts norms.

    Args:
        sharded: the dimension that tensor parallel ranks share; None: each has all of it.
        partial_gradient: whether each rank's gradient is that of its own tokens alone.
    """
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=platform.device()))
    parameter.tensor_model_parallel = sharded is not None
    parameter.partition_dim, parameter.partition_stride = (-1 if sharded is None else sharded), 1
    parameter.sequence_parallel = partial_gradient
    parameter.allreduce = True
    return parameter
