"""Packed (THD) micro-batches: ragged sequences laid end to end, sharded over context-parallel ranks.

`megarl.megatron.packing` makes them. Promises:
- No padding but alignment. With context parallelism every sequence is lengthened to a multiple of 2*cp; with
  sequence parallelism the last sequence is lengthened further, until every rank's tokens divide by tp. Added
  tokens have id 0, a false mask and zero fields; `PackedBatch.num_padding` counts them. Attention is causal,
  so tokens at a sequence's end change nothing before them.
- Context-parallel sharding is Transformer Engine's for THD: of each sequence's 2*cp equal chunks, rank r
  holds chunk r and then chunk 2*cp-1-r.
- Predictor alignment: everything that belongs to a predicted token (label, mask, fields) lies at the position
  before it, where the hidden state that predicts it is.
- `unpack` inverts it: one array a sequence, in the order in which the sequences were packed.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OtherHead:
    """What makes the logits of another model, with the layout of the one that is run, at a batch's live positions.

    Attributes:
        hidden: [live, hidden]; its last hidden states.
        weight: [padded vocab/tp, hidden]; this rank's rows of its output weight.
    """

    hidden: Tensor
    weight: Tensor


@dataclass
class PackedBounds(PackedSeqParams):
    """Megatron's, and which of this rank's positions the last layer's MLP is asked for (`live_mlp`); None: all; the lengths of the aligned
    sequences, which layers would otherwise have to ask the device for; and what sequences share (`PackedBatch.shared`)."""

    live: Tensor | None = None
    lengths: list[int] | None = None
    shared: list[int] | None = None


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """One rank's share of a packed micro-batch; `tokens` counts this rank's tokens.

    Attributes:
        input_ids, position_ids: int64 [1, tokens].
        labels: int64 [tokens]; the token that each position predicts, 0 where it predicts none.
        mask: bool [tokens]; where the predicted token counts in losses.
        live: int64; the positions where `mask` is true (known here without asking the device).
        fields: what else belongs to predicted tokens, float32 or bool [tokens], by column name.
        cu_seqlens: int32 [sequences + 1]; bounds of the aligned sequences over all context-parallel ranks. Its attribute `positions` is
            `position_ids` [tokens], since Megatron hands its rotary embedding these bounds and nothing else of a batch.
        aligned: int64 [sequences]; lengths of the aligned sequences, on the host.
        max_seqlen: tokens of the longest aligned sequence.
        lengths: int64 [sequences]; true lengths.
        first, counts: int64 [sequences]; sequence i's predicted tokens belong to the `counts[i]` packed
            positions (over all context-parallel ranks) from `first[i]`.
        cp, cp_rank: context-parallel size and this rank in it.
        other: another model's head on the live positions, to be compared with; None: there is none.
        shared: int64 [sequences]; how many tokens before its own a sequence has in common with the nearest earlier one that
            shares none, and only that one holds; None: all have all theirs.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    mask: Tensor
    live: Tensor
    fields: dict[str, Tensor]
    cu_seqlens: Tensor
    aligned: np.ndarray
    max_seqlen: int
    lengths: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    cp: int
    cp_rank: int
    other: OtherHead | None = None
    shared: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank, alignment included."""
        return self.input_ids.shape[1]

    @property
    def num_padding(self) -> int:
        """Tokens over all context-parallel ranks that are there for alignment only."""
        return self.num_tokens * self.cp - int(self.lengths.sum())

    def packed_seq_params(self, live_only: bool = False) -> PackedBounds:
        """What Megatron's attention and rotary embedding need to know of the sequences' bounds.

        Args:
            live_only: whether the last hidden states are asked for at the live positions alone. Where the last layer can do so
                (`live_mlp`) they are then [live, 1, hidden], elsewhere [tokens, 1, hidden]: `live_rows` takes both.
        """
        # Aligned lengths serve as the true ones: attention then runs over the alignment tokens at each
        # end, which costs a few tokens and spares the kernels the case of gaps between sequences.
        return PackedBounds(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            cu_seqlens_q_padded=self.cu_seqlens,
            cu_seqlens_kv_padded=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
            pad_between_seqs=False,
            live=self.live if live_only else None,
            lengths=self.aligned.tolist(),
            shared=None if self.shared is None else self.shared.tolist(),
        )

    def live_rows(self, hidden: Tensor) -> Tensor:
        """`hidden` at the live positions, [live, ...], of hidden states of these or of all positions."""
        if hidden.shape[0] == self.live.shape[0]:  # they are, or all positions are live
            return hidden
        assert hidden.shape[0] == self.num_tokens, (hidden.shape, self.num_tokens)
        return hidden.index_select(0, self.live)


def unpack(batch: PackedBatch, values: Tensor, cp_group: dist.ProcessGroup | None = None) -> list[np.ndarray]:
    """Split per-token `values` [tokens] into one array a sequence: the values of its predicted tokens.

    Args:
        cp_group: the context-parallel group; needed with cp > 1, where it is a collective over that group.

    Returns: for each sequence an array [counts[i]] (the response, for trajectories) of the values' dtype.
    """
    assert values.shape == (batch.num_tokens,), (values.shape, batch.num_tokens)
    local = values.detach().contiguous()
    if batch.cp > 1:
        assert cp_group is not None and cp_group.size() == batch.cp
        shards = [torch.empty_like(local) for _ in range(batch.cp)]
        dist.all_gather(shards, local, group=cp_group)
        stacked = torch.stack(shards).cpu().numpy()
        whole = np.empty(stacked.size, stacked.dtype)
        whole[zigzag(np.cumsum([0, *batch.aligned]), batch.cp)] = stacked
    else:
        whole = local.cpu().numpy()
    return np.split(whole[spans(batch.first, batch.counts)], np.cumsum(batch.counts)[:-1])


def zigzag(bounds: np.ndarray, cp: int) -> np.ndarray:
    """Packed positions that each context-parallel rank holds, in its order: int64 [cp, tokens / cp].

    Args:
        bounds: int64 [sequences + 1], starts of the sequences and the end; lengths are multiples of 2*cp.
    """
    if cp == 1:
        return np.arange(bounds[-1])[None]
    chunk = np.diff(bounds) // (2 * cp)
    starts = bounds[:-1]
    ranks = [
        spans(
            np.stack([starts + rank * chunk, starts + (2 * cp - 1 - rank) * chunk], axis=1).reshape(-1),
            np.repeat(chunk, 2),
        )
        for rank in range(cp)
    ]
    return np.stack(ranks)


def spans(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers starts[i], starts[i] + 1, ... (counts[i] of them) for each i, end to end."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
