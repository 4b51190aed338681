"""The floors of a run's phases, for `megarl report --hardware NAME`: by its own configuration and the lengths of its trajectories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from megarl.config import TrainConfig, load_config, resolve
from megarl.costs.hardware import Assumptions, find_hardware
from megarl.costs.speed import Machine
from megarl.plan.inputs import PlanInputs
from megarl.plan.job import plan_job
from megarl.plan.memory import GIB, plan_memory
from megarl.report.data import RunRecord
from megarl.report.phases import Floors
from megarl.trainer.run.earlier_runs import CONFIG_FILE


def run_floors(run: RunRecord, hardware: str | None) -> Floors:
    """The floors of a run, or why there are none.

    Args:
        hardware: name of its GPUs; None: it was not given, as for a run on a CPU, whose peaks are in no table.

    Raises:
        ValueError: `hardware` is not in the table.
    """
    if hardware is None:
        return Floors(
            {},
            "No floors: the run's GPUs were not named (--hardware NAME); the peaks of a CPU are not known.",
        )
    gpu = find_hardware(hardware)
    if "actor_rollout_ref" not in run.config:
        return Floors({}, "No floors: they are computed for `megarl train` alone.")
    if not run.lengths:
        return Floors(
            {}, "No floors: the lengths of the run's trajectories are not known (no file of them was saved)."
        )
    config = resolve(load_config(TrainConfig, str(run.folder / CONFIG_FILE), []))
    missing = [path for path in _models(config) if not (Path(path) / "config.json").is_file()]
    if missing:
        return Floors({}, f"No floors: {missing[0]}, a model of the run, is not on this machine.")
    prompt, response = (
        fmean(length for lengths in run.lengths.values() for length in lengths[name])
        for name in ("prompt", "response")
    )
    assumed = replace(
        Assumptions(),
        prompt=prompt / config.data.max_prompt_length,
        response=response / config.data.max_response_length,
    )
    machine, inputs = Machine(gpu, assumed, config.trainer.n_gpus_per_node), PlanInputs.read(config)
    memory = plan_memory(config, inputs, round(gpu.memory_gib * GIB))
    job = plan_job(config, inputs, machine, memory, sync=False)
    words = (
        f"Floors are the least seconds of the same work by the peaks of {job.devices} {gpu.name}, with prompts of {prompt:,.0f} and responses "
        f"of {response:,.0f} tokens on average, those of the first and the last saved step."
    )
    return Floors({phase.name: phase.floor for phase in job.phases}, words)


def _models(config: TrainConfig) -> list[str]:
    """Folders of the models."""
    critic, reward = config.critic, config.reward_model
    found = [config.actor_rollout_ref.model.path]
    found += [critic.model.path] if critic is not None else []
    found += [reward.model.path] if reward.enable else []
    return [path for path in found if path is not None]
