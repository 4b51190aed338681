"""Either half of training alone: trajectories without updates, and updates on trajectories that are there.

Guarantee, asserted by a test: `trainer.train_only` on what `trainer.rollout_only` wrote is a run's first step, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

from megarl.checkpoints import steps_in
from megarl.cluster import Premises
from megarl.config import TrainConfig
from megarl.rewards.processes.scorer import make_scorer
from megarl.trainer.health.monitor import start_monitor, watch
from megarl.trainer.loops.ppo import collect, epochs, learn
from megarl.trainer.roles.roles import policy_checkpoints, start_learners, start_roles
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.earlier_runs import set_aside_earlier_run
from megarl.trainer.run.export import FOLDER, export_hf
from megarl.trainer.run.resumed import CHECKPOINTS
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import open_run
from megarl.trainer.stages.controls import make_controls
from megarl.trainer.stages.inputs import load_model_inputs, load_train_inputs
from megarl.trainer.stages.nonfinite import GENERATED, require_finite, whole_step
from megarl.trainer.stages.reward_model import score_weights
from megarl.trainer.stages.saved_trajectories import count_steps, read_step, step_file
from megarl.trainer.stages.scoring import Rewards
from megarl.trainer.workers.ptx import load_ptx


def generate_only(config: TrainConfig, premises: Premises | None) -> str:
    """`trainer.rollout_only`: generate, score and write trajectories; returns their folder.

    Args:
        config: resolved.

    Raises:
        ValueError: the run folder is one of a run that trains.
    """
    folder, controls = Path(config.trainer.default_local_dir), make_controls(config, num_steps=1)
    if steps_in(folder / CHECKPOINTS):
        raise ValueError(
            f"trainer.rollout_only: {folder} has the checkpoints of a run that trains; give another "
            "trainer.default_local_dir"
        )
    with make_scorer(config) as scorer:
        inputs = load_train_inputs(config, scorer)
        set_aside_earlier_run(config, print)
        facts = inputs.facts(config)
        with open_run(config, inputs.num_steps, premises, facts=facts, resumable=False) as run:
            run.show_rewards(scorer)
            roles = start_roles(config, run, inputs.model, inputs.num_steps, trains=False)
            rewards = Rewards(run, scorer, inputs.tokenizer, *score_weights(config))
            prompts = epochs(inputs.loader)
            for step in range(1, inputs.num_steps + 1):
                with run.step(step) as metrics, whole_step(run, config, controls, step, metrics):
                    groups, collected = collect(
                        config, run, roles, prompts, rewards, inputs.reward_model, step
                    )
                    batch = groups.batch()
                    require_finite(batch, GENERATED)
                    run.save_trajectories(batch, "step", step)
                    inputs.loader.report(*groups.prompt_scores())
                    metrics |= collected | roles.memory.report()
                    metrics["critic/score/mean"] = float(batch["score"].to_numpy().mean())
            run.say(f"trajectories: {run.trajectory_folder}")
            return str(run.trajectory_folder)


def learn_only(config: TrainConfig, premises: Premises | None) -> str:
    """`trainer.train_only`: train on trajectories that are there; returns the folder of the exported model.

    Args:
        config: resolved.

    Raises:
        ValueError: a step's trajectories are missing.
    """
    source = Path(config.trainer.train_only)
    num_steps = count_steps(source, config.trainer.total_training_steps)
    models = load_model_inputs(config)
    ptx = load_ptx(config, models.tokenizer)
    with open_run(config, num_steps, premises) as run:
        roles = start_learners(config, run, num_steps)
        _learn_steps(config, run, roles, source, num_steps, ptx)
        with roles.memory.held("export"):
            return export_hf(run, roles.actor.group, config.actor_rollout_ref.model, run.folder / FOLDER)


def _learn_steps(config: TrainConfig, run: Run, roles: Roles, source: Path, num_steps: int, ptx) -> None:
    controls = make_controls(config, num_steps)
    monitor = start_monitor(run, config, controls)
    checkpoints = policy_checkpoints(
        config, run, roles, {"controls": controls, "monitor": monitor, "ptx": ptx}
    )
    done = checkpoints.resume()
    texts = epochs(ptx) if ptx is not None else None
    for step in range(done + 1, num_steps + 1):
        batch = None
        with run.step(step) as metrics:
            with whole_step(run, config, controls, step, metrics):
                read = read_step(step_file(source, step), config)
                batch, learnt = learn(config, run, roles, read, controls, step, texts)
                metrics |= learnt
            metrics |= roles.memory.report()
            if batch is not None:
                metrics |= watch(run, monitor, step, metrics, batch)
        checkpoints.after(step, metrics, last=step == num_steps or monitor.stop is not None)
        if monitor.stop is not None:
            break
