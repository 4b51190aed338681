"""Latent attention to the keys that an indexer chooses; it takes the place of Megatron's and keeps its other parts (megatron-core 0.19.2).

All scores of a query's sequence are computed, and the scores of other keys hidden: the result is that of attention to the chosen keys, the
time that of attention to all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from megarl.megatron.cpu.attention import gather_sequences
from megarl.megatron.cpu.torch_te import rms_norm
from megarl.megatron.packing import PackedBounds
from megarl.megatron.sparse.indexer import Choice, project
from megarl.megatron.sparse.learning import IndexerLoss, Lesson, Untaught, counted, teaching_texts
from megarl.megatron.sparse.selection import Run, choose_keys, hidden_keys, runs_of


class SparseSelfAttention(MLASelfAttention):
    """Latent attention of a model with indexers.

    Attributes:
        choice: which keys are chosen, and by which layer's indexer (`add_indexers`).
        indexer: this layer's; there is none where the layer takes another one's choice.
        indexer_loss: the loss that the indexer learns from; None: there is no indexer, or it does not learn.
    """

    choice: Choice
    indexer_loss: IndexerLoss | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.core_attention.requires_dsa_inputs = True  # Megatron then hands over the layer's input, too

    def _run_core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedBounds | None = None,
        attn_mask_type: Any = None,
        x: Tensor | None = None,
        qr: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Queries, keys and values [tokens, heads of this rank, dim] -> [tokens, heads * value dim].

        Args:
            x: [this rank's tokens with sequence parallelism, 1, hidden], the layer's normed input.
            qr: [the same, low rank], the queries before their norm and up-projection.
        """
        bounds, topk = packed_seq_params, self.choice.topk
        assert (
            isinstance(bounds, PackedBounds)
            and bounds.lengths is not None
            and x is not None
            and qr is not None
        )
        # Not in the first pass of a layer that is computed again, nor where log-probs are computed.
        learning = self.indexer_loss if torch.is_grad_enabled() else None
        if bounds.max_seqlen_q <= topk:
            output = super()._run_core_attention(
                *(query, key, value, attention_mask),
                packed_seq_params=bounds,
                attn_mask_type=attn_mask_type,
                **options,
            )
            return output if learning is None else Untaught.apply(output, *self.indexer.parameters())
        assert bounds.shared is None, "models with experts do not share prompts"
        indexed = None
        if self.choice.source is None:
            with torch.set_grad_enabled(learning is not None):
                indexed = self._index(x.squeeze(1).detach(), qr.detach(), bounds)
        chosen = self._chosen(indexed, bounds)
        if learning is None:
            indexed = None  # it may take as much as queries, and attention needs the room
        group, lengths = self.pg_collection.cp, bounds.lengths
        if group.size() > 1:
            key, value = (torch.cat(gather_sequences(part, lengths, group)) for part in (key, value))
        runs = runs_of(lengths, group.size(), group.rank())
        lesson = None if learning is None else self._lesson(indexed, chosen, bounds)
        output = ChosenAttention.apply(query, key, value, chosen, runs, topk, self.softmax_scale, lesson)
        if learning is not None:
            output = learning.add_to(output, lesson, indexed.queries, indexed.keys, indexed.weights)
        return output.flatten(1)

    def _chosen(self, indexed: "Indexed | None", bounds: PackedBounds) -> Tensor:
        """The choices of all of this context parallel rank's queries, as `choose_keys`; by another layer's indexer where `indexed` is None."""
        if indexed is None:
            source = self.choice.source
            if source not in bounds.choices:
                raise ValueError(
                    f"layer {self.choice.layer} takes the keys that the indexer of layer {source} chooses, which is on another pipeline stage; begin "
                    "each stage with a layer that has an indexer (megatron.pipeline_model_parallel_layout), or make texts no longer than "
                    f"index_topk={self.choice.topk}"
                )
            return bounds.choices[source]
        with torch.no_grad():
            chosen = self._choose(indexed, bounds)
        if self.choice.is_shared:
            bounds.choices[self.choice.layer] = chosen
        return chosen

    def _choose(self, indexed: "Indexed", bounds: PackedBounds) -> Tensor:
        """Each rank chooses for its own tokens; with sequence parallelism the choices are then exchanged."""
        assert bounds.lengths is not None
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        runs = runs_of(bounds.lengths, cp.size(), cp.rank(), indexed.own)
        found = indexed.queries, indexed.weights, indexed.keys
        chosen = choose_keys(*found, runs, self.choice.topk, max(bounds.lengths))
        if not self._shares_tokens:
            return chosen
        everyones = chosen.new_empty((len(chosen) * tp.size(), chosen.shape[1]))
        dist.all_gather_into_tensor(everyones, chosen, group=tp)
        return everyones

    @property
    def _shares_tokens(self) -> bool:
        """Whether tensor parallel ranks have parts of the tokens, and not all of them."""
        return self.config.sequence_parallel and self.pg_collection.tp.size() > 1

    def _index(self, x: Tensor, qr: Tensor, bounds: PackedBounds) -> "Indexed":
        """The indexer's queries, keys and weights, from the inputs of this rank's own tokens."""
        assert bounds.lengths is not None
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        first = tp.rank() * len(x) if self._shares_tokens else 0
        own = range(first, first + len(x))
        factors = self.linear_q_up_proj.layer_norm_weight.detach()
        normed = rms_norm(qr, factors, self.config.layernorm_epsilon)
        rotary = self.rotary_pos_emb(bounds.max_seqlen_q, packed_seq=True)
        angles, factor = rotary if isinstance(rotary, tuple) else (rotary, 1.0)
        positions = bounds.cu_seqlens_q.positions[own.start : own.stop]
        queries, keys, weights = project(
            self.indexer, x, normed, positions, angles, factor, self.choice.interleaved
        )
        # In the backward pass their gradients are summed over the ranks that have queries.
        if self._shares_tokens:
            keys = gather_from_sequence_parallel_region(keys, tensor_parallel_output_grad=True, group=tp)
        if cp.size() > 1:
            keys = torch.cat(gather_sequences(keys, bounds.lengths, cp))
        return Indexed(queries, keys, weights, own)

    def _lesson(self, indexed: "Indexed", chosen: Tensor, bounds: PackedBounds) -> Lesson:
        predicts = self.choice.layer - self.config.num_layers
        return Lesson(
            *(part.detach() for part in (indexed.queries, indexed.keys, indexed.weights)),
            own=indexed.own,
            chosen=chosen,
            counts=counted(bounds, predicts if predicts >= 0 else None),
            texts=teaching_texts(bounds, self.choice.topk),
            topk=self.choice.topk,
            heads=self.config.num_attention_heads,
            group=self.pg_collection.tp,
        )


class Indexed(NamedTuple):
    """An indexer's queries [this rank's tokens, heads, dim] and their weights [this rank's tokens, heads], the keys of the tokens of all context
    parallel ranks [tokens, dim], and which tokens of its context parallel rank this rank's are."""

    queries: Tensor
    keys: Tensor
    weights: Tensor
    own: range


class ChosenAttention(torch.autograd.Function):
    """Attention to chosen keys. Its backward pass makes the scores anew, from the rows' sums (Dao et al. 2022, arXiv:2205.14135,
    algorithm 4)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        chosen: Tensor,
        runs: Sequence[Run],
        topk: int,
        scale: float,
        lesson: Lesson | None = None,
    ) -> Tensor:
        """query: [tokens, heads, dim]; key, value: [tokens of all context parallel ranks, heads, dim]; chosen: as `choose_keys` -> [tokens, heads,
        value dim]. An indexer learns in `lesson`."""
        output = query.new_empty((*query.shape[:2], value.shape[2]))
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        for part in _parts(runs, query.shape[1]):
            # In place, unlike logsumexp: no second tensor of the scores' size, and this part's are gone when the next part's are made.
            scores = _scores(query, key, chosen, part, topk, scale)
            highest = scores.amax(-1, keepdim=True)
            total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
            sums[part.rows] = (highest + total.log()).squeeze(-1).T
            weights = scores.div_(total)
            del scores
            if lesson is not None:
                lesson.add(part, weights)
            output[part.rows] = torch.einsum("hqk,khd->qhd", weights.to(value.dtype), value[part.keys])
            del weights
        ctx.save_for_backward(query, key, value, chosen, output, sums)
        ctx.facts = runs, topk, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, chosen, output, sums = ctx.saved_tensors
        runs, topk, scale = ctx.facts
        grads = [torch.zeros_like(part, dtype=torch.float32) for part in (key, value)]
        grad_query = torch.empty_like(query)
        along = (grad.float() * output.float()).sum(-1)  # [tokens, heads]
        for part in _parts(runs, query.shape[1]):
            rows, keys = part.rows, part.keys
            weights = _scores(query, key, chosen, part, topk, scale).sub_(sums[rows].T[..., None]).exp_()
            grads[1][keys] += torch.einsum("hqk,qhd->khd", weights.to(grad.dtype), grad[rows])
            grad_scores = torch.einsum("qhd,khd->hqk", grad[rows], value[keys]).float()
            grad_scores = grad_scores.sub_(along[rows].T[..., None]).mul_(weights).mul_(scale).to(query.dtype)
            grad_query[rows] = torch.einsum("hqk,khd->qhd", grad_scores, key[keys])
            del weights
            grads[0][keys] += torch.einsum("hqk,qhd->khd", grad_scores, query[rows])
            del grad_scores
        return grad_query, grads[0].to(key.dtype), grads[1].to(value.dtype), *[None] * 5


def _parts(runs: Sequence[Run], heads: int) -> list[Run]:
    return [part for run in runs for part in run.cut(heads)]


def _scores(query: Tensor, key: Tensor, chosen: Tensor, part: Run, topk: int, scale: float) -> Tensor:
    """float32 [heads, queries of the part, keys]; -inf where a key is not attended to."""
    queries, keys = query[part.rows].transpose(0, 1), key[part.keys].permute(1, 2, 0)
    if query.is_cuda and query.dtype != torch.float32:
        scores = torch.bmm(queries, keys, out_dtype=torch.float32)
    else:
        scores = torch.bmm(queries.float(), keys.float())
    return scores.mul_(scale).masked_fill_(hidden_keys(chosen, part, topk), -torch.inf)
