"""Generation alone, training alone on saved trajectories, and `megarl replay`.

    trainer.rollout_only    generate, score and write trajectories
    trainer.train_only      train on saved trajectories
    megarl replay           the learning part of a step again, from a checkpoint and the trajectories that the run wrote

Guarantees, each asserted by a test:
- `trainer.train_only` on the files of `trainer.rollout_only` is a run's first step, bit for bit.
- A replay generates and scores nothing, and changes nothing in the run's folder but the new `replays/step-<n>`.
- With the run's own configuration, and where its kernels are deterministic (CPUs in float32), the numbers of a replay are those
  of the run bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints import Checkpoint, find_damage, read_checkpoint, steps_in
from megarl.checkpoints.manifest import folder_name, shortened
from megarl.cluster import ClusterSetup
from megarl.config import TrainConfig, check_config, load_config, resolve_batches
from megarl.config.checks.run import changed_keys
from megarl.trainer.health.monitor import repetition_metrics
from megarl.trainer.loops.driver import Driver, LearningState, Metrics, Work, epochs
from megarl.trainer.loops.ppo import collect, learn, open_policy_run
from megarl.trainer.roles.roles import start_learners
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.cluster_setup import cluster_setup_of
from megarl.trainer.run.earlier_runs import CHECKPOINTS, CONFIG_FILE
from megarl.trainer.run.export import FOLDER, export_hf
from megarl.trainer.run.logger import METRICS_FILE, read_metrics
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import limits, open_engine_run, open_run
from megarl.trainer.stages.advantages import make_controls
from megarl.trainer.stages.given_responses import given_metrics, own_rows
from megarl.trainer.stages.inputs import load_model_inputs, num_training_steps
from megarl.trainer.stages.nonfinite import GENERATED, finite_step, require_finite
from megarl.trainer.stages.prompt_data import may_lack, training_prompts, training_reading
from megarl.trainer.stages.saved_trajectories import count_steps, read_step, step_file
from megarl.trainer.workers.ptx import load_ptx
from megarl.util.plugins import load_plugins


def generate_only(config: TrainConfig, cluster_setup: ClusterSetup | None) -> str:
    """`trainer.rollout_only`: generate, score and write trajectories; returns their folder.

    Args:
        config: resolved.

    Raises:
        ValueError: the run folder belongs to a run that trains.
    """
    folder = Path(config.trainer.default_local_dir)
    if steps_in(folder / CHECKPOINTS):
        raise ValueError(
            f"trainer.rollout_only: {folder} has the checkpoints of a run that trains; give another "
            "trainer.default_local_dir"
        )
    with open_policy_run(config, cluster_setup, trains=False) as (run, roles, inputs, rewards):
        prompts = epochs(inputs.loader)

        def work(step: int, metrics: Metrics) -> None:
            groups, collected = collect(config, prompts, run, roles, rewards, step)
            batch = groups.batch()
            require_finite(batch, GENERATED)
            run.save_trajectories(batch, "step", step)
            inputs.loader.report(*groups.prompt_scores())
            metrics |= collected
            metrics |= given_metrics(batch)
            scores = own_rows(batch)["score"].to_numpy()
            if len(scores):
                metrics["critic/score/mean"] = float(scores.mean())

        controls = make_controls(config.algorithm, config.actor_rollout_ref.actor, inputs.num_steps)
        guard = partial(finite_step, run, config.trainer.on_nonfinite, controls)
        Driver(run, guard=guard, memory=roles.memory).drive(range(1, inputs.num_steps + 1), work)
        run.say(f"trajectories: {run.trajectory_folder}")
        return str(run.trajectory_folder)


def learn_only(config: TrainConfig, cluster_setup: ClusterSetup | None) -> str:
    """`trainer.train_only`: train on saved trajectories; returns the folder of the exported model.

    Args:
        config: resolved.

    Raises:
        ValueError: a step's trajectories are missing.
    """
    source = Path(config.trainer.train_only)
    num_steps = count_steps(source, config.trainer.total_training_steps)
    models = load_model_inputs(config)
    ptx = load_ptx(config, models.tokenizer)
    with open_run(config, num_steps, cluster_setup) as run:
        roles = start_learners(config, run, num_steps)
        state = LearningState.start(config, run, roles, num_steps, ptx)
        work = learning_from(config, run, roles, state, partial(step_file, source))
        done = state.checkpoints.resume()
        state.driver(config, run, roles, num_steps).drive(range(done + 1, num_steps + 1), work)
        with roles.memory.held("export"):
            return export_hf(run, roles.actor.group, config.actor_rollout_ref.model, run.folder / FOLDER)


def learning_from(
    config: TrainConfig, run: Run, roles: Roles, state: LearningState, file_of: Callable[[int], Path]
) -> Work:
    """A step's work: learn from the trajectories in its file."""
    policy = config.actor_rollout_ref
    records_experts = policy.actor.router_replay == "trainer"

    def work(step: int, metrics: Metrics) -> pa.Table:
        read = read_step(file_of(step), config.data, policy.rollout.n, records_experts)
        batch, learnt = learn(config, run, roles, read, state.controls, step, state.ptx_batches)
        metrics |= learnt
        return batch

    return work


REPLAYS = "replays"


@dataclass(frozen=True)
class Request:
    """The step to replay, and how.

    Attributes:
        folder: the run folder.
        overrides: key=value, applied to the run's configuration.
        trajectories: the file of the step's trajectories; None: the run's own.
        checkpoint: the checkpoint to begin from; None: the newest good one before the step, or the models' first weights.
        out: the folder for the weights after the step, as a Hugging Face model; None: they are not written.
    """

    folder: Path
    step: int
    overrides: Sequence[str] = ()
    trajectories: Path | None = None
    checkpoint: Path | None = None
    out: Path | None = None


def replay(request: Request) -> bool:
    """Train the step again and print its numbers next to those of the run; returns whether all are equal, bit for bit.

    Raises:
        ValueError: there is no such run, or trajectories between the checkpoint and the step are missing; says which steps can be
            replayed.
        NotFinite: as in the run.
    """
    config = _read_config(request)
    begin = _beginning(request)
    first = begin.step + 1 if begin is not None else 1
    files = _files(request, config, first)
    models = load_model_inputs(config)
    num_steps = _run_steps(config, models.tokenizer)
    folder = request.folder / REPLAYS / f"step-{request.step}"
    folder.mkdir(parents=True, exist_ok=True)
    devices = resolve_batches(config).devices
    with (
        cluster_setup_of(config) as cluster_setup,
        open_engine_run(config.trainer.ray_address, devices, folder, limits(config), cluster_setup) as run,
    ):
        run.resumed, run.trajectory_folder, run.relays_from = begin, folder, config.trainer.relays_from
        where = "the models' first weights" if begin is None else str(begin.folder)
        steps = f"step {first}" if first == request.step else f"steps {first} to {request.step}"
        run.say(f"replaying {steps} of {request.folder} from {where}")
        for key, (before, after) in changed_keys(config, request.folder / CONFIG_FILE).items():
            run.say(f"  changed: {key}: {before!r} -> {after!r}")
        roles = start_learners(config, run, num_steps)
        found = _replay_steps(config, run, roles, files, num_steps, load_ptx(config, models.tokenizer))
        logged = {entry["step"]: entry for entry in read_metrics(request.folder)}
        equal = [print_comparison(run.console, step, logged.get(step), found[step]) for step in found]
        if request.out is not None:
            with roles.memory.held("export"):
                export_hf(run, roles.actor.group, config.actor_rollout_ref.model, request.out)
    return all(equal)


def _replay_steps(
    config: TrainConfig, run: Run, roles: Roles, files: Mapping[int, Path], num_steps: int, ptx
) -> dict[int, dict[str, float]]:
    """The metrics of each step, but for its seconds, speeds and health."""
    state = LearningState.start(config, run, roles, num_steps, ptx)
    state.checkpoints.resume()
    found: dict[int, Metrics] = {}

    def check(step: int, metrics: Metrics, batch: pa.Table) -> Metrics:
        """Change the controls for later steps as `health.auto_action` did in the run; findings are not reported again."""
        if config.health.enable:
            repetition = repetition_metrics(own_rows(batch))
            state.monitor.act(state.monitor.check(step, {**metrics, **repetition}))
        return {}

    def made(step: int, metrics: Metrics) -> None:
        measured = ("perf/", "timing_s/")
        found[step] = {name: value for name, value in metrics.items() if not name.startswith(measured)}

    guard = partial(finite_step, run, config.trainer.on_nonfinite, state.controls, save=False)
    Driver(run, guard=guard, check=check, made=made).drive(
        files, learning_from(config, run, roles, state, files.__getitem__)
    )
    return found


def _run_steps(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of steps of the run, which its schedules depend on."""
    trainer = config.trainer
    if trainer.train_only is not None:
        return count_steps(Path(trainer.train_only), trainer.total_training_steps)
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    further = training_reading(config)
    loader, _ = training_prompts(config.data, tokenizer, lambda _: None, may_lack(config), **further)
    return num_training_steps(trainer, loader, config.data.train_batch_size)


def _read_config(request: Request) -> TrainConfig:
    """The run's configuration with the overrides, resolved and checked."""
    path = request.folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{request.folder} is no folder of a run: it has no {CONFIG_FILE}")
    config = check_config(load_config(TrainConfig, path, list(request.overrides)), data_files=False)
    load_plugins(config.plugins)
    return config


def _beginning(request: Request) -> Checkpoint | None:
    """The checkpoint to begin from; None: there is none before the step."""
    if request.step < 1:
        raise ValueError(f"--step {request.step}: steps are counted from 1")
    if request.checkpoint is not None:
        found = read_checkpoint(request.checkpoint)
        damage = find_damage(found)
        if damage:
            raise ValueError(f"--checkpoint {request.checkpoint}: {shortened(damage)}")
        if found.step >= request.step:
            raise ValueError(
                f"--checkpoint {request.checkpoint} is of step {found.step}, after which step {request.step} cannot be "
                f"replayed; steps from {found.step + 1} on can"
            )
        return found
    root = request.folder / CHECKPOINTS
    for step in sorted((step for step in steps_in(root) if step < request.step), reverse=True):
        try:
            found = read_checkpoint(root / folder_name(step))
        except ValueError:  # no valid manifest: not a checkpoint
            continue
        if not find_damage(found):
            return found
    return None


def _files(request: Request, config: TrainConfig, first: int) -> dict[int, Path]:
    """The file of trajectories of each step from `first` to the requested one."""
    source = config.trainer.train_only or config.trainer.rollout_data_dir
    files = {step: step_file(source, step) for step in range(first, request.step + 1)}
    if request.trajectories is not None:
        files[request.step] = request.trajectories
    missing = [step for step, path in files.items() if not path.is_file()]
    if missing:
        can = f"steps {first} to {missing[0] - 1} can be replayed" if missing[0] > first else "no step can be"
        raise ValueError(
            f"step {request.step} is replayed from step {first} on, and {files[missing[0]]} is missing; from there {can}"
        )
    return files


def print_comparison(
    console: Console, step: int, logged: Mapping[str, float] | None, found: Mapping[str, float]
) -> bool:
    """Print the numbers of a step next to those that the run logged; returns whether all are equal, bit for bit.

    If the run ended within the step and logged no numbers, the replay's are printed alone.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headers = ("metric", "replayed") if logged is None else ("metric", "logged", "replayed", "")
    for header in headers:
        table.add_column(header, overflow="fold")
    equal = 0
    for name, value in sorted(found.items()):
        after = repr(float(value))
        if logged is None:
            table.add_row(name, after)
            continue
        before = repr(float(logged[name])) if name in logged else ""
        equal += before == after
        table.add_row(name, before, after, "" if before == after else "differs")
    console.print(table)
    if logged is None:
        text = f"nothing to compare: {METRICS_FILE} has no line of this step, within which the run ended"
    elif equal < len(found):
        text = f"{len(found) - equal} of {len(found)} numbers are not those of the run"
    else:
        text = f"all {equal} numbers are equal bit for bit"
    console.print(f"step {step}: {text}", highlight=False, soft_wrap=True)
    return equal == len(found)
