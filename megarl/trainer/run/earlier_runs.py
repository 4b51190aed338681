"""A run that begins anew in the folder of an earlier run leaves that run's files whole, in a folder of their own.

Guarantees: nothing of an earlier run is overwritten or deleted, and no file of it is mixed with those of the new run. Files of the
user's own (data, reward functions, recipes under other names) stay where they are.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megarl.checkpoints import steps_in
from megarl.checkpoints.manifest import folder_name
from megarl.config import EvalConfig, TrainConfig, TuningConfig
from megarl.config.schema.options import walk_values
from megarl.trainer.run.resumed import CHECKPOINTS
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
            which nothing can be moved out of without a copy, it is `aside-<n>` in `root`.
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
    say(f"checkpoints of steps {', '.join(map(str, steps))} are not of this run's course: moved to {target}")


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
    """(key, path) of all that a run reads."""
    written = ("trainer.default_local_dir", "trainer.rollout_data_dir")
    for key, member, value in walk_values(config):
        if member.metadata.get("is_path") and key not in written and value is not None:
            yield from ((key, text) for text in ([value] if isinstance(value, str) else value))


def _is_within(path: Path, places: Sequence[Path]) -> bool:
    """Whether a path is one of `places`, or in one that is a folder."""
    path = path.resolve()
    return any(path.is_relative_to(place.resolve()) for place in places)
