"""Whether a run can go on from a checkpoint: the configuration, and the facts of the models, that were saved with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoints import read_checkpoint, steps_in
from megarl.checkpoints.manifest import folder_name
from megarl.config import TrainConfig, TuningConfig
from megarl.config.resume import changed_keys, refused_changes
from megarl.models import COMPANIONS, read_model_config

CHECKPOINTS = "checkpoints"  # in the run folder
CONFIG_FILE = "config.yaml"
# What of a model may be otherwise: how its files are, and how long its texts may be.
_FREE = frozenset({"hf", "architecture", "dtype", "fp8_block", "num_mtp_layers", "max_position_embeddings"})


def refusals(config: TrainConfig | TuningConfig, folder: Path) -> list[str]:
    """Why a run cannot go on from the checkpoint in a folder, whose files are not looked at; a line each.

    Args:
        config: resolved.

    Raises:
        ValueError: a model's configuration cannot be read.
    """
    changes = changed_keys(config, folder / CONFIG_FILE)
    return [*refused_changes(changes), *_other_models(config, folder)]


def likely_refusals(config: TrainConfig | TuningConfig) -> list[str]:
    """`refusals` for the checkpoint that a run would go on from if that is whole; none where there is none."""
    folder = checkpoint_to_go_on_from(config)
    found = [] if folder is None else refusals(config, folder)
    return [f"the run cannot go on from {folder}: {reason}" for reason in found]


def checkpoint_to_go_on_from(config: TrainConfig | TuningConfig) -> Path | None:
    """The folder of the checkpoint that a run goes on from if its files are whole, which nobody has looked at; None: there is none.

    Args:
        config: resolved.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable" or (isinstance(config, TrainConfig) and config.trainer.rollout_only):
        return None
    if trainer.resume_mode == "path":
        folders = [Path(trainer.resume_from_path or "")]
    else:
        root = Path(trainer.default_local_dir) / CHECKPOINTS
        folders = [root / folder_name(step) for step in reversed(steps_in(root))]
    for folder in folders:
        try:
            read_checkpoint(folder)
        except ValueError:  # it is none: an older one counts, or the run says so
            continue
        if (folder / CONFIG_FILE).is_file():
            return folder
    return None


def _other_models(config: TrainConfig | TuningConfig, folder: Path) -> Iterator[str]:
    if isinstance(config, TuningConfig):
        paths = {"model.path": (config.model.path, "model")}
    else:
        paths = {"actor_rollout_ref.model.path": (config.actor_rollout_ref.model.path, "actor")}
        if config.critic is not None:
            paths["critic.model.path"] = (config.critic.model.path, "critic")
    for key, (path, role) in paths.items():
        saved = folder / role / COMPANIONS
        if not all((where / "config.json").is_file() for where in (saved, Path(path).expanduser())):
            continue
        differing = list(_differences(read_model_config(str(saved)), read_model_config(path)))
        if differing:
            yield (
                f"{key}={path} is another model than the one that was saved: {', '.join(differing)}; give that one, another "
                "trainer.default_local_dir, or trainer.resume_mode=disable"
            )


def _differences(before: Any, after: Any, prefix: str = "") -> Iterator[str]:
    """Facts of models that are not the same, as "hidden_size was 64, is 32"."""
    for member in fields(before):
        old, new = getattr(before, member.name), getattr(after, member.name)
        if old == new or member.name in _FREE:
            continue
        if is_dataclass(old) and is_dataclass(new):
            yield from _differences(old, new, f"{prefix}{member.name}.")
        else:
            yield f"{prefix}{member.name} was {old!r}, is {new!r}"
