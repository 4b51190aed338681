"""The actor's ranks: log-probabilities, policy updates, and the policy's weights for the engines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch

from megarl import platform
from megarl.algorithms.aggregate import LossAggregation, LossCounts, token_weights
from megarl.algorithms.kl import FULL_KL, TOP_K
from megarl.algorithms.metrics import RolloutDifference, reported_difference
from megarl.algorithms.policy_loss import ClipCov, KLCov, PolicyTokens, Sequences, actor_loss, select_tokens
from megarl.cluster.ranks import RankInfo
from megarl.data.trajectories import GIVEN, REF_TOP_TOKENS, TEACHER, append_column, ragged, take
from megarl.megatron.build import gather_parameters, unwrap
from megarl.megatron.expert_load import ExpertLoads, violations
from megarl.megatron.fsdp import release
from megarl.megatron.heads.outputs import head_weight, hidden_head
from megarl.megatron.lora.lora import only_adapters
from megarl.megatron.lora.merged import ExactWeights
from megarl.megatron.offload import assert_resident, weights_of
from megarl.megatron.packing import MicroBatches, OtherHead, PackedBatch
from megarl.megatron.parallel import context_parallel_group
from megarl.megatron.router_replay import take_counts
from megarl.megatron.router_z_loss import RouterZLoss
from megarl.megatron.sequences import sequence_ids, sum_over_ranks
from megarl.megatron.step import forward_only
from megarl.models import read_model_config
from megarl.trainer.workers.dispatch import (
    ENGINES,
    EXPERT_VIOLATION,
    ROUTER_Z_LOSS,
    ModelSpec,
    PolicyUpdate,
    RowColumns,
    columns_of,
)
from megarl.trainer.workers.model import ModelWorker, Share
from megarl.trainer.workers.nonfinite_source import trajectory_names
from megarl.trainer.workers.ptx import PtxUpdate, pack_ptx, with_ptx
from megarl.weight_sync.packets import Address, SyncShare
from megarl.weight_sync.sender import Outbox, SendReport, Slots

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


OWN, JUDGE = "own", "judge"  # columns and fields: see `with_own_tokens`, `with_judges`
SELECTED_BY = ("old_log_probs", "advantages", "response_mask", OWN)  # columns that `with_selection` reads


class ActorWorker(ModelWorker):
    """A rank of the policy; with `reference_path` also of the reference policy in the same layout.

    With adapters and no path the model without them is the reference: it is there anyway, and nothing is loaded for it.
    """

    sums_prefix = "actor/"

    def __init__(
        self,
        info: RankInfo,
        spec: ModelSpec,
        temperature: float,
        reference_path: str | None = None,
    ) -> None:
        super().__init__(info, spec)
        self.temperature = temperature
        self.loads: ExpertLoads | None = None
        self.z_loss: RouterZLoss | None = None
        if self.config.moe is not None and spec.optim is not None:
            moe, layers = self.config.moe, self.config.num_layers
            self.loads = ExpertLoads(unwrap(self.chunks), layers, moe.num_experts)
            self.z_loss = RouterZLoss(unwrap(self.chunks))
        # By the role of the engines that they send to. The engines of each role map slots of their own.
        self.outboxes: dict[str, Outbox] = {}
        self.slots: dict[str, Slots] = {}
        self.reference: list[GPTModel] | None = None
        self.reference_config = self.config
        if reference_path is not None:
            self.reference_config = read_model_config(reference_path)
            self.reference = self.load(reference_path, "lm", trainable=False)
            self.parts["reference"] = weights_of(self.reference, constant=True)
        elif spec.adapted:
            self.reference = unwrap(self.chunks)

    def memory(self) -> list[dict[str, int]]:
        (found,) = super().memory()
        return [{**found, "sync_buffers": sum(outbox.buffer_bytes for outbox in self.outboxes.values())}]

    def compute_log_probs(self, table: pa.Table, shares: list[Share], column: str) -> RowColumns | None:
        """The policy's log-probs of the responses as `column`, at the sampling temperature; where the updates are to replay its routers'
        choices, the choices as ROUTED_EXPERTS."""
        head = self.lm_head(temperature=self.temperature)
        return self.compute_columns(table, shares, self._pack_policy, head, [column], record=self._records)

    def compute_ref_log_probs(self, table: pa.Table, shares: list[Share], column: str) -> RowColumns | None:
        """The reference's log-probs of the responses as `column`, at the sampling temperature; its routers choose experts themselves."""
        assert self.reference is not None
        head = self.lm_head(self.reference_config.vocab_size, temperature=self.temperature)
        pack = partial(self.pack_share, replayed=False)
        with self._without_adapters():
            return self.compute_columns(table, shares, pack, head, [column], self.reference)

    def compute_ref_top_tokens(self, table: pa.Table, shares: list[Share], count: int) -> RowColumns | None:
        """`compute_ref_log_probs` as `ref_log_probs`, and the `count` most likely tokens at each position as REF_TOP_TOKENS; a worker without a
        reference is the reference itself."""
        config = self.config if self.reference is None else self.reference_config
        head = self.lm_head(config.vocab_size, temperature=self.temperature, top=count)
        pack = partial(self.pack_share, replayed=False)
        with nullcontext() if self.reference is None else self._without_adapters():
            names = ["ref_log_probs"]
            return self.compute_columns(table, shares, pack, head, names, self.reference, rest=REF_TOP_TOKENS)

    def compute_both_log_probs(
        self, table: pa.Table, shares: list[Share], ref_shares: list[Share]
    ) -> tuple[RowColumns, RowColumns] | None:
        """`compute_log_probs` as `old_log_probs`, and then `compute_ref_log_probs` as `ref_log_probs`."""
        policy = self.compute_log_probs(table, shares, "old_log_probs")
        reference = self.compute_ref_log_probs(table, ref_shares, "ref_log_probs")
        return None if policy is None or reference is None else (policy, reference)

    def compute_full_kl(self, table: pa.Table, shares: list[Share], column: str) -> RowColumns | None:
        """The policy's log-probs of the responses as `column`, the exact KL to the reference at each token as `full_kl` and
        the reference's log-probs as `ref_log_probs`, all at the sampling temperature."""
        head = self.lm_head(temperature=self.temperature)
        names, pack = [column, "full_kl", "ref_log_probs"], self._pack_with_reference
        return self.compute_columns(table, shares, pack, head, names, record=self._records)

    @property
    def _records(self) -> bool:
        """Whether the pass for old log-probs records the routers' choices, for the updates to replay."""
        return self.spec.router_replay == "trainer"

    def _pack_policy(self, table: pa.Table, share: Share) -> MicroBatches:
        return self.pack_share(table, share, replayed=not self._records)

    def _pack_with_reference(self, table: pa.Table, share: Share) -> Sequence[PackedBatch]:
        return self.with_reference_head(self._pack_policy(table, share))

    def with_reference_head(self, batches: Sequence[PackedBatch], beta: float = 1.0) -> Sequence[PackedBatch]:
        """The batches with the reference's hidden states and head, from which the exact divergence from the reference (of `beta`) is
        computed together with the log-probs."""
        assert self.reference is not None
        assert_resident(self.reference)
        # The reference's routers choose experts themselves, also where it is the policy's own model without adapters.
        unrouted = [replace(batch, experts=None, is_routed=None) for batch in batches]
        with self._without_adapters():
            hidden = forward_only(self.reference, unrouted, hidden_head)
        if self.coords.pp != self.layout.pp - 1:
            return batches
        weight = head_weight(self.reference[-1])
        return [
            replace(batch, other=OtherHead(states, weight, beta))
            for batch, states in zip(batches, hidden, strict=True)
        ]

    def _without_adapters(self) -> AbstractContextManager[None]:
        """While this is active, the model with adapters is the reference."""
        return nullcontext() if "reference" in self.parts else only_adapters(self.reference, None)

    def update_policy(
        self,
        table: pa.Table,
        plan: list[list[Share]],
        counts: list[LossCounts],
        how: PolicyUpdate,
        examples: pa.Table | None = None,
        ptx: PtxUpdate | None = None,
    ) -> list[dict[str, float]]:
        """One optimizer step for each mini-batch of `plan`; returns each step's sums, gradient norm and lr.

        A mini-batch without a live token is skipped. Mini-batches after one whose ppo_kl is over `how.target_kl` (measured before its
        own step) are skipped, too; the last step then has `stopped_early` 1.

        Without old log-probs, where `plan` is one mini-batch, the log-probs of its own forward pass are the old ones, and its step has
        the metrics of `rollout_difference`.

        Args:
            plan: by mini-batch, by data parallel rank, the rows of each micro-batch.
            counts: by mini-batch, its live tokens and trajectories on all ranks.
            examples: of the auxiliary language-model loss, distributed as `ptx` says; None: there is no such loss.
        """
        head = self.lm_head(temperature=self.temperature, with_entropy=True, beta=how.options.kl_beta)
        first = RolloutDifference() if "old_log_probs" not in table.column_names else None
        assert first is None or len(plan) == 1, "later updates need the log-probs from before the first"
        old = "old_log_probs" if first is None else "rollout_log_probs"
        # The columns that the losses of this configuration read, packed with each micro-batch.
        fields = [old, "advantages", "loss_weights"]
        full_kl, top = how.options.kl_kind == FULL_KL, how.options.kl_kind == TOP_K
        if how.options.kl_kind is not None and not full_kl:
            fields.append(REF_TOP_TOKENS if top else "ref_log_probs")
        if "rollout_is_weights" in table.column_names:
            fields.append("rollout_is_weights")
        if how.select is not None:
            fields.append("selected")
        table = with_own_tokens(table)
        if OWN in table.column_names:
            fields.append(OWN)
        judges: tuple[str, ...] = ()
        if how.options.kl_kind is not None and TEACHER in table.column_names:
            table, judges = with_judges(table)
            fields.append(JUDGE)

        def loss(output: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            log_probs = output[:, 0]
            own = batch.fields[OWN] > 0 if OWN in batch.fields else None
            tokens = PolicyTokens(
                mask=batch.mask,
                weights=batch.fields["loss_weights"],
                old_log_probs=batch.fields[old] if first is None else log_probs.detach(),
                advantages=batch.fields["advantages"],
                ref_log_probs=batch.fields.get("ref_log_probs"),
                full_kl=output[:, 2] if full_kl or top else None,
                rollout_is_weights=batch.fields.get("rollout_is_weights"),
                selected=batch.fields["selected"] > 0 if how.select is not None else None,
                sequences=trajectories_of(batch),
                own=own,
                judges=batch.fields.get(JUDGE),
                judge_names=judges,
            )
            value, sums = actor_loss(log_probs, output[:, 1], tokens, how.options)
            if first is not None:
                sampled = batch.mask if own is None else batch.mask & own
                sums |= first.add(log_probs.detach(), batch.fields[old], sampled)
            return value, sums

        head, loss = (head, loss) if ptx is None else with_ptx(head, loss, self.lm_head())
        steps: list[dict[str, float]] = []
        for number, (shares, count) in enumerate(zip(plan, counts, strict=True)):
            if count.tokens == 0:  # the same on all ranks, so that collectives match
                continue
            source = table
            # Tokens are selected over the whole mini-batch, not over this rank's share of it.
            if how.select is not None:
                rows = [row for share in shares for micro in share for row in micro]
                source = with_selection(table, rows, how.select, seed=how.seed * 4096 + number)
            batches = pack_weighted(self, source, shares[self.coords.dp], fields, how.aggregation, count)
            if full_kl:
                batches = self.with_reference_head(batches, how.options.kl_beta)
            if ptx is not None:
                assert examples is not None
                batches = [*batches, *pack_ptx(self, examples, ptx, number)]
            names = partial(trajectory_names, table, shares[self.coords.dp])
            take_counts(self.replays)  # drops the counts of other passes
            if self.loads is not None:
                self.loads.forget()
            learnt = count.tokens + (0 if ptx is None else ptx.counts[number])
            if self.z_loss is not None:
                self.z_loss.begin(how.router_z_loss_coef / learnt)
            result = self.train(batches, head, loss, names, more=True, learnt=learnt)
            routing = self._routing_counts() | self._balance(
                how.expert_bias_update_rate if result.ok else 0.0
            )
            if self.z_loss is not None and how.router_z_loss_coef:
                routing[ROUTER_Z_LOSS] = self.z_loss.mean()
            steps.append({**result.stats, **result.numbers(), **routing})
            if first is not None:
                steps[-1] |= reported_difference(
                    result.stats, largest_on_ranks(first), result.stats["actor/tokens"]
                )
            # All ranks must stop together, or the next collective hangs.
            if how.target_kl is not None:
                # Without a token of the policy's own the KL is 0.
                change = result.stats["actor/ppo_kl"] / max(result.stats["actor/tokens"], 1.0)
                steps[-1]["stopped_early"] = float(on_any_rank(change > how.target_kl))
                if steps[-1]["stopped_early"]:
                    break
        gather_parameters(self.chunks)
        return steps

    def open_outbox(self, share: SyncShare, host: str, timeout: float, to: str = ENGINES) -> Address:
        """Prepare to send this rank's share of the weights to engines; closes an earlier connection with them.

        Args:
            host: this machine's address.
            to: the role of the engines.
        """
        if to in self.outboxes:
            self.outboxes.pop(to).close()
        device = platform.device().type
        slots = self.slots.setdefault(to, Slots(device))
        self.outboxes[to] = Outbox(share, self.info.scratch, host, device, timeout, slots)
        return self.outboxes[to].address

    def join_exchange(self, hub: tuple[str, int], to: str = ENGINES) -> None:
        """Set where the ranks that exchange packets meet (`Address.hub`)."""
        self.outboxes[to].join(hub)

    def send_weights(
        self,
        version: int,
        held: dict[int, int | None] | None,
        *,
        merged: bool = True,
        complete: bool = True,
        to: str = ENGINES,
    ) -> SendReport:
        """Send this rank's share to the engines of the role `to`.

        Args:
            held: the version that each engine rank holds (None: send unchanged slices, too).
            merged: whether adapters are merged into the weights; else they are sent next to the weights.
            complete: whether weights that are not trained are sent.
        """
        tensors = self.trained_tensors() if merged else self.own_tensors()
        computed = tensors.computed() if isinstance(tensors, ExactWeights) else {}
        sent = self.outboxes[to].send(version, tensors, held, complete, computed)
        release(self.chunks)
        return sent

    def _balance(self, rate: float) -> dict[str, float]:
        """How uneven the last step's routing was, by layer ("expert_violation/3"); moves the routers' biases by `rate`."""
        if self.loads is None:
            return {}
        loads = self.loads.take()
        if rate:
            self.loads.balance(loads, rate)
        return {f"{EXPERT_VIOLATION}{layer}": value for layer, value in violations(loads).items()}

    def _routing_counts(self) -> dict[str, float]:
        """Counts over the last step's layers and all ranks: replayed tokens, and how often the router itself chose other experts."""
        if self.routing is None:
            return {}
        counts = take_counts(self.replays).to(platform.device())
        torch.distributed.all_reduce(counts)
        changed, replayed = counts.tolist()
        return {"actor/routing_changed": changed, "actor/routing_replayed": replayed}


def pack_weighted(
    worker: ModelWorker,
    table: pa.Table,
    share: Share,
    fields: Sequence[str],
    aggregation: LossAggregation,
    counts: LossCounts,
) -> Sequence[PackedBatch]:
    """Pack a share with each token's weight in the mini-batch's loss as the field `loss_weights`."""
    rows = [row for micro in share for row in micro]
    local = take(table, rows)
    mask, offsets = ragged(local, "response_mask")
    weights = token_weights(aggregation, torch.tensor(mask), torch.from_numpy(offsets), counts)
    local = append_column(local, "loss_weights", (weights.numpy(), offsets))
    starts = iter(range(len(rows)))
    renumbered = [[next(starts) for _ in micro] for micro in share]
    return worker.pack_share(local, renumbered, fields, learnt=True)


def trajectories_of(batch: PackedBatch) -> Sequences:
    """The trajectories of a micro-batch, also where each context parallel rank holds a part of them."""
    ids, count = sequence_ids(batch), len(batch.lengths)
    if batch.cp == 1:
        return Sequences(ids, count)
    group = context_parallel_group()
    return Sequences(ids, count, lambda total: sum_over_ranks(total, group))


def with_own_tokens(table: pa.Table) -> pa.Table:
    """`table` with the column OWN: 1 on tokens of the policy's own responses, 0 on tokens of given ones; `table` itself without GIVEN."""
    if GIVEN not in table.column_names:
        return table
    _, offsets = ragged(table, "response_mask")
    own = np.repeat(~table[GIVEN].to_numpy(), np.diff(offsets))
    return append_column(table, OWN, (own.astype(np.float32), offsets))


def with_judges(table: pa.Table) -> tuple[pa.Table, tuple[str, ...]]:
    """`table` with the number of the teacher of each token as column JUDGE, and the names of the teachers: the same on all ranks."""
    names, numbers = np.unique(np.array(table[TEACHER].to_pylist()), return_inverse=True)
    _, offsets = ragged(table, "response_mask")
    flat = np.repeat(numbers.astype(np.float32), np.diff(offsets))
    return append_column(table, JUDGE, (flat, offsets)), tuple(names.tolist())


def with_selection(table: pa.Table, rows: Sequence[int], rule: ClipCov | KLCov, seed: int) -> pa.Table:
    """`table` with the tokens that `rule` chooses of the mini-batch `rows` as column `selected`.

    The rows are gone through in the table's order, so that it does not matter how ranks share them.
    """
    chosen = np.sort(np.asarray(rows, dtype=np.int64))
    # Every rank takes the whole mini-batch: without the columns that are not read, of which experts alone are hundreds of bytes a token.
    mini = take(columns_of(table, SELECTED_BY), chosen)
    old, advantages, mask = (
        torch.tensor(ragged(mini, name)[0]) for name in ("old_log_probs", "advantages", "response_mask")
    )
    if OWN in mini.column_names:
        mask &= torch.tensor(ragged(mini, OWN)[0]) > 0
    selected = select_tokens(rule, old, advantages, mask, seed).numpy()
    _, offsets = ragged(table, "response_mask")
    flags = np.zeros(offsets[-1], dtype=np.float32)
    lengths = np.diff(offsets)[chosen]
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    flags[np.repeat(offsets[:-1][chosen], lengths) + within] = selected
    return append_column(table, "selected", (flags, offsets))


def largest_on_ranks(difference: RolloutDifference) -> list[float]:
    """The maximum of `difference.largest` over all ranks."""
    mine = difference.largest
    found = torch.zeros(2, dtype=torch.double, device=platform.device()) if mine is None else mine.clone()
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return found.tolist()


def on_any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank: one answer for all, though sums may differ in their last bit."""
    found = torch.tensor(int(flag), device=platform.device())
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return bool(found)
