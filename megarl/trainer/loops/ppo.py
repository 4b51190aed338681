"""The loop of PPO, GRPO and related algorithms. Each line is a stage; `roles` decides where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

from megarl.cluster import ClusterSetup
from megarl.config import TrainConfig, evaluates
from megarl.rewards.processes.scorer import make_scorer
from megarl.rollout.engine import EngineCounts
from megarl.trainer.health.monitor import watch_validation
from megarl.trainer.loops.driver import LearningState, Metrics, epochs
from megarl.trainer.roles.roles import start_roles
from megarl.trainer.roles.types import Roles
from megarl.trainer.roles.weight_sync import sync_weights
from megarl.trainer.run.checkpoints import VALIDATIONS
from megarl.trainer.run.earlier_runs import set_aside_earlier_run
from megarl.trainer.run.export import FOLDER, export_hf
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import open_run
from megarl.trainer.schedule.modes import make_batches
from megarl.trainer.schedule.validations import Validated, open_validations
from megarl.trainer.stages.advantages import Controls, compute_batch_advantages
from megarl.trainer.stages.given_responses import check_given, draw_given, own_rows
from megarl.trainer.stages.groups import Groups
from megarl.trainer.stages.inputs import TrainInputs, load_train_inputs
from megarl.trainer.stages.kept_tokens import check_kept
from megarl.trainer.stages.nonfinite import (
    GENERATED,
    LEARNT_FROM,
    rank_errors_as_not_finite,
    require_finite,
)
from megarl.trainer.stages.reward_model import score_weights
from megarl.trainer.stages.rollouts import noise_seed, roll_out
from megarl.trainer.stages.scoring import Rewards, training_scores
from megarl.trainer.stages.updates import evaluate_models, throughput, update
from megarl.trainer.stages.validation import sample_rows, validate
from megarl.trainer.workers.dispatch import with_idle_rows


def train(config: TrainConfig, cluster_setup: ClusterSetup | None) -> str:
    """Train the policy as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    with open_policy_run(config, cluster_setup) as (run, roles, inputs, rewards):
        train_steps(config, run, roles, inputs, rewards)
        with roles.memory.held("export"):
            return export_hf(run, roles.actor.group, config.actor_rollout_ref.model, run.folder / FOLDER)


@contextmanager
def open_policy_run(
    config: TrainConfig, cluster_setup: ClusterSetup | None, trains: bool = True
) -> Iterator[tuple[Run, Roles, TrainInputs, Rewards]]:
    """A run with engines, from its inputs to its roles; one that trains nothing begins anew, and cannot be resumed."""
    with make_scorer(config) as scorer:
        inputs = load_train_inputs(config, scorer)
        if not trains:
            set_aside_earlier_run(config, print)
        facts = inputs.facts(config.actor_rollout_ref.model.path, config.data)
        with open_run(config, inputs.num_steps, cluster_setup, facts=facts, resumable=trains) as run:
            run.show_rewards(scorer)
            for warning in inputs.warnings:
                run.say(warning)
            if inputs.num_filtered:
                run.say(f"left out {inputs.num_filtered} prompts over data.max_prompt_length")
            roles = start_roles(config, run, inputs.model, inputs.num_steps, trains=trains)
            weights = score_weights(config.reward_model)
            yield run, roles, inputs, Rewards(run, scorer, inputs.tokenizer, *weights, inputs.reward_model)


def train_steps(config: TrainConfig, run: Run, roles: Roles, inputs: TrainInputs, rewards: Rewards) -> None:
    """All steps that are left: collect a batch (sync, generate, reward), and learn from it."""
    prompts = epochs(inputs.loader)
    collectors = partial(collect, config, prompts), partial(answer, config, prompts)
    batches = make_batches(config, run, roles, rewards, inputs.num_steps, prompts, *collectors)
    blocking = partial(sync_and_validate, config, run, roles, inputs, rewards)
    report = partial(report_validation, config, run, inputs)

    def watch(step: int, metrics: Metrics) -> None:
        watch_validation(run, state.monitor, step, metrics)
        state.checkpoints.validated(step, metrics)

    def work(step: int, metrics: Metrics) -> pa.Table:
        collected = batches.of(step)
        metrics |= collected.metrics
        first = config.trainer.log_val_generations if step == done + 1 else 0
        shown = max(first, config.trainer.log_train_generations)
        show_samples(run, inputs, step, "train", collected.table, shown)
        with batches.during_learning(step) as learner:  # some modes collect later batches during it
            batch, learnt = learn(config, *learner, collected.table, state.controls, step, state.ptx_batches)
        metrics |= learnt
        inputs.loader.report(collected.prompt_uids, collected.scores)
        return batch

    with open_validations(config, run, roles, inputs.validation, blocking, report, watch) as validations:
        parts = {"data": inputs.loader, VALIDATIONS: validations}
        state = LearningState.start(config, run, roles, inputs.num_steps, inputs.ptx, parts, batches.folders)
        done = state.checkpoints.resume()
        begin = validations.begin if inputs.validation else None
        if begin is None:  # the run validated before it continued
            validations.abandon()
        validations.resume(done)
        driver = state.driver(config, run, roles, inputs.num_steps, begin, validations.poll)
        if config.trainer.val_before_train and not done:
            with run.step(0) as metrics:
                driver.add_validation(0, metrics)
                state.monitor.history.add(0, metrics)
        driver.drive(range(done + 1, inputs.num_steps + 1), work)
        validations.finish()


def collect(
    config: TrainConfig, prompts: Iterator[pa.Table], run: Run, roles: Roles, rewards: Rewards, step: int
) -> tuple[Groups, dict[str, float]]:
    """Collecting: sync the newest weights, generate responses to prompts, and score them as they arrive."""
    with roles.memory.phase("sync"):
        synced = sync_weights(run, roles, version=step)
    groups, metrics = answer(config, prompts, run, roles, rewards, step)
    return groups, synced | metrics


def answer(
    config: TrainConfig, prompts: Iterator[pa.Table], run: Run, roles: Roles, rewards: Rewards, step: int
) -> tuple[Groups, dict[str, float]]:
    """As `collect`, without a sync: with the weights that the engines have."""
    phase = roles.memory.phase
    groups = Groups(config.algorithm.filter_groups, config.data.train_batch_size)
    noise, idle, counts = noise_seed(config.actor_rollout_ref.rollout, step), 0.0, EngineCounts()
    while not groups.complete:
        asked = groups.distinct(next(prompts))
        asked, groups.given = draw_given(asked, config.data, step, config.actor_rollout_ref.rollout.n)
        if not asked.num_rows:
            break
        with phase("generate"):
            answers, idled, counted = roll_out(run, roles.engines, asked, config, noise, rewards.submit)
        idle += idled
        counts += counted
        by_model = rewards.ask_model(roles, answers, phase)
        with run.timed("reward"):
            scored = rewards.collect(answers, f"step {step}", by_model)
            parts = config.algorithm.reward_weights or {}
            groups.add(training_scores(scored, config.reward_model.overlong_buffer, config.data, parts))
    if not groups.parts:  # all responses of the step are given
        return groups, {}
    seconds = run.seconds["generate"]
    speed = {
        "perf/generate_tokens_per_s": groups.generated_tokens / seconds,
        "perf/engines_idle": idle / seconds,
    }
    return groups, groups.metrics() | speed | counts.metrics()


def learn(
    config: TrainConfig,
    run: Run,
    roles: Roles,
    batch: pa.Table,
    controls: Controls,
    step: int,
    ptx_batches: Iterator[pa.Table] | None = None,
) -> tuple[pa.Table, dict[str, float]]:
    """Learning: log-probs and values, advantages, updates of critic and policy; returns the batch that was trained on.

    Raises:
        NotFinite: an input or a computed number is not finite; no later update is made.
        ValueError: the trajectories have given responses or kept tokens, and the loss does not support them.
    """
    seed = config.trainer.seed * 1_000_003 + step
    check_given(batch, config)
    check_kept(batch, config)
    require_finite(batch, GENERATED)
    judged_by = (roles.actor, roles.ref, roles.critic, *roles.teachers.values())
    layouts = [role.layout for role in judged_by if role is not None]
    num_rows = batch.num_rows
    if evaluates(config):
        with roles.memory.phase("evaluate_models"):
            batch = evaluate_models(run, roles, with_idle_rows(batch, layouts), config, seed)
        batch = batch.slice(0, num_rows)
    with run.timed("advantages"):
        batch, metrics = compute_batch_advantages(
            batch, config.algorithm, controls.kl, controls.player_baselines
        )
    require_finite(batch, LEARNT_FROM)
    run.save_trajectories(batch, "step", step)  # before the updates, in case one fails
    with run.timed("update"), rank_errors_as_not_finite(batch):
        filled = with_idle_rows(batch, layouts)
        metrics |= update(run, roles, filled, config, controls, step, seed, ptx_batches)
    return batch, metrics | throughput(batch, run.seconds)


def sync_and_validate(
    config: TrainConfig, run: Run, roles: Roles, inputs: TrainInputs, rewards: Rewards, step: int
) -> dict[str, float]:
    """Validate the policy after `step` (0: before the first); returns the metrics.

    The policy's weights are synced first: the metrics of step 0 include the sync's.
    """
    data, held = config.data, roles.memory.held
    with held("sync"):
        synced = sync_weights(run, roles, version=step + 1)
    answers, metrics = validate(
        run, roles.engines, inputs.validation, rewards, data.max_response_length, config.trainer.seed,
        data.val_batch_size, f"validation after step {step}", partial(held, "generate"),
        lambda table: rewards.ask_model(roles, table, held),
    )  # fmt: skip
    for name, table in answers.items():
        run.save_trajectories(table, name, step)
        show_samples(run, inputs, step, name, table, config.trainer.log_val_generations)
    metrics = {f"val/{name}": value for name, value in metrics.items()}
    # A step reports the sync of its own rollouts; step 0 has none, and this is the run's first sync.
    return metrics if step else metrics | synced


def report_validation(config: TrainConfig, run: Run, inputs: TrainInputs, found: Validated) -> None:
    """Log the results of a validation that training did not wait for, under the step of its weights."""
    number = config.trainer.log_val_generations
    samples = {}
    for name, table in found.answers.items():
        run.save_trajectories(table, name, found.step)
        samples[f"{name}/generations"] = sample_rows(table, inputs.tokenizer, number)
    run.logger.log_late(found.step, found.metrics, samples)


def show_samples(run: Run, inputs: TrainInputs, step: int, name: str, table: pa.Table, number: int) -> None:
    """Log a few scored trajectories as text; `name` is their label."""
    samples = sample_rows(own_rows(table), inputs.tokenizer, number)
    run.logger.log_samples(step, f"{name}/generations", samples)
