"""The worker of a role as a shadow, and the steps that it takes: its own class and its own calls, except that no weight is read from a file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import torch

from megarl.cluster.ranks import RankInfo
from megarl.config import (
    DPOConfig,
    RMConfig,
    TrainConfig,
    TuningConfig,
    full_kl_in_reward,
    learns_rankings,
    needs_old_log_probs,
    needs_ref_log_probs,
    reference_in_actor,
    references,
    top_k_in_loss,
)
from megarl.config.resolve import least_tokens
from megarl.costs.tensors import ModelUse
from megarl.megatron.step import StepResult
from megarl.plan.inputs import PlanInputs, model_use, tuned_role
from megarl.shadow.batches import Batch, Fill, examples, rankings, trajectories
from megarl.shadow.requests import SHARED
from megarl.trainer.roles.model_roles import (
    actor_arguments,
    critic_spec,
    reference_spec,
    reward_model_spec,
    supervised_spec,
)
from megarl.trainer.stages.advantages import make_controls
from megarl.trainer.stages.updates import policy_update
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.dispatch import ModelSpec
from megarl.trainer.workers.model import ModelWorker
from megarl.trainer.workers.ptx import PtxUpdate
from megarl.trainer.workers.scalar_heads import ActorCriticWorker, CriticWorker, RewardModelWorker
from megarl.trainer.workers.supervised import DPOWorker, RMWorker, SFTWorker

NUM_STEPS = 1_000_000  # of the run that the rank would be of: more than any warm-up
UNKNOWN = 1  # the value assumed for a number that no operation of a shadow knows (`Shadow.assume`)

Config = TrainConfig | TuningConfig


class _SingleRank:
    """A rank whose tensors are not filled, and which gets no sums from a last stage."""

    def read_weights(self, *given: Any, **named: Any) -> None: ...

    def read_value_head(self, path: str, weight: torch.Tensor) -> None: ...

    def train(self, *given: Any, **named: Any) -> StepResult:
        result = super().train(*given, **named)  # type: ignore[misc]
        return result if result.stats else replace(result, stats=defaultdict(lambda: float(UNKNOWN)))


class ShadowActor(_SingleRank, ActorWorker): ...


class ShadowCritic(_SingleRank, CriticWorker): ...


class ShadowActorCritic(_SingleRank, ActorCriticWorker):
    critic_class = ShadowCritic


class ShadowRewardModel(_SingleRank, RewardModelWorker): ...


class ShadowSFT(_SingleRank, SFTWorker):
    def train(self, *given: Any, **named: Any) -> StepResult:
        result = super().train(*given, **named)
        # A rank alone has only its own part of the sum over all ranks, which is compared with the expected count.
        result.stats["tokens"] = float(UNKNOWN)
        return result


class ShadowRM(_SingleRank, RMWorker):
    def load(self, path: str, head: str, *, trainable: bool) -> list[torch.nn.Module]:
        # The head's first values take no memory.
        return ModelWorker.load(self, path, head, trainable=trainable)


class ShadowDPO(_SingleRank, DPOWorker): ...


@dataclass(frozen=True)
class Step:
    """A call of a rank, with one batch.

    Attributes:
        name: "evaluate", "first_update" (which makes the optimizer's states) or "update"; of a critic in the actor's processes
            with `SHARED` before it.
        received: the shape of the hidden states that pipeline stages send each other: [tokens, 1, hidden].
    """

    name: str
    run: Callable[[], Any]
    received: tuple[int, int, int]


def build_worker(config: Config, role: str, rank: int, world_size: int) -> ModelWorker:
    info = RankInfo(rank, world_size, 0, "127.0.0.1", 1, role, "", ("0",), "")
    if isinstance(config, TuningConfig):
        head = "value" if tuned_role(config) == "rm" else "lm"
        spec = _unread(supervised_spec(config, head, NUM_STEPS))
        if isinstance(config, RMConfig):
            return ShadowRM(info, spec, config.model.head_init)
        return (ShadowSFT if role == "sft" else ShadowDPO)(info, spec)
    if role == "critic":
        return ShadowCritic(info, _unread(critic_spec(config, NUM_STEPS)))
    if role in references(config):
        temperature = config.actor_rollout_ref.rollout.temperature
        return ShadowActor(info, _unread(reference_spec(config, role)), temperature)
    if role == "reward_model":
        return ShadowRewardModel(info, _unread(reward_model_spec(config)))
    arguments = actor_arguments(config, NUM_STEPS)
    specs = {name: _unread(arguments[name]) for name in ("spec", "critic") if name in arguments}
    return (ShadowActorCritic if "critic" in specs else ShadowActor)(info, **{**arguments, **specs})


def _unread(spec: ModelSpec) -> ModelSpec:
    """A spec whose adapters begin anew: no file of them is read."""
    return replace(spec, lora=replace(spec.lora, adapter_path=None), plugins=())


def steps_of(
    config: Config,
    inputs: PlanInputs,
    worker: ModelWorker,
    role: str,
    micro_batches: int | None,
    uneven: bool = False,
) -> Iterator[Step]:
    """The steps of a rank in their order.

    Args:
        micro_batches: of evaluations and the second update; None: as many as the pipeline has stages.
        uneven: whether data parallel ranks have trajectories of their own, of several lengths.
    """
    use = model_use(config, inputs, role)
    number = micro_batches or use.layout.pp
    fills = _fills(config, use, role, uneven)
    if isinstance(config, TuningConfig):
        yield from _tuning_steps(config, worker, fills, number)
    elif isinstance(worker, RewardModelWorker):
        yield _scores(worker, fills.evaluated, number)
    elif isinstance(worker, CriticWorker):
        yield from _critic_steps(config, worker, worker, fills, number)
    elif role in references(config):
        assert isinstance(worker, ActorWorker)
        batch, _ = trajectories(config, fills.evaluated, number)
        yield Step(
            "evaluate",
            lambda: _evaluate_reference(config, worker, batch),
            _received(worker, worker.pack_share, batch),
        )
    else:
        assert isinstance(worker, ActorWorker)
        yield from _actor_steps(config, worker, fills, number)
        if isinstance(worker, ActorCriticWorker):
            fills = _fills(config, model_use(config, inputs, "critic"), "critic", uneven)
            for step in _critic_steps(config, worker, worker.critic, fills, number):
                yield replace(step, name=f"{SHARED}{step.name}")


@dataclass(frozen=True)
class _MicroBatchFills:
    """How a role's micro-batches are filled, without gradients and with them."""

    evaluated: Fill
    trained: Fill


def _fills(config: Config, use: ModelUse, role: str, uneven: bool) -> _MicroBatchFills:
    if isinstance(config, TuningConfig):
        longest = config.data.max_length
    else:
        longest = config.data.max_prompt_length + config.data.max_response_length
        if role == "reward_model":
            longest = config.reward_model.max_length or longest
    dp = use.layout.dp
    return _MicroBatchFills(Fill(use.evaluated, longest, dp, uneven), Fill(use.tokens, longest, dp, uneven))


def _received(
    worker: ModelWorker, pack: Callable[[pa.Table, list[list[int]]], list[Any]], batch: Batch
) -> tuple[int, int, int]:
    (packed,) = pack(batch.table, batch.shares[0][:1])
    layout = worker.layout
    return packed.num_tokens // (layout.tp if layout.sp else 1), 1, worker.config.hidden_size


def _updates(worker: ModelWorker, number: int) -> tuple[tuple[str, int], ...]:
    """Names, and micro-batches: virtual stages take turns with as many as there are stages."""
    return ("first_update", worker.layout.pp if worker.layout.vpp else 1), ("update", number)


def _actor_steps(
    config: TrainConfig, worker: ActorWorker, fills: _MicroBatchFills, number: int
) -> Iterator[Step]:
    how = policy_update(
        config.actor_rollout_ref.actor,
        make_controls(config.algorithm, config.actor_rollout_ref.actor, NUM_STEPS),
        seed=0,
    )
    batch, _ = trajectories(config, fills.evaluated, number)
    received = _received(worker, worker.pack_share, batch)
    yield Step("evaluate", lambda: _evaluate_actor(config, worker, batch), received)
    for name, count in _updates(worker, number):
        update, counts = trajectories(config, fills.trained, count)
        call = (update.table, [update.shares], [counts], how, *_ptx_arguments(config, fills.trained))
        received = _received(worker, worker.pack_share, update)
        yield Step(name, lambda call=call: worker.update_policy(*call), received)


def _evaluate_actor(config: TrainConfig, worker: ActorWorker, batch: Batch) -> None:
    """The computations of a step before its updates, by the policy and a reference in its processes; where there are none, the
    policy's log-probs."""
    table, shares = batch.table, batch.shares
    reference = worker.reference is not None and needs_ref_log_probs(config) and reference_in_actor(config)
    if full_kl_in_reward(config) and worker.reference is not None:
        worker.compute_full_kl(table, shares, "old_log_probs")
    elif reference and top_k_in_loss(config):
        if needs_old_log_probs(config):
            worker.compute_log_probs(table, shares, "old_log_probs")
        _evaluate_reference(config, worker, batch)
    elif reference and needs_old_log_probs(config):
        worker.compute_both_log_probs(table, shares, shares)
    elif reference:
        _evaluate_reference(config, worker, batch)
    else:
        worker.compute_log_probs(table, shares, "old_log_probs")


def _evaluate_reference(config: TrainConfig, worker: ActorWorker, batch: Batch) -> None:
    """The computations of a reference by itself."""
    if top_k_in_loss(config):
        worker.compute_ref_top_tokens(batch.table, batch.shares, config.actor_rollout_ref.actor.kl_loss_top_k)
    else:
        method = worker.compute_log_probs if worker.reference is None else worker.compute_ref_log_probs
        method(batch.table, batch.shares, "ref_log_probs")


def _ptx_arguments(config: TrainConfig, fill: Fill) -> tuple[pa.Table, PtxUpdate] | tuple[()]:
    """Arguments of an update with the auxiliary language-model loss (PPO-ptx): a micro-batch of its texts; none without it."""
    ptx = config.data.ptx
    if ptx is None:
        return ()
    batch = examples(replace(fill, longest=ptx.max_length), 1)
    return batch.table, PtxUpdate([batch.shares], [UNKNOWN], config.actor_rollout_ref.actor.ptx_coef)


def _critic_steps(
    config: TrainConfig,
    worker: CriticWorker | ActorCriticWorker,
    critic: CriticWorker,
    fills: _MicroBatchFills,
    number: int,
) -> Iterator[Step]:
    """`worker`: the one that is called, which is the actor where the critic is on its model."""
    section = config.critic
    assert section is not None
    aggregation = policy_update(
        config.actor_rollout_ref.actor,
        make_controls(config.algorithm, config.actor_rollout_ref.actor, NUM_STEPS),
        seed=0,
    ).aggregation
    batch, _ = trajectories(config, fills.evaluated, number)
    received = _received(critic, critic.pack_share, batch)
    yield Step("evaluate", lambda: worker.compute_values(batch.table, batch.shares), received)
    for name, count in _updates(worker, number):
        update, counts = trajectories(config, fills.trained, count)
        how = (aggregation, section.cliprange_value, section.vf_coef)
        call = (update.table, [update.shares], [counts], *how)
        received = _received(critic, critic.pack_share, update)
        yield Step(name, lambda call=call: worker.update_values(*call), received)


def _scores(worker: RewardModelWorker, fill: Fill, number: int) -> Step:
    batch = examples(fill, number)
    received = _received(worker, worker.pack_texts, batch)
    return Step("evaluate", lambda: worker.score_texts(batch.table, batch.shares), received)


def _tuning_steps(
    config: TuningConfig, worker: ModelWorker, fills: _MicroBatchFills, number: int
) -> Iterator[Step]:
    alone = examples(fills.evaluated, number)
    received = _received(worker, worker.pack_examples, alone)
    if isinstance(worker, RMWorker):
        yield _scores(worker, fills.evaluated, number)
    elif isinstance(worker, DPOWorker):
        yield Step("evaluate", lambda: worker.token_log_probs(alone.table, alone.shares), received)
    elif config.data.val_files is not None:
        assert isinstance(worker, SFTWorker)
        yield Step("evaluate", lambda: worker.sum_losses(alone.table, alone.shares), received)
    fill = replace(fills.trained, of=least_tokens(config) // config.data.max_length)
    for name, count in _updates(worker, number):
        batch = rankings(fill, count) if learns_rankings(config) else examples(fill, count)
        yield Step(name, lambda batch=batch: _fit(config, worker, batch), received)


def _fit(config: TuningConfig, worker: ModelWorker, batch: Batch) -> None:
    if isinstance(worker, SFTWorker):
        worker.train_examples(batch.table, batch.shares, UNKNOWN)
    elif isinstance(worker, RMWorker):
        worker.train_rankings(batch.table, batch.shares)
    else:
        assert isinstance(worker, DPOWorker) and isinstance(config, DPOConfig)
        if learns_rankings(config):
            worker.train_preferences(batch.table, batch.shares, config.dpo)
        else:
            worker.train_labelled(batch.table, batch.shares, config.dpo, 0.0)
