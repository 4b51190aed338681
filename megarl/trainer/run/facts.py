"""The facts of a run: its configuration, batch arithmetic and `run.json` in its folder, and one screen of text when it starts.

`run.json` has the command, when and where the run started, versions, its GPUs, and how it ended. It is written again when the run has
its devices and when it ends; a run that was killed has no outcome. Every key of the configuration is in the folder's config.yaml.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megarl import __version__
from megarl.cluster import ResourcePool
from megarl.cluster.hosts import on_node
from megarl.config import (
    BatchPlan,
    TrainConfig,
    TuningBatchPlan,
    TuningConfig,
    batch_summary,
    batch_table,
    learns_rankings,
    needs_reference,
    needs_rules,
    save_batch_plan,
    save_config,
)
from megarl.models import ModelConfig, logical_tensors
from megarl.util.files import write_text
from megarl.util.gpus import gpus_here

RUN_FILE = "run.json"
FINISHED = "finished"
_PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "ray")
_NODE_SECONDS = 60.0  # that a machine may take to list its GPUs
_CLOCKS_APART = 2.0  # seconds between a process's start in run.json and the kernel's


@dataclass(frozen=True)
class RunGpus:
    """Equal GPUs of a run: their name by the driver, how many there are, and the bytes of memory of each."""

    name: str
    count: int
    memory: int


@dataclass(frozen=True)
class RunFacts:
    """The content of `run.json`.

    Attributes:
        command: as typed. started, ended: seconds since the epoch; None: it has not ended, or was killed.
        host, process: of the controller.
        versions: by package, Python's among them.
        outcome: FINISHED, or why the run ended before its last step; None: it has not ended, or was killed.
        gpus: empty: it has none, or not yet.
    """

    command: str
    started: float
    host: str
    process: int
    versions: dict[str, str]
    ended: float | None = None
    outcome: str | None = None
    gpus: tuple[RunGpus, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether the controller is alive; False on other machines than its own."""
        if (
            self.outcome is not None
            or self.host != socket.gethostname()
            or not psutil.pid_exists(self.process)
        ):
            return False
        return psutil.Process(self.process).create_time() <= self.started + _CLOCKS_APART


@contextmanager
def recorded(
    config: TrainConfig | TuningConfig, plan: BatchPlan | TuningBatchPlan, folder: Path
) -> Iterator[None]:
    """Write the facts of a run, and at the end of the block, however it ends, its outcome."""
    save_config(config, folder / "config.yaml")
    save_batch_plan(plan, folder)
    _write(folder, RunFacts(_command(), time.time(), socket.gethostname(), os.getpid(), _versions()))
    try:
        yield
    except BaseException as error:
        first_line = (str(error).splitlines() or [""])[0]
        outcome = f"{type(error).__name__}: {first_line}" if isinstance(error, Exception) else "told to end"
        with suppress(OSError):  # the disk may be full, or away: the caller has to see why the run ended
            _change(folder, ended=time.time(), outcome=outcome)
        raise
    _change(folder, ended=time.time(), outcome=FINISHED)


def record_gpus(pools: Iterable[ResourcePool], folder: Path) -> None:
    """Add the GPUs of these pools to the facts of the run in `folder`, if it has facts.

    All GPUs of a pool are assumed to equal the first GPU of its first machine; a machine that does not answer within a minute is left out.
    """
    found: Counter[tuple[str, int]] = Counter()
    for pool in pools:
        listed = on_node(pool.devices[0].node_id, _NODE_SECONDS, gpus_here) if pool.use_gpu else None
        if listed:
            found[listed[0].name, listed[0].memory] += len(pool)
    if found and (folder / RUN_FILE).is_file():
        _change(folder, gpus=tuple(RunGpus(name, count, memory) for (name, memory), count in found.items()))


def read_facts(folder: Path) -> RunFacts | None:
    """The facts of a run folder; None: it has none."""
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    gpus = tuple(RunGpus(**each) for each in found.pop("gpus", ()))
    return RunFacts(**found, gpus=gpus)


def _change(folder: Path, **changes: Any) -> None:
    facts = read_facts(folder)
    assert facts is not None, f"{folder} has no {RUN_FILE}"
    _write(folder, replace(facts, **changes))


def _write(folder: Path, facts: RunFacts) -> None:
    write_text(folder / RUN_FILE, json.dumps(asdict(facts), indent=2) + "\n")


def _command() -> str:
    """The command as typed, for all ways to start megarl (`megarl`, `python -m megarl`)."""
    program = Path(sys.argv[0])
    own = program.name == "megarl" or program.resolve().is_relative_to(Path(__file__).resolve().parents[2])
    return shlex.join(["megarl", *sys.argv[1:]] if own else sys.argv)


def _versions() -> dict[str, str]:
    """Versions of the installed packages."""
    found = {"megarl": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # such as SGLang where nothing is generated
            continue
    return found


Facts = Mapping[str, str]
"""Text about each input of a run: "model", "data", "validation", "critic", "reward model"."""


def model_text(path: str, model: ModelConfig) -> str:
    """A model in a line, such as "outputs/model: qwen2, 2 layers of 128, 0.3M parameters"."""
    number = sum(math.prod(shape) for shape in logical_tensors(model).values())
    size = f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
    return f"{path}: {model.family}, {model.num_layers} layers of {model.hidden_size}, {size} parameters"


def data_text(files: object, number: int, noun: str) -> str:
    """Data in a line, such as "data/train.parquet: 6,000 prompts"."""
    names = [files] if isinstance(files, str) else list(files) if isinstance(files, tuple) else []
    place = names[0] if names else "data.mixture"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{place}{more}: {number:,} {noun}"


def supervised_facts(
    config: TuningConfig, model: ModelConfig, training: int, validation: int | None
) -> Facts:
    """The facts of supervised training. `training`, `validation`: the number of examples; None: there are none."""
    noun = "rankings" if learns_rankings(config) else "examples"
    found = {
        "model": model_text(config.model.path, model),
        "data": data_text(config.data.train_files, training, noun),
    }
    if validation is not None:
        found["validation"] = data_text(config.data.val_files, validation, noun)
    return found


def opening_lines(
    config: TrainConfig | TuningConfig,
    plan: BatchPlan | TuningBatchPlan,
    total_steps: int,
    facts: Facts,
    folder: Path,
) -> list[str]:
    """Models, data, algorithm, batches, layouts, and the files that the run will write.

    Args:
        config: resolved.
        facts: of models and data; missing ones are taken from the configuration.
    """
    every = f", after every {config.trainer.test_freq} steps" if config.trainer.test_freq > 0 else ""
    shown = {"model": _model_path(config), **facts}
    if "validation" in shown:
        shown["validation"] += every
    if isinstance(config, TrainConfig):
        shown |= {"rewards": _rewards(config), "algorithm": _algorithm(config)}
    shown["steps"] = f"{total_steps}, each of {batch_summary(plan)}"
    width = max(map(len, shown))
    lines = [f"{name:<{width}}  {text}" for name, text in shown.items()]
    return [*lines, "", *_aligned(batch_table(plan)), "", *_places(config, folder)]


def _model_path(config: TrainConfig | TuningConfig) -> str:
    return config.actor_rollout_ref.model.path if isinstance(config, TrainConfig) else config.model.path


def _rewards(config: TrainConfig) -> str:
    custom, sources = config.custom_reward_function, []
    if config.reward_model.enable:
        sources.append(f"the reward model {config.reward_model.model.path}")
    if needs_rules(config):
        if custom.path is not None:
            sources.append(f"{custom.name} of {custom.path}")
        else:
            sources.append(
                f"the rule {config.reward.rule}"
                if config.reward.rule
                else "the rule of each row's data_source"
            )
    if config.actor_rollout_ref.rollout.multi_turn.enable:
        sources.append(f"the environment {config.actor_rollout_ref.rollout.multi_turn.environment}")
    if config.actor_rollout_ref.rollout.gateway.enable:
        gateway = config.actor_rollout_ref.rollout.gateway
        sources.append(f"the agent {gateway.agent or ' '.join(gateway.command)}")
    return ", ".join(sources)


def _algorithm(config: TrainConfig) -> str:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    parts = [f"adv_estimator={algorithm.adv_estimator}", f"lr {actor.optim.lr:g}"]
    if config.critic is not None:
        parts[-1] += f" (critic {config.critic.optim.lr:g})"
    if algorithm.use_kl_in_reward:
        parts.append(f"KL to the reference in the reward x {algorithm.kl_ctrl.kl_coef:g}")
    if actor.use_kl_loss:
        parts.append(f"KL to the reference in the loss x {actor.kl_loss_coef:g}")
    if not needs_reference(config):
        parts.append("no reference policy")
    return ", ".join(parts)


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _places(config: TrainConfig | TuningConfig, folder: Path) -> list[str]:
    """The files of the run folder, and the command that shows them."""
    trains = isinstance(config, TrainConfig)
    save = config.trainer.save_freq > 0 or config.trainer.save_minutes is not None
    names = [
        "config.yaml (every key)",
        "metrics.jsonl (a line a step)",
        *(["rollouts/ (trajectories)", "memory.txt (of the devices, by phase)"] if trains else []),
        *(["checkpoints/"] if save else []),
        "logs/ (of every process)",
        "hf/ (the model, at the end)",
    ]
    half = (len(names) + 1) // 2
    lines = [
        f"in {folder}: {', '.join(names[:half])},",
        f"  {', '.join(names[half:])}",
        f"to look at it, also while it runs: megarl report {folder}",
    ]
    if not save:
        lines.append(
            "no checkpoints: a run that ends early begins anew (trainer.save_freq=N saves one every N steps)"
        )
    if "tensorboard" in config.trainer.logger:
        lines[2] += f", or: tensorboard --logdir {folder}/tensorboard"
    return lines
