"""Checks of data: the files that are named are there."""

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.config.schema import TrainConfig

_GLOB_CHARACTERS = "*?["


def data_problems(config: TrainConfig, data_files: bool) -> Iterator[str]:
    """Of a resolved configuration.

    Args:
        data_files: whether the files must be there.
    """
    data, trainer = config.data, config.trainer
    if data_files:
        yield from file_problems("data.train_files", data.train_files)
        yield from file_problems("data.val_files", data.val_files)
    if data.val_files is None:
        if trainer.test_freq > 0:
            yield f"trainer.test_freq={trainer.test_freq} needs data.val_files"
        if trainer.val_before_train:
            yield "trainer.val_before_train=true needs data.val_files"


def file_problems(key: str, files: str | Sequence[str] | None) -> Iterator[str]:
    """`files`: a path, a glob or a list of both, each of which must lead to a file."""
    if files is None:
        return
    patterns = [files] if isinstance(files, str) else list(files)
    if not patterns:
        yield f"{key} is an empty list; give at least one file"
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            continue
        if path.is_dir():
            yield f"{key}: {pattern} is a folder; give the files in it, for example {pattern.rstrip('/')}/*.parquet"
        elif not any(character in pattern for character in _GLOB_CHARACTERS):
            yield f"{key}: the file {pattern} does not exist (working directory {Path.cwd()})"
        elif not any(Path(match).is_file() for match in glob.iglob(str(path), recursive=True)):
            yield f"{key}: no file matches {pattern} (working directory {Path.cwd()})"
