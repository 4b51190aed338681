"""The floors of a run's phases, for `megarl report`: by its own GPUs, configuration and lengths of trajectories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from megarl.config import TrainConfig, all_references, load_config, resolve
from megarl.costs.hardware import Assumptions, Hardware, find_hardware, hardware_of_card
from megarl.costs.speed import Machine
from megarl.plan.inputs import PlanInputs
from megarl.plan.job import plan_job
from megarl.plan.memory import GIB, plan_memory
from megarl.report.data import RunRecord
from megarl.report.phases import Floors
from megarl.trainer.run.earlier_runs import CONFIG_FILE

_GO_ON = ("generate", "score_model")  # with trainer.mode=fully_async, while the models learn


def run_floors(run: RunRecord, hardware: str | None) -> Floors:
    """The floors of a run, or why there are none.

    Args:
        hardware: name of its GPUs; None: those that the run has recorded.

    Raises:
        ValueError: `hardware` is not in the table.
    """
    gpu = _gpu_of(run) if hardware is None else find_hardware(hardware)
    if isinstance(gpu, str):
        return Floors({}, gpu)
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
        f"of {response:,.0f} tokens on average, by the first and the last saved step."
    )
    least = {phase.name: phase.floor for phase in job.phases}
    if config.trainer.mode == "fully_async":
        least = {phase: seconds for phase, seconds in least.items() if phase not in _GO_ON}
        words += (
            " Generation has none: it goes on while the models learn (trainer.mode=fully_async), and a step's seconds are only those for which "
            "the models wait."
        )
    return Floors(least, words)


def _gpu_of(run: RunRecord) -> Hardware | str:
    """The GPU that a run has recorded, or why it has no floors."""
    names = [] if run.facts is None else [card.name for card in run.facts.gpus]
    if len(names) != 1:
        why = f"GPUs are of several kinds, {', '.join(names)}" if names else "GPUs were not recorded"
        return f"No floors: the run's {why}, and none were named (--hardware NAME); the peaks of a CPU are not known."
    gpu = hardware_of_card(names[0])
    return gpu or f"No floors: the peaks of {names[0]} are not in the table (--hardware NAME takes others)."


def _models(config: TrainConfig) -> list[str]:
    """Folders of the models."""
    policy, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    found = [policy.model.path, policy.rollout.speculative.draft_path]
    found += [section.model.path for section in all_references(config).values()]
    found += [critic.model.path] if critic is not None else []
    found += [reward.model.path] if reward.enable else []
    return [path for path in found if path is not None]
