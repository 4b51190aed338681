"""Causal self-attention over packed sequences in plain torch, with context parallelism.

Stands where Transformer Engine's attention stands on a GPU, with its conventions: packed tokens are
[tokens, heads, head_dim] with cumulative lengths of the padded sequences, counted before context parallel
splitting; of each sequence rank r of c context parallel ranks holds parts r and 2c-1-r of 2c equal parts
("zigzag", so that causal work is even).
"""

import functools
import inspect
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch.nn.functional import scaled_dot_product_attention

from megarl.megatron.shared_prompts import attend_shared


class PackedAttention(MegatronModule):
    """Megatron's `core_attention`: softmax(q k^T * scale) v, causal within each packed sequence.

    With `softmax_type` "learnable" each head has a sink, a learnt logit that takes part in its softmax and that no value belongs to
    (Agarwal et al. 2025, arXiv:2508.10925, section 2.2); as in Transformer Engine it is the parameter `softmax_offset` [heads of this rank].
    In layers with a window a query attends only to so many positions before its own.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        assert attention_type == "self" and config.attention_dropout == 0.0
        self.scale = softmax_scale
        self.cp_group = (
            pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()
        )
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.before: int | None = config.window_size[0] if windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
        self._tp_group = pg_collection.tp if pg_collection is not None else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """query [tokens, heads, dim], key and value [tokens, groups, dim] -> [tokens, heads * dim].

        Only packed input is supported; `attention_mask` is not used: the cumulative lengths say it all.
        """
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", "input must be packed"
        assert attention_bias is None
        lengths = _padded_lengths(packed_seq_params)
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        assert sum(lengths) == len(query) * cp, f"{lengths} do not add up to {len(query)} x {cp} tokens"
        if self.softmax_offset is not None or self.before is not None:
            return self._forward_in_full(query, key, value, lengths)
        shared = getattr(packed_seq_params, "shared", None)
        if shared is not None:  # a prompt is computed once for several trajectories
            return attend_shared(self._attend, query, key, value, lengths, shared).flatten(1)
        if cp == 1 and _fits_varlen(query, value) and (attend := _varlen()) is not None:
            # The bounds are the batch's, on the device.
            return attend(
                *(query, key, value),
                *(packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv),
                *(max(lengths), max(lengths)),
                scale=self.scale,
                window_size=(-1, 0),  # causal
                enable_gqa=True,
            ).flatten(1)
        if cp == 1:
            # Neighbours of one length by one call: short sequences take less time than a call of their own.
            counts = [len(list(equal)) for _, equal in groupby(lengths)]
            sizes = [sum(equal) for _, equal in groupby(lengths)]
            parts = (part.split(sizes) for part in (query, key, value))
            outputs = [
                self._attend(q, k, v, count, is_causal=True)
                for q, k, v, count in zip(*parts, counts, strict=True)
            ]
        else:
            # A rank's queries need the keys and values of the full sequences, which context parallelism has cut.
            keys, values = (gather_sequences(part, lengths, self.cp_group) for part in (key, value))
            queries = query.split([length // cp for length in lengths])
            outputs = [
                self._attend_zigzag(q, k, v, cp, rank) for q, k, v in zip(queries, keys, values, strict=True)
            ]
        return torch.cat(outputs).flatten(1)

    def _forward_in_full(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]
    ) -> torch.Tensor:
        """`forward` with sinks or a window: all scores of a sequence exist at one time, and none is kept for the backward pass."""
        cp, rank = self.cp_group.size(), self.cp_group.rank()
        if cp == 1:
            parts = (part.split(lengths) for part in (query, key, value))
            positions = [torch.arange(length, device=query.device) for length in lengths]
            sequences = zip(*parts, positions, strict=True)
        else:
            keys, values = (gather_sequences(part, lengths, self.cp_group) for part in (key, value))
            positions = []
            for length in lengths:
                halves = torch.arange(length, device=query.device).chunk(2 * cp)
                positions.append(torch.cat((halves[rank], halves[2 * cp - 1 - rank])))
            queries = query.split([length // cp for length in lengths])
            sequences = zip(queries, keys, values, positions, strict=True)
        return torch.cat([self._attend_in_full(*sequence) for sequence in sequences]).flatten(1)

    def _attend_in_full(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """One sequence's queries [n, heads, dim] at `positions` [n] of it, its keys and values [length, groups, dim] -> as query."""
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        before = positions[:, None] - torch.arange(len(key), device=key.device)
        hidden = before < 0 if self.before is None else (before < 0) | (before > self.before)
        return _Attention.apply(query, key, value, self.softmax_offset, hidden, scale)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """For distributed checkpoints, as Transformer Engine's: heads' sinks are cut over tensor parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        count: int = 1,
        is_causal: bool = False,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`count` sequences of one length, end to end: [tokens, heads, dim] each -> the same."""
        output = scaled_dot_product_attention(
            *(part.unflatten(0, (count, -1)).transpose(1, 2) for part in (query, key, value)),
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).flatten(0, 1)

    def _attend_zigzag(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cp: int, rank: int
    ) -> torch.Tensor:
        """This rank's two parts of one sequence's queries over the keys before them (inclusive)."""
        size = len(key) // (2 * cp)
        outputs = []
        for part, queries in zip((rank, 2 * cp - 1 - rank), query.split(size), strict=True):
            end = (part + 1) * size
            positions = torch.arange(end, device=query.device)
            mask = positions[-size:, None] >= positions[None]  # [size, end]
            outputs.append(self._attend(queries, key[:end], value[:end], mask=mask))
        return torch.cat(outputs)


def gather_sequences(part: torch.Tensor, lengths: list[int], group: Any) -> list[torch.Tensor]:
    """All context parallel ranks' tokens of each sequence, in the sequence's order.

    Backward sums each token's gradient over the ranks and returns it to its holder.
    """
    cp = group.size()
    gathered = gather_from_sequence_parallel_region(
        part.contiguous(), tensor_parallel_output_grad=True, group=group
    )
    local = [length // cp for length in lengths]
    by_rank = [shard.split(local) for shard in gathered.chunk(cp)]
    sequences = []
    for index in range(len(lengths)):
        halves = [by_rank[rank][index].chunk(2) for rank in range(cp)]
        sequences.append(torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)]))
    return sequences


class _Attention(torch.autograd.Function):
    """Attention of one sequence with a mask and sinks. Its backward pass makes the scores anew, from the rows' sums (Dao et al. 2022,
    arXiv:2205.14135, algorithm 4); a sink is a key whose value is 0."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        hidden: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """query: [n, heads, dim]; key, value: [length, groups, dim]; sinks: [heads]; hidden: bool [n, length] -> as query."""
        scores = _scores(query, key, hidden, scale)
        sums = scores.logsumexp(-1)  # [groups, heads of a group, n]
        if sinks is not None:
            sums = torch.logaddexp(sums, _by_row(sinks, sums))
        weights = scores.sub_(sums[..., None]).exp_().to(value.dtype)
        output = torch.einsum("gqnl,lgd->ngqd", weights, value).reshape(query.shape)
        ctx.save_for_backward(query, key, value, sinks, hidden, sums, output)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, hidden, sums, output = ctx.saved_tensors
        groups, kind = key.shape[1], query.dtype
        weights = _scores(query, key, hidden, ctx.scale).sub_(sums[..., None]).exp_()
        split = grad.unflatten(1, (groups, -1))  # [n, groups, heads of a group, dim]
        along = (grad.float() * output.float()).sum(-1).T.unflatten(0, (groups, -1))  # as the sums
        grad_value = torch.einsum("gqnl,ngqd->lgd", weights.to(kind), split)
        grad_scores = torch.einsum("ngqd,lgd->gqnl", split, value).float().sub_(along[..., None])
        grad_scores = grad_scores.mul_(weights).mul_(ctx.scale).to(kind)
        grad_query = torch.einsum("gqnl,lgd->ngqd", grad_scores, key).reshape(query.shape)
        grad_key = torch.einsum("gqnl,ngqd->lgd", grad_scores, query.unflatten(1, (groups, -1)))
        grad_sinks = None
        if sinks is not None:
            shares = (_by_row(sinks, sums) - sums).exp_()
            grad_sinks = -(shares * along).sum(-1).flatten().to(sinks.dtype)
        return grad_query, grad_key, grad_value, grad_sinks, None, None


def _scores(query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """float32 [groups, heads of a group, n, length]; -inf where `hidden`."""
    scores = torch.einsum("ngqd,lgd->gqnl", query.unflatten(1, (key.shape[1], -1)), key).float()
    return scores.mul_(scale).masked_fill_(hidden, -torch.inf)


def _by_row(sinks: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """[heads] -> as the sums [groups, heads of a group, n]."""
    return sinks.float().view(sums.shape[0], -1, 1).expand_as(sums)


def _fits_varlen(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's flash attention of packed sequences takes these: one kernel for all sequences of a layer."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
    )


@functools.cache
def _varlen() -> Callable[..., torch.Tensor] | None:
    """Torch's flash attention of packed sequences, None in a version of torch where it takes no grouped queries.

    Its module imports dynamo, which takes seconds: it is imported where it is used.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


def _padded_lengths(packed: PackedSeqParams) -> list[int]:
    """Lengths of the sequences; where the batch does not have them on the host, the device is asked and waited for."""
    lengths = getattr(packed, "lengths", None)
    if lengths is not None:
        return lengths
    cumulative = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
    return (cumulative[1:] - cumulative[:-1]).tolist()
