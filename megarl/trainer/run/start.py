"""Opens a run: its checkpoint to continue from, its cluster, its log; ends every process that it started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from megarl.checkpoints import changed_files
from megarl.cluster import (
    Cluster,
    ClusterSetup,
    RayFailed,
    RunFailure,
    Watch,
    abandon_cluster,
    ending_when_stuck,
    ray_messages_in,
    start_cluster,
    stop_cluster,
)
from megarl.config import RolloutConfig, TrainConfig, TuningConfig, check_decays, resolve_batches, to_dict
from megarl.trainer.run.checkpoints import find_resumed, open_store
from megarl.trainer.run.cluster_setup import cluster_setup_of
from megarl.trainer.run.earlier_runs import CHECKPOINTS
from megarl.trainer.run.endpoint import serve_metrics
from megarl.trainer.run.facts import Facts, opening_lines, recorded
from megarl.trainer.run.failures import ending_after_signal, naming_keys
from megarl.trainer.run.logger import RunLogger, TrackedRun
from megarl.trainer.run.preemption import REQUEUE, noting_signals
from megarl.trainer.run.run import Run
from megarl.trainer.run.timeline import Timeline
from megarl.trainer.run.verification import verify_in_cluster


@dataclass(frozen=True)
class Limits:
    """Limits in seconds of a call, and of the time in which no process works on it; None: no limit."""

    phase: float | None = None
    idle: float | None = 60.0


@contextmanager
def open_run(
    config: TrainConfig | TuningConfig,
    total_steps: int,
    cluster_setup: ClusterSetup | None = None,
    *,
    facts: Facts | None = None,
    resumable: bool = True,
    signals: bool = True,
) -> Iterator[Run]:
    """A training run: finds its checkpoint, records its facts, starts the cluster, opens the log.

    Args:
        config: resolved and checked.
        cluster_setup: the setup of its cluster (`cluster_setup_of`); None: it is opened here.
        facts: of models and data, to be printed (facts.py).
        resumable: whether it can continue from a checkpoint; else it begins anew.
        signals: whether a loop of `total_steps` acts on signals that tell the job to end; a program may make more steps.

    Raises:
        ValueError: another run writes to its folder, the checkpoint that it should continue from does not fit it, or a learning rate
            that is to fall would still rise when it ends.
    """
    if resumable:  # the models learn
        check_decays(config, total_steps)
    trainer, plan = config.trainer, resolve_batches(config)
    folder = Path(trainer.default_local_dir)
    places = {"trainer.default_local_dir": folder}
    if isinstance(config, TrainConfig):
        places["trainer.rollout_data_dir"] = Path(trainer.rollout_data_dir)
    with ExitStack() as stack:
        stack.enter_context(naming_keys(places))
        console = Console()
        say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        # Everything that can be refused comes before the cluster starts.
        store = stack.enter_context(open_store(trainer, folder / CHECKPOINTS, say, console))
        resumed = None
        if resumable:
            address = trainer.ray_address
            verify = changed_files if address is None else verify_in_cluster(address, folder)
            resumed = find_resumed(config, store, say, total_steps if signals else None, verify, console)
        stack.enter_context(recorded(config, plan, folder))
        served = stack.enter_context(
            serve_metrics(trainer.metrics_port, trainer.project_name, trainer.experiment_name)
        )
        if cluster_setup is None:
            cluster_setup = stack.enter_context(cluster_setup_of(config))
        run = stack.enter_context(
            open_engine_run(trainer.ray_address, plan.devices, folder, limits(config), cluster_setup)
        )
        run.store, run.resumed, run.relays_from = store, resumed, trainer.relays_from
        if resumable and signals:  # replaces the handlers that Ray has set
            run.preemption = stack.enter_context(noting_signals())
            stack.enter_context(ending_after_signal(run.preemption))
        run.say("\n".join(opening_lines(config, plan, total_steps, facts or {}, folder)))
        if isinstance(config, TrainConfig):
            run.trajectory_folder = Path(trainer.rollout_data_dir)
        run.profile_steps, run.profile_ranks = trainer.profile_steps, trainer.profile_ranks
        if trainer.timeline_mb:
            run.timeline = Timeline(folder, trainer.timeline_mb, goes_on=resumed is not None)
        # The logger opens last: it drops lines after the step that the run continues from.
        tracked = TrackedRun(trainer.project_name, trainer.experiment_name, to_dict(config))
        run.logger = stack.enter_context(
            RunLogger(
                folder,
                trainer.logger,
                total_steps=total_steps,
                console=run.console,
                tracked=tracked,
                trackers=served,
                resumed_step=None if resumed is None else resumed.step,
            )
        )
        yield run


def limits(config: TrainConfig | TuningConfig) -> Limits:
    """The limits of calls in a configuration."""
    trainer = config.trainer
    if isinstance(config, TrainConfig):
        return engine_limits(config.actor_rollout_ref.rollout, trainer.phase_timeout, trainer.idle_timeout)
    return Limits(trainer.phase_timeout, trainer.idle_timeout)


def engine_limits(rollout: RolloutConfig, phase: float | None = None, idle: float | None = 60.0) -> Limits:
    """Limits of a run with engines, which are idle while all environments or agents compute."""
    if idle is not None and rollout.multi_turn.enable:
        idle = max(idle, 2 * rollout.multi_turn.step_timeout)
    if idle is not None and rollout.gateway.enable:
        idle = max(idle, 2 * rollout.gateway.timeout)
    return Limits(phase, idle)


@contextmanager
def open_engine_run(
    address: str | None,
    num_devices: int,
    folder: Path,
    limits: Limits = Limits(),
    cluster_setup: ClusterSetup | None = None,
) -> Iterator[Run]:
    """A run's folder and cluster (the one at `address`, or one of its own); ends every process it started.

    Raises:
        RayFailed: a server of the cluster has ended, whatever error the calls of Ray gave.
    """
    run = Run(folder, Console(), phase_timeout=limits.phase)
    run.say(f"run folder: {folder}")
    with ExitStack() as stack:
        stack.enter_context(ray_messages_in(run.log_dir / "ray.log"))
        if address is None:  # also while the servers start
            stack.enter_context(ending_when_stuck(REQUEUE))
        cluster = start_cluster(address, num_devices, folder, cluster_setup=cluster_setup)
        if address is not None:
            stack.enter_context(ending_when_stuck(REQUEUE, cluster.servers))
        run.watch = Watch(limits.idle, cluster)
        try:
            yield run
        except Exception as error:
            gone = cluster.server_in(None)
            if gone is None or isinstance(error, RunFailure):
                raise
            raise RayFailed(f"{gone} has ended, and the run with it: {error}") from error
        finally:
            _end(run, cluster)


def _end(run: Run, cluster: Cluster) -> None:
    if cluster.is_broken:
        abandon_cluster(cluster, [process for group in run.groups for process in group.watched])
        return
    if run.timeline is not None:
        run.write_timeline(run.timeline.finish)
    for group in run.groups:
        group.shutdown()
    for pool in run.pools.values():
        pool.close()
    stop_cluster(cluster)
