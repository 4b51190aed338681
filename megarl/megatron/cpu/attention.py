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
from torch.nn.functional import scaled_dot_product_attention

from megarl.megatron.shared_prompts import attend_shared


class PackedAttention(MegatronModule):
    """Megatron's `core_attention`: softmax(q k^T * scale) v, causal within each packed sequence."""

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
            keys, values = (self._gather_sequences(part, lengths) for part in (key, value))
            queries = query.split([length // cp for length in lengths])
            outputs = [
                self._attend_zigzag(q, k, v, cp, rank) for q, k, v in zip(queries, keys, values, strict=True)
            ]
        return torch.cat(outputs).flatten(1)

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

    def _gather_sequences(self, part: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """All context parallel ranks' tokens of each sequence, in the sequence's order.

        Backward sums each token's gradient over the ranks and returns it to its holder.
        """
        cp = self.cp_group.size()
        gathered = gather_from_sequence_parallel_region(
            part.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )
        local = [length // cp for length in lengths]
        by_rank = [shard.split(local) for shard in gathered.chunk(cp)]
        sequences = []
        for index in range(len(lengths)):
            halves = [by_rank[rank][index].chunk(2) for rank in range(cp)]
            sequences.append(torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)]))
        return sequences


def _fits_varlen(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's flash attention of packed sequences takes these: one kernel for all sequences of a layer."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= 256
    )


@functools.cache
def _varlen() -> Callable[..., torch.Tensor] | None:
    """Torch's flash attention of packed sequences, None in a version of torch whose takes no grouped queries.

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
