"""Files that a new run finds in its folder: set aside, or continued from.

Guarantees:
- Nothing of an earlier run is overwritten or deleted, and no file of it is mixed with those of the new run. Files of the user's
  own (data, reward functions, recipes under other names) stay where they are.
- A run continues from a checkpoint only if the configuration and the facts of the models that were saved with it allow that.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoints import read_checkpoint, steps_in
from megarl.checkpoints.manifest import folder_name
from megarl.config import EvalConfig, TrainConfig, TuningConfig
from megarl.config.checks.run import changed_keys, refused_changes
from megarl.config.schema import walk_values
from megarl.models import COMPANIONS, read_model_config
from megarl.util.files import naming

EARLIER_RUNS = "earlier_runs"
# One of these is in every run's folder.
MARKS = ("config.yaml", "metrics.jsonl")
ENTRIES = (
    *MARKS,
    "batch_plan.json",
    "memory.txt",
    "run.json",
    "health.jsonl",
    "reward_errors.jsonl",
    "timeline.json",
    "timeline.earlier.json",
    "report.html",
    "scores.json",
    "trajectories*.parquet",
    "tensorboard",
    "wandb",
    "swanlog",
    "logs",
    "agents",
    "failures",
    "rollouts",
    "profiles",
    "replays",
    "hf",
    "adapter",
    "best",
)
ROLLOUTS = ("step-*.parquet", "val*-*.parquet")  # in trainer.rollout_data_dir


def set_aside_earlier_run(
    config: TrainConfig | TuningConfig | EvalConfig, say: Callable[[str], None]
) -> Path | None:
    """Move the files of an earlier run out of the way of a new one, into `<run folder>/earlier_runs/<n>`.

    Where `trainer.rollout_data_dir` is elsewhere, its trajectories are moved to `earlier_runs/<n>` there.

    Args:
        config: of the new run, resolved.

    Returns:
        The folder that the earlier run's files are in now; None: there was no earlier run.

    Raises:
        ValueError: the new run reads a file that would be moved; names the key. Nothing has been moved then.
    """
    folder = Path(config.trainer.default_local_dir)
    steps = steps_in(folder / CHECKPOINTS)
    entries = _matching(folder, ENTRIES) if steps or any((folder / mark).exists() for mark in MARKS) else []
    rollouts, outside = None, []
    if isinstance(config, TrainConfig):
        rollouts = Path(config.trainer.rollout_data_dir)
        outside = [] if _is_within(rollouts, entries) else _matching(rollouts, ROLLOUTS)
    if not entries and not outside and not steps:
        return None
    checkpoints = [folder / CHECKPOINTS / folder_name(step) for step in steps]
    _require_unread(config, [*entries, *outside, *checkpoints])
    target = None
    if entries or steps:
        target = _first_free(folder / EARLIER_RUNS, "")
        _move(entries, target)
        say(f"{folder} holds an earlier run: it was moved to {target}")
        move_checkpoints(folder / CHECKPOINTS, 0, target / CHECKPOINTS, say)
    if outside:
        assert rollouts is not None
        kept = _first_free(rollouts / EARLIER_RUNS, "")
        _move(outside, kept)
        say(f"{rollouts} holds an earlier run's trajectories: they were moved to {kept}")
    return target


def move_checkpoints(root: Path, first_step: int, target: Path | None, say: Callable[[str], None]) -> None:
    """Move the checkpoints from `first_step` on, good or not, from the folder `root` into a new folder.

    Args:
        target: the new folder; None: the first of `<root>-1`, `<root>-2`, ... that is not there yet. Where `root` is a mount point,
            out of which moving would be copying, it is `aside-<n>` in `root`.
    """
    steps = [step for step in steps_in(root) if step >= first_step]
    if not steps:
        return
    paths = [root / folder_name(step) for step in steps]
    target = target or _first_free(root.parent, f"{root.name}-")
    try:
        _move(paths, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        target.rmdir()
        target = _first_free(root, "aside-")
        _move(paths, target)
    say(f"checkpoints of steps {', '.join(map(str, steps))} are not of this run's history: moved to {target}")


def _first_free(parent: Path, prefix: str) -> Path:
    """The first of `<prefix>1`, `<prefix>2`, ... in `parent` that is not there yet."""
    number = 1
    while (path := parent / f"{prefix}{number}").exists():
        number += 1
    return path


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def _move(paths: Sequence[Path], target: Path) -> None:
    """Move files and folders into the folder `target`, which is made."""
    with naming(target):
        target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        with naming(target / path.name):
            path.rename(target / path.name)


def _require_unread(config: TrainConfig | TuningConfig | EvalConfig, moved: Sequence[Path]) -> None:
    for key, text in _inputs(config):
        if _is_within(Path(text), moved):
            raise ValueError(
                f"{key}={text} is a file of the run in {config.trainer.default_local_dir}, which a new run would move out of "
                "its way: give the new run another trainer.default_local_dir"
            )


def _inputs(config: TrainConfig | TuningConfig | EvalConfig) -> Iterator[tuple[str, str]]:
    """(key, path) of all files and folders that a run reads."""
    written = ("trainer.default_local_dir", "trainer.rollout_data_dir")
    for key, member, value in walk_values(config):
        if member.metadata.get("is_path") and key not in written and value is not None:
            yield from ((key, text) for text in ([value] if isinstance(value, str) else value))


def _is_within(path: Path, places: Sequence[Path]) -> bool:
    """Whether a path is one of `places`, or in one that is a folder."""
    path = path.resolve()
    return any(path.is_relative_to(place.resolve()) for place in places)


CHECKPOINTS = "checkpoints"  # in the run folder
CONFIG_FILE = "config.yaml"
# Facts of a model that may change: the format of its files, and its maximum sequence length.
_FREE = frozenset({"hf", "architecture", "dtype", "fp8_block", "num_mtp_layers", "max_position_embeddings"})


def refusals(config: TrainConfig | TuningConfig, folder: Path) -> list[str]:
    """The reasons why a run cannot continue from the checkpoint in a folder, a line each; only its facts are read.

    Args:
        config: resolved.

    Raises:
        ValueError: a model's configuration cannot be read.
    """
    changes = changed_keys(config, folder / CONFIG_FILE)
    return [*refused_changes(changes), *_other_models(config, folder)]


def likely_refusals(config: TrainConfig | TuningConfig) -> list[str]:
    """`refusals` for the checkpoint that a run would continue from if that is complete; empty without one."""
    folder = checkpoint_to_resume(config)
    found = [] if folder is None else refusals(config, folder)
    return [f"the run cannot go on from {folder}: {reason}" for reason in found]


def checkpoint_to_resume(config: TrainConfig | TuningConfig) -> Path | None:
    """The folder of the checkpoint that a run continues from if its files are complete, which is not checked; None: there is none.

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
        except ValueError:  # not a checkpoint: try an older one
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
        given = read_model_config(path)
        # Only weights tell these facts of a `model_type` without a family, and `saved` has none.
        parts = {"qkv_bias": given.qkv_bias, "qk_norm": given.qk_norm}
        differing = list(_differences(read_model_config(str(saved), parts), given))
        if differing:
            yield (
                f"{key}={path} is another model than the one that was saved: {', '.join(differing)}; give that one, another "
                "trainer.default_local_dir, or trainer.resume_mode=disable"
            )


def _differences(before: Any, after: Any, prefix: str = "") -> Iterator[str]:
    """Facts in which two models differ, as "hidden_size was 64, is 32"."""
    for member in fields(before):
        old, new = getattr(before, member.name), getattr(after, member.name)
        if old == new or member.name in _FREE:
            continue
        if is_dataclass(old) and is_dataclass(new):
            yield from _differences(old, new, f"{prefix}{member.name}.")
        else:
            yield f"{prefix}{member.name} was {old!r}, is {new!r}"
