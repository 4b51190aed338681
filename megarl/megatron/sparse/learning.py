"""What indexers learn: to score the chosen keys of a query as the attention of their layer weighs them.

DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv:2512.02556), section 2.1, the stage of sparse training: L = sum over queries t of
KL(p_t || softmax(I_t)), both over the keys S_t that are chosen for t. I are an indexer's scores; p is the sum over all heads of attention's
probabilities, made to sum to 1. An indexer's inputs and p are constants: it learns from this loss alone, and the rest of the model from its own.

The gradient of the loss with respect to the scores is softmax(I_t) - p_t. It is computed part by part where the forward pass of attention
has the probabilities, and so are the gradients of the indexer's queries, keys and weights, which alone are kept.

Guarantees:
- Queries of texts of more than `topk` tokens teach, those at positions whose prediction counts. Shorter texts do not, whatever they are packed
  with: gradients do not depend on how a batch is cut into micro-batches.
- Losses and gradients are the formula's in every layout: probabilities are summed over tensor parallel ranks' heads, gradients of keys over
  all ranks that have queries of their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megarl import platform
from megarl.megatron.packing import PackedBounds
from megarl.megatron.sparse.indexer import attentions_with_indexers
from megarl.megatron.sparse.selection import Run, head_scores, hidden_keys


class IndexerLoss:
    """The loss of the indexers of a rank's layers, which are parameters."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        """
        Args:
            chunks: without their wrapping.
        """
        self._weight = 0.0
        self._sums = torch.zeros(2, dtype=torch.float64, device=platform.device())
        for chunk in chunks:
            for attention in attentions_with_indexers(chunk):
                attention.indexer_loss = self

    def begin(self, weight: float) -> None:
        """Before an update: set the weight of a query's divergence in a layer, and forget the sums of another update.

        Args:
            weight: the coefficient over the number of tokens that the update learns from, on all ranks.
        """
        assert weight > 0.0, weight
        self._weight = weight
        self._sums.zero_()

    def sums(self, prefix: str) -> dict[str, float]:
        """The update's sums over all layers with an indexer: the divergence in nats, without the coefficient, and the queries that taught.
        Collective over all ranks, which get the same.

        Args:
            prefix: of the names.
        """
        sums = self._sums.clone()
        dist.all_reduce(sums)
        total, count = sums.tolist()
        return {f"{prefix}indexer_loss": total, f"{prefix}indexer_tokens": count}

    def add_to(
        self, output: Tensor, lesson: Lesson, queries: Tensor, keys: Tensor, weights: Tensor
    ) -> Tensor:
        """Attention's output, whose backward pass also runs the one of a lesson's loss."""
        assert self._weight, "begin was called"
        self._sums += lesson.sums
        loss = _Learnt.apply(queries, keys, weights, lesson)
        return MoEAuxLossAutoScaler.apply(output, loss * self._weight)


@dataclass
class Lesson:
    """A pass of a layer's attention, from which its indexer learns.

    Attributes:
        queries: [this rank's tokens, heads, dim], of the indexer. weights: [this rank's tokens, heads].
        keys: [tokens of all context parallel ranks, dim].
        own: this rank's tokens among those of its context parallel rank, which tensor parallel ranks share with sequence parallelism.
        chosen: as `choose_keys`, of all the context parallel rank's tokens.
        counts: bool [the same]; whether the prediction at a position counts.
        texts: where texts that teach begin, among all tokens (`Run.start`).
        topk: how many keys are chosen for a query.
        heads: of attention, on all ranks.
        group: tensor parallel ranks.
        sums: of this rank's queries so far, the divergence, and how many of them count.
        grads: of the divergence with respect to queries, keys and weights, so far.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor
    own: range
    chosen: Tensor
    counts: Tensor
    texts: frozenset[int]
    topk: int
    heads: int
    group: dist.ProcessGroup
    sums: Tensor = field(init=False)
    grads: tuple[Tensor, Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.sums = self.queries.new_zeros(2, dtype=torch.float32)
        # Not scaled yet: float16 would lose them.
        half = self.queries.dtype == torch.float16
        self.grads = (
            torch.zeros_like(self.queries, dtype=torch.float32 if half else None),
            torch.zeros_like(self.keys, dtype=torch.float32),
            torch.zeros_like(self.weights),
        )

    def add(self, part: Run, weights: Tensor) -> None:
        """Learn from some queries of a text, if it teaches. Collective over tensor parallel ranks.

        Args:
            weights: float32 [this rank's heads, queries of the part, keys], attention's probabilities.
        """
        if part.start not in self.texts:
            return
        attended = weights.sum(0)
        if self.group.size() > 1:
            dist.all_reduce(attended, group=self.group)
        attended.div_(self.heads)
        own = part.within(self.own)
        if own is None:
            return
        for small in own.cut(self.queries.shape[1]):
            first = small.row - part.row
            self._learn(small, attended[first : first + small.count, : small.end])

    def _learn(self, part: Run, attended: Tensor) -> None:
        rows = slice(part.row - self.own.start, part.row - self.own.start + part.count)
        queries, weights, keys = self.queries[rows], self.weights[rows], self.keys[part.keys]
        of_heads = head_scores(queries, keys)
        hidden = hidden_keys(self.chosen, part, self.topk)
        scores = torch.einsum("rhk,rh->rk", of_heads, weights).masked_fill_(hidden, -torch.inf)
        log_q = scores.log_softmax(-1)
        counts = self.counts[part.rows].float()
        along = attended.xlogy(attended) - attended * log_q.masked_fill(hidden, 0.0)
        self.sums += torch.stack([(along.sum(-1) * counts).sum(), counts.sum()])
        grad = log_q.exp_().sub_(attended).mul_(counts[:, None])
        self.grads[2][rows] = torch.einsum("rk,rhk->rh", grad, of_heads)
        # Gradients of the products: there is none where a head's score is 0.
        of_heads.sign_().mul_(grad[:, None]).mul_(weights[..., None])
        dtype = self.grads[0].dtype
        grad_products = of_heads.flatten(0, 1).to(dtype)
        self.grads[0][rows] = (grad_products @ keys.to(dtype)).unflatten(0, queries.shape[:2])
        self.grads[1][part.keys] += grad_products.T @ queries.flatten(0, 1).to(dtype)


class _Learnt(torch.autograd.Function):
    """The divergence of a lesson, whose gradients are computed already."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, weights: Tensor, lesson: Lesson) -> Tensor:
        grad_queries, grad_keys, grad_weights = lesson.grads
        ctx.save_for_backward(grad_queries, grad_keys.to(grad_queries.dtype), grad_weights)
        ctx.dtypes = queries.dtype, keys.dtype, weights.dtype
        return lesson.sums[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in float32: in a large batch a token's weight alone is smaller than any float16.
        parts = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((grad * part.float()).to(dtype) for part, dtype in parts), None


class Untaught(torch.autograd.Function):
    """Attention's output of a pass from which an indexer learns nothing, with zeros as its gradients.

    Megatron reduces the gradients of a bucket when all of its weights have had theirs (`overlap_grad_reduce`).
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, ctx.saved_tensors)


def teaching_texts(bounds: PackedBounds, topk: int) -> frozenset[int]:
    """Where the texts of more than `topk` tokens begin, among the tokens of all context parallel ranks."""
    assert bounds.lengths is not None and bounds.texts is not None
    found, start = set(), 0
    for aligned, length in zip(bounds.lengths, bounds.texts, strict=True):
        if length > topk:
            found.add(start)
        start += aligned
    return frozenset(found)


def counted(bounds: PackedBounds, predicts: int | None) -> Tensor:
    """bool [tokens of this context parallel rank]: at which positions the prediction counts.

    Args:
        predicts: the number of the layer among those of multi-token prediction; None: it is not one of them.
    """
    assert bounds.mask is not None
    if predicts is None:
        return bounds.mask
    assert bounds.later_live is not None
    return torch.zeros_like(bounds.mask).index_fill_(0, bounds.later_live[predicts], True)
