"""PPO and GRPO: the loop. Each line is a stage; where it runs is in `roles`."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from megarl.algorithms.kl import make_kl_controller
from megarl.config import TrainConfig
from megarl.data.loader import TableLoader
from megarl.rollout.engine import SamplingParams
from megarl.trainer import rollouts, scoring
from megarl.trainer.advantages import compute_batch_advantages
from megarl.trainer.export import export_hf
from megarl.trainer.inputs import TrainInputs, load_train_inputs
from megarl.trainer.roles import Roles, start_roles
from megarl.trainer.run import Run, open_run
from megarl.trainer.stages import evaluate_models, throughput
from megarl.trainer.sync import sync_weights
from megarl.trainer.updates import update


def train(config: TrainConfig) -> str:
    """Train the policy as `config` (resolved) says; returns the folder of the exported Hugging Face model."""
    inputs = load_train_inputs(config)
    with open_run(config, total_steps=inputs.num_steps) as run:
        if inputs.num_filtered:
            run.say(f"left out {inputs.num_filtered} prompts over data.max_prompt_length")
        roles = start_roles(config, run, inputs.model, inputs.num_steps)
        train_steps(config, run, roles, inputs)
        with roles.memory.held("export"):
            return export_hf(run, roles.actor.group, config.actor_rollout_ref.model)


def train_steps(config: TrainConfig, run: Run, roles: Roles, inputs: TrainInputs) -> None:
    algorithm, rollout = config.algorithm, config.actor_rollout_ref.rollout
    control, phase = algorithm.kl_ctrl, roles.memory.phase
    kl = make_kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
    if config.trainer.val_before_train:
        with run.step(0) as metrics:
            metrics |= sync_and_validate(config, run, roles, inputs, step=0)
    for step, prompts in training_steps(inputs.loader, inputs.num_steps):
        seed = config.trainer.seed * 1_000_003 + step
        with run.step(step) as metrics:
            with phase("sync"):
                metrics |= sync_weights(run, roles, version=step)
            with phase("generate"):
                sampling = rollout_sampling(config, step)
                batch = rollouts.generate(run, roles.engines, prompts, sampling, rollout.n)
            with run.timed("reward"):
                batch, extra = scoring.score(batch, inputs.tokenizer, inputs.reward)
            with phase("evaluate_models"):
                batch = evaluate_models(run, roles, batch, seed)
            with run.timed("advantages"):
                batch, more = compute_batch_advantages(batch, algorithm, kl)
            with run.timed("update"):
                metrics |= extra | more | update(run, roles, batch, config, step, seed)
            run.save_trajectories(batch, "step", step)
            metrics |= throughput(batch, run.seconds)
            if due(config.trainer.test_freq, step, inputs.num_steps):
                metrics |= sync_and_validate(config, run, roles, inputs, step)
            metrics |= roles.memory.report()


def training_steps(loader: TableLoader, num_steps: int) -> Iterator[tuple[int, pa.Table]]:
    """(step from 1, its prompts), over as many epochs as `num_steps` needs."""
    step = 0
    while step < num_steps:
        for prompts in loader:
            step += 1
            yield step, prompts
            if step == num_steps:
                return


def due(freq: int, step: int, last: int) -> bool:
    """Whether validation is due after `step`: every `freq` steps and after the last; never with -1."""
    return freq > 0 and (step % freq == 0 or step == last)


def rollout_sampling(config: TrainConfig, step: int) -> SamplingParams:
    """How a step's rollouts are sampled: new noise each step, the same in a run that is repeated."""
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=config.data.max_response_length,
        seed=rollout.seed * 1_000_003 + step,
    )


def sync_and_validate(
    config: TrainConfig, run: Run, roles: Roles, inputs: TrainInputs, step: int
) -> dict[str, float]:
    """The mean score, on the validation prompts, of the policy after `step` (0: before the first), which is synced
    for it: step 0's metrics are those of that sync, too."""
    if inputs.validation is None:
        return {}
    val = config.actor_rollout_ref.rollout.val_kwargs
    sampling = SamplingParams(
        temperature=val.temperature,
        top_p=val.top_p,
        top_k=val.top_k,
        max_new_tokens=config.data.max_response_length,
        seed=config.trainer.seed,
    )
    with run.timed("validate"):
        with roles.memory.held("sync"):
            synced = sync_weights(run, roles, version=step + 1)
        with roles.memory.held("generate"):
            answers, metrics = rollouts.validate(
                run, roles.engines, inputs.validation, sampling, val.n, inputs.tokenizer, inputs.reward,
                config.data.val_batch_size,
            )  # fmt: skip
        run.save_trajectories(answers, "val", step)
    # A step reports the sync of its own rollouts; before the first there is none, and this is the run's first sync.
    return metrics if step else metrics | synced
