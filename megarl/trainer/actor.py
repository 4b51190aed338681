"""The actor's ranks: log-probabilities, policy updates, and the policy's weights for the engines."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import torch

from megarl import platform
from megarl.algorithms.aggregate import LossCounts, token_weights
from megarl.algorithms.policy_loss import PolicyLossOptions, PolicyTokens, actor_loss
from megarl.cluster.worker import RankInfo
from megarl.data.trajectories import append_column, ragged, take
from megarl.hybrid_engine import Outbox, Sent
from megarl.megatron.build import local_parameters
from megarl.megatron.offload import weights_of
from megarl.megatron.packed import PackedBatch
from megarl.rollout.packets import Address, SyncShare
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
    ) -> None:
        super().__init__(info, spec)
        self.temperature = temperature
        self.outbox: Outbox | None = None
        self.reference = (
            self.load(reference_path, "lm", trainable=False) if reference_path is not None else None
        )
        if self.reference is not None:
            self.parts["reference"] = weights_of(self.reference)

    def memory(self) -> list[dict[str, int]]:
        (found,) = super().memory()
        return [{**found, "sync_buffers": self.outbox.buffer_bytes if self.outbox is not None else 0}]

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

    def open_outbox(self, share: SyncShare, host: str, timeout: float) -> Address:
        """Get ready to send this rank's share of the weights to the engines; ends a connection that was there.

        Args:
            host: this machine's address.
        """
        if self.outbox is not None:
            self.outbox.close()
        self.outbox = Outbox(share, self.info.scratch, host, platform.device().type, timeout)
        return self.outbox.address

    def send_weights(self, version: int, held: dict[int, int | None] | None) -> Sent:
        """Send this rank's share; `held`: what each engine rank holds (None: send what has not changed, too)."""
        assert self.outbox is not None
        return self.outbox.send(version, local_parameters(self.chunks), held)


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
