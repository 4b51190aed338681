"""One rank of a recipe's actor or critic as a shadow: build it, evaluate, update twice, release its memory and take it back.

The rank's own classes run as they are, but for what they read: no weight is loaded from a file.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from megarl.algorithms.aggregate import LossCounts
from megarl.cluster.worker import RankInfo
from megarl.config import TrainConfig
from megarl.megatron.parallel import destroy_parallel
from megarl.memory.model import ModelUse
from megarl.shadow import collectives, transfers
from megarl.shadow.collectives import Collective
from megarl.shadow.mode import FakeMode, Shadow
from megarl.shadow.tracker import Made, Phase
from megarl.shadow.transfers import Moved
from megarl.trainer.actor import ActorWorker
from megarl.trainer.controls import make_controls
from megarl.trainer.critic import CriticWorker
from megarl.trainer.memory_plan import PlanInputs, model_use
from megarl.trainer.model_specs import actor_arguments, critic_spec
from megarl.trainer.model_worker import ModelWorker, Share
from megarl.trainer.updates import policy_update

ROLES = ("actor", "critic")
NUM_STEPS = 100  # of the run that the rank would be of; schedules need one
LARGEST_LINES = 12


@dataclass(frozen=True)
class PhaseReport:
    """Bytes of a phase: `peak` is what it took at most above what was there before, `left` what stays after it.

    Attributes:
        largest: what was on the device at the peak, by what made it; the largest first.
    """

    peak: int
    left: int
    largest: list[tuple[Made, int]]


@dataclass(frozen=True)
class RankReport:
    """What a shadow rank did.

    Attributes:
        stage: of the pipeline.
        parts: bytes on the device by owner ("weights", "gradients", "optimizer", ...), after an update.
        saved, sent: bytes of tensors in its file of a checkpoint, and packed for the engines.
        moved: by part, as it left the device and came back.
        released: bytes that stay when all parts have left the device; `kept_by` says which lines made them.
        seconds: of a processor. host_peak: bytes of this process.
        assumed: what was not known, and how often it was asked for.
    """

    role: str
    rank: int
    world_size: int
    stage: int
    transformer_engine: bool
    parts: dict[str, int]
    phases: dict[str, PhaseReport]
    saved: int
    sent: int
    moved: dict[str, Moved]
    released: int
    kept_by: list[tuple[Made, int]]
    flops: dict[str, int]
    log: list[Collective]
    assumed: dict[str, int]
    num_operations: int
    seconds: float
    host_peak: int


class _WithoutWeights:
    """A rank whose tensors nobody fills."""

    def read_weights(self, path: str, head: str, parameters: Mapping[str, torch.Tensor]) -> None: ...


class ShadowActor(_WithoutWeights, ActorWorker): ...


class ShadowCritic(_WithoutWeights, CriticWorker): ...


class Runner:
    """Runs ranks one after the other in this process, whose device is installed.

    `forget`: called after each rank; lets libraries let go of what they keep for the life of the process.
    """

    def __init__(self, forget: Callable[[], None] = lambda: None) -> None:
        self.shadow: Shadow | None = None
        self._forget = forget
        collectives.leave_no_other_backend()

    def run(
        self, config: TrainConfig, inputs: PlanInputs, role: str, rank: int, micro_batches: int | None = None
    ) -> RankReport:
        """
        Args:
            config: resolved, with the facts of its models in `inputs`.
            rank: of the role.
            micro_batches: of the second update; None: as many as the pipeline has stages.
        """
        begun = time.process_time()
        gc.collect()
        gc.freeze()  # the modules' own objects are no garbage: each later collection would look at all of them
        use = model_use(config, inputs, role)
        world_size = use.layout.world
        collectives.join(rank, world_size)
        try:
            with self._running() as shadow:
                return _run(config, shadow, use, role, rank, micro_batches or use.layout.pp, begun)
        finally:
            destroy_parallel()
            self._forget()

    @contextmanager
    def _running(self) -> Iterator[Shadow]:
        self.shadow = Shadow()
        try:
            with FakeMode(), self.shadow:
                yield self.shadow
        finally:
            self.shadow = None


def _run(
    config: TrainConfig, shadow: Shadow, use: ModelUse, role: str, rank: int, micro_batches: int, begun: float
) -> RankReport:
    from megarl.megatron.transformer_config import has_transformer_engine

    tracker, phases = shadow.tracker, {}
    with tracker.phase("build"):
        worker = _worker(config, role, rank, use.layout.world)
    batches = Batches(config, use)
    shadow.received = _stage_input(worker, batches)
    update = _update(config, worker, batches)
    steps: dict[str, Callable[[], Any]] = {
        "evaluate": lambda: _evaluate(worker, batches.of(micro_batches)),
        # It makes the optimizer's states; virtual stages take turns with as many micro-batches as there are stages.
        "first_update": lambda: update(use.layout.pp if use.layout.vpp else 1),
        "update": lambda: update(micro_batches),
    }
    for name, step in steps.items():
        gc.collect()
        with tracker.phase(name) as phase:
            step()
            gc.collect()
        phases[name] = _phase_report(phase)
    (parts,) = worker.memory()
    saved = transfers.save_and_load(worker, tracker) if worker.spec.optim is not None else 0
    sent = transfers.send(config, use.config, worker, tracker) if isinstance(worker, ActorWorker) else 0
    for name in ("save", "load", "sync"):
        if name in tracker.phases:
            phases[name] = _phase_report(tracker.phases[name])
    released = transfers.release_and_resume(worker, tracker)
    stage = worker.coords.pp
    return RankReport(
        role=role,
        rank=rank,
        world_size=use.layout.world,
        stage=stage,
        transformer_engine=has_transformer_engine(),
        parts=parts,
        phases=phases,
        saved=saved,
        sent=sent,
        moved=released.parts,
        released=sum(released.stays.values()),
        kept_by=list(released.stays.items())[:LARGEST_LINES],
        flops={name: sum(counts.values()) for name, counts in shadow.flops.items()},
        log=shadow.log,
        assumed=dict(shadow.assumed),
        num_operations=shadow.num_operations,
        seconds=time.process_time() - begun,
        host_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    )


def _phase_report(phase: Phase) -> PhaseReport:
    largest = sorted(phase.at_peak.items(), key=lambda item: -item[1])[:LARGEST_LINES]
    return PhaseReport(phase.peak - phase.before, phase.after - phase.before, largest)


def _worker(config: TrainConfig, role: str, rank: int, world_size: int) -> ModelWorker:
    info = RankInfo(rank, world_size, 0, "127.0.0.1", 1, role, "", ("0",), "")
    if role == "critic":
        return ShadowCritic(info, _unread(critic_spec(config, NUM_STEPS)))
    arguments = actor_arguments(config, NUM_STEPS)
    return ShadowActor(info, **{**arguments, "spec": _unread(arguments["spec"])})


def _stage_input(worker: ModelWorker, batches: Batches) -> tuple[int, int, int]:
    """The shape of the hidden states that pipeline stages send each other: [tokens, 1, hidden]."""
    table, shares = batches.of(1)
    (packed,) = worker.pack_share(table, shares[0])
    layout = worker.layout
    return packed.num_tokens // (layout.tp if layout.sp else 1), 1, worker.config.hidden_size


def _unread(spec: Any) -> Any:
    """A spec whose adapters begin anew: no file of them is read."""
    return replace(spec, lora=replace(spec.lora, adapter_path=None), plugins=())


def _evaluate(worker: ModelWorker, batch: tuple[pa.Table, list[Share]]) -> None:
    if isinstance(worker, CriticWorker):
        worker.compute_values(*batch)
    else:
        assert isinstance(worker, ActorWorker)
        worker.compute_log_probs(*batch, "old_log_probs")


def _update(config: TrainConfig, worker: ModelWorker, batches: Batches) -> Callable[[int], Any]:
    """An optimizer step on so many micro-batches."""
    how = policy_update(config, make_controls(config, NUM_STEPS), seed=0)

    def update(number: int) -> Any:
        table, shares = batches.of(number)
        plan, counts = [shares], [batches.counts(number)]
        if isinstance(worker, CriticWorker):
            critic = config.critic
            assert critic is not None
            return worker.update_values(
                table, plan, counts, how.aggregation, critic.cliprange_value, critic.vf_coef
            )
        assert isinstance(worker, ActorWorker)
        return worker.update_policy(table, plan, counts, how)

    return update


@dataclass(frozen=True)
class Batches:
    """Trajectories that fill micro-batches: as many of the longest as go into one, all of one length."""

    config: TrainConfig
    use: ModelUse

    @property
    def per_micro_batch(self) -> int:
        return max(
            1, self.use.tokens // (self.config.data.max_prompt_length + self.config.data.max_response_length)
        )

    @property
    def response(self) -> int:
        return self._length - self._prompt

    @property
    def _length(self) -> int:
        return self.use.tokens // self.per_micro_batch

    @property
    def _prompt(self) -> int:
        return min(self.config.data.max_prompt_length, self._length // 2)

    def counts(self, micro_batches: int) -> LossCounts:
        """Of a mini-batch of all data parallel ranks, which have equal shares."""
        rows = micro_batches * self.per_micro_batch * self.use.layout.dp
        return LossCounts(rows * self.response, rows)

    def of(self, micro_batches: int) -> tuple[pa.Table, list[Share]]:
        """A table for one data parallel rank, and the share of each: they are given the same rows."""
        each, random = self.per_micro_batch, np.random.default_rng(0)
        rows = micro_batches * each
        vocabulary = min(1000, self.use.config.vocab_size)

        def column(make: Callable[[], np.ndarray]) -> pa.Array:
            return pa.array([make() for _ in range(rows)])

        floats = (
            *("old_log_probs", "ref_log_probs", "advantages", "values", "returns"),
            *("rollout_log_probs", "rollout_is_weights"),
        )
        table = pa.table(
            {
                "prompt_ids": column(lambda: random.integers(0, vocabulary, self._prompt)),
                "response_ids": column(lambda: random.integers(0, vocabulary, self.response)),
                "response_mask": column(lambda: np.ones(self.response, bool)),
                **{
                    name: column(lambda: random.normal(size=self.response).astype(np.float32))
                    for name in floats
                },
            }
        )
        share = [list(range(number * each, (number + 1) * each)) for number in range(micro_batches)]
        return table, [share] * self.use.layout.dp
