"""One rank of a recipe's role as a shadow: build it, evaluate, update twice, release its memory and take it back.

The rank's own classes run unchanged, except for reading: no weight is loaded from a file.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from megarl.config import TrainConfig, TuningConfig
from megarl.megatron.parallel import destroy_parallel
from megarl.plan.inputs import PlanInputs, model_use
from megarl.shadow import collectives, meshes, transfers
from megarl.shadow.collectives import Alike, Collective, Log, Peers
from megarl.shadow.mode import FakeMode, Shadow
from megarl.shadow.roles import build_worker, steps_of
from megarl.shadow.tracker import Made, Phase
from megarl.shadow.transfers import Moved
from megarl.shadow.transformer_engine.float8 import FLOAT8_PRODUCT
from megarl.shadow.values import choose_unevenly
from megarl.trainer.workers.actor import ActorWorker
from megarl.trainer.workers.model import ModelWorker

LARGEST_LINES = 40


@dataclass(frozen=True)
class PhaseReport:
    """Bytes of a phase: `peak`: the most it took in addition to the bytes before it; `left`: the bytes that stay after it.

    Attributes:
        kept: the bytes of these that are in no part of the rank: libraries keep them for later.
        largest: bytes on the device at the peak by their makers, the largest first.
    """

    peak: int
    left: int
    kept: int
    largest: list[tuple[Made, int]]


@dataclass(frozen=True)
class RankReport:
    """The report of a shadow rank.

    Attributes:
        stage: of the pipeline.
        parts: bytes on the device by owner ("weights", "gradients", "optimizer", ...), after an update.
        saved, sent: bytes of tensors in its file of a checkpoint, and packed for the engines.
        sent_buckets: of each bucket for the engines the number of slices, and of kernels that packing it launched.
        moved: by part, as it left the device and came back.
        released: bytes that stay when all parts have left the device; `kept_by` says which lines made them.
        float8_flops: the part of `flops` that products in float8 have.
        seconds: of a processor. host_peak: bytes of this process.
        assumed: unknown values, and how often they were needed.
        waits: how often the host waited for the device, by phase and line of code.
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
    sent_buckets: list[tuple[int, int]]
    moved: dict[str, Moved]
    released: int
    kept_by: list[tuple[Made, int]]
    flops: dict[str, int]
    float8_flops: dict[str, int]
    log: list[Collective]
    assumed: dict[str, int]
    waits: dict[str, dict[str, int]]
    num_operations: int
    seconds: float
    host_peak: int


class Runner:
    """Runs ranks one after the other in this process, whose device is installed.

    `forget`: called after each rank; lets libraries let go of what they keep for the life of the process.
    """

    def __init__(self, forget: Callable[[], None] = lambda: None) -> None:
        self.shadow: Shadow | None = None
        self.peers: Peers | None = None  # None: alike, and so is their data
        self.log = Log(Alike())  # of the latest rank
        self._forget = forget
        collectives.leave_no_other_backend(lambda: self.shadow)
        meshes.install(lambda: self.peers is None)

    def run(
        self,
        config: TrainConfig | TuningConfig,
        inputs: PlanInputs,
        role: str,
        rank: int,
        micro_batches: int | None = None,
    ) -> RankReport:
        """Run a rank; returns its report.

        Args:
            config: resolved, with the facts of its models in `inputs`.
            rank: of the role.
            micro_batches: of evaluations and the second update; None: as many as the pipeline has stages.
        """
        begun = time.process_time()
        gc.collect()
        gc.freeze()  # the modules' own objects are no garbage: each later collection would look at all of them
        world_size = model_use(config, inputs, role).layout.world
        collectives.join(rank, world_size)
        try:
            with self._running() as shadow:
                return _run(config, inputs, shadow, role, rank, world_size, micro_batches, begun)
        finally:
            destroy_parallel()
            self._forget()

    @contextmanager
    def _running(self) -> Iterator[Shadow]:
        self.shadow = _shadow(self.peers)
        self.log = self.shadow.log
        try:
            with FakeMode(), self.shadow:
                yield self.shadow
        finally:
            self.shadow = None


def _shadow(peers: Peers | None) -> Shadow:
    if peers is None:
        return Shadow()
    return Shadow(peers, choose_unevenly(seed=dist.get_rank()))


def _run(
    config: TrainConfig | TuningConfig,
    inputs: PlanInputs,
    shadow: Shadow,
    role: str,
    rank: int,
    world_size: int,
    micro_batches: int | None,
    begun: float,
) -> RankReport:
    from megarl.megatron.transformer_config import has_transformer_engine

    tracker, phases = shadow.tracker, {}
    with tracker.phase("build"):
        worker = build_worker(config, role, rank, world_size)
    uneven = not isinstance(shadow.peers, Alike)
    for step in steps_of(config, inputs, worker, role, micro_batches, uneven):
        if uneven and step.name == "first_update":
            continue  # the other update makes the same calls
        if isinstance(shadow.peers, Alike):
            shadow.peers.received = step.received
        gc.collect()
        held = _part_bytes(worker)
        with tracker.phase(step.name) as phase:
            step.run()
            gc.collect()
        phases[step.name] = _phase_report(phase, _part_bytes(worker) - held)
    (parts,) = worker.memory()
    saved, sent = 0, transfers.Sent(0, [])
    if worker.spec.optim is not None and not uneven:
        saved = transfers.save_and_load(worker, tracker)
        if isinstance(worker, ActorWorker):
            assert isinstance(config, TrainConfig)
            sent = transfers.send(config, inputs.model, worker, tracker)
    for name in ("save", "load", "sync"):
        if name in tracker.phases:
            phases[name] = _phase_report(tracker.phases[name], grown=0)
    released = transfers.release_and_resume(worker, tracker)
    stage = worker.coords.pp
    return RankReport(
        role=role,
        rank=rank,
        world_size=world_size,
        stage=stage,
        transformer_engine=has_transformer_engine(),
        parts=parts,
        phases=phases,
        saved=saved,
        sent=sent.nbytes,
        sent_buckets=sent.buckets,
        moved=released.parts,
        released=released.stays,
        kept_by=list(released.makers.items())[:LARGEST_LINES],
        flops={name: sum(counts.values()) for name, counts in shadow.flops.items()},
        float8_flops={name: counts[FLOAT8_PRODUCT] for name, counts in shadow.flops.items()},
        log=shadow.log.calls(),
        assumed=dict(shadow.assumed),
        waits={phase: dict(lines) for phase, lines in shadow.waits.items()},
        num_operations=shadow.num_operations,
        seconds=time.process_time() - begun,
        host_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    )


def _part_bytes(worker: ModelWorker) -> int:
    """Bytes of the rank's parts on its device."""
    return sum(part.device_bytes() for part in worker.parts.values())


def _phase_report(phase: Phase, grown: int) -> PhaseReport:
    """`grown`: bytes by which the parts of the rank have grown."""
    largest = sorted(phase.at_peak.items(), key=lambda item: -item[1])[:LARGEST_LINES]
    left = phase.after - phase.before
    return PhaseReport(phase.peak - phase.before, left, left - grown, largest)
