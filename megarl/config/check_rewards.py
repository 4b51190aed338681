"""Checks of where scores come from."""

from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema import EvalConfig, TrainConfig


def reward_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Of a resolved configuration."""
    path = config.custom_reward_function.path
    if path is None:
        return
    if not Path(path).expanduser().is_file():
        yield f"custom_reward_function.path: the file {path} does not exist (working directory {Path.cwd()})"
    elif not path.endswith(".py"):
        yield f"custom_reward_function.path: {path} is no .py file"
