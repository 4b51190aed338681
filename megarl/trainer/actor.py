"""The actor's ranks: log-probabilities, policy updates, and the policy's weights for the engines."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import torch

from megarl.algorithms.aggregate import LossCounts, token_weights
from megarl.algorithms.policy_loss import PolicyLossOptions, PolicyTokens, actor_loss
from megarl.cluster.worker import RankInfo
from megarl.data.trajectories import append_column, ragged, take
from megarl.hybrid_engine import Packet, SyncPlan
from megarl.megatron.build import local_parameters
from megarl.megatron.packed import PackedBatch
from megarl.trainer.model_worker import ModelWorker, RowColumns, Share
from megarl.trainer.specs import ModelSpec


class ActorWorker(ModelWorker):
    """A rank of the policy; with `reference_path` also of the reference policy in the same layout."""

    def __init__(
        self,
        info: RankInfo,
        spec: ModelSpec,
        temperature: float,
        reference_path: str | None = None,
        sync: SyncPlan | None = None,
    ) -> None:
        super().__init__(info, spec)
        self.temperature, self.sync = temperature, sync
        self.reference = (
            self.load(reference_path, "lm", trainable=False) if reference_path is not None else None
        )

    def compute_log_probs(self, table: pa.Table, shares: list[Share], column: str) -> RowColumns | None:
        """The policy's log-probs of the responses as `column`, at the sampling temperature."""
        return self._log_probs(self.chunks, table, shares, column)

    def compute_ref_log_probs(self, table: pa.Table, shares: list[Share], column: str) -> RowColumns | None:
        """The reference's log-probs of the responses as `column`, at the sampling temperature."""
        assert self.reference is not None
        return self._log_probs(self.reference, table, shares, column)

    def _log_probs(
        self, chunks: list[torch.nn.Module], table: pa.Table, shares: list[Share], column: str
    ) -> RowColumns | None:
        share = shares[self.coords.dp]
        batches = self.pack_share(table, share)
        return self.forward_columns(
            chunks, batches, share, self.lm_head(temperature=self.temperature), [column]
        )

    def update_policy(
        self,
        table: pa.Table,
        plan: list[list[Share]],
        counts: list[LossCounts],
        loss_agg_mode: str,
        options: PolicyLossOptions,
    ) -> list[dict[str, float]]:
        """One optimizer step for each mini-batch of `plan`; returns each step's sums, gradient norm and lr.

        Args:
            plan: by mini-batch, by data parallel rank, the rows of each micro-batch.
            counts: by mini-batch, what all of it holds.
        """
        head = self.lm_head(temperature=self.temperature, with_entropy=True)
        fields = ["old_log_probs", "advantages", "loss_weights"]
        if options.kl_kind is not None:
            fields.append("ref_log_probs")

        def loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            tokens = PolicyTokens(
                mask=batch.mask,
                weights=batch.fields["loss_weights"],
                old_log_probs=batch.fields["old_log_probs"],
                advantages=batch.fields["advantages"],
                ref_log_probs=batch.fields.get("ref_log_probs"),
            )
            return actor_loss(output[:, 0], output[:, 1], tokens, options)

        steps = []
        for shares, count in zip(plan, counts, strict=True):
            batches = pack_weighted(self, table, shares[self.coords.dp], fields, loss_agg_mode, count)
            result = self.train(batches, head, loss)
            steps.append({**result.stats, "grad_norm": result.grad_norm, "lr": result.lr})
        return steps

    def pack_weights(self, bucket: int) -> tuple[int, list[Packet]]:
        """What this rank sends of a bucket: how many bytes, and a packet for each engine rank."""
        assert self.sync is not None
        packets = self.sync.pack(bucket, self.info.rank, local_parameters(self.chunks))
        return sum(packet.data.nbytes for packet in packets), packets


def pack_weighted(
    worker: ModelWorker,
    table: pa.Table,
    share: Share,
    fields: Sequence[str],
    loss_agg_mode: str,
    counts: LossCounts,
) -> list[PackedBatch]:
    """Pack a share with each token's weight in the mini-batch's loss as the field `loss_weights`."""
    rows = [row for micro in share for row in micro]
    local = take(table, rows)
    mask, offsets = ragged(local, "response_mask")
    weights = token_weights(loss_agg_mode, torch.tensor(mask), torch.from_numpy(offsets), counts)
    local = append_column(local, "loss_weights", (weights.numpy(), offsets))
    starts = iter(range(len(rows)))
    renumbered = [[next(starts) for _ in micro] for micro in share]
    return worker.pack_share(local, renumbered, fields)
