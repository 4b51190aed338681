"""Checks of when a run is saved, and from where it goes on."""

from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema.saving import SavingConfig
from megarl.util.files import check_url, is_url


def saving_problems(trainer: SavingConfig, test_freq: int) -> Iterator[str]:
    """Of the section `trainer` of a run that validates every `test_freq` steps (-1: never)."""
    if trainer.resume_mode == "path" and trainer.resume_from_path is None:
        yield "trainer.resume_mode=path needs trainer.resume_from_path, the folder of a checkpoint"
    if trainer.resume_mode != "path" and trainer.resume_from_path is not None:
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path} is for trainer.resume_mode=path, which is "
            f"{trainer.resume_mode}"
        )
    if trainer.resume_from_path is not None and not Path(trainer.resume_from_path).is_dir():
        yield f"trainer.resume_from_path={trainer.resume_from_path}: there is no such folder"
    if trainer.best_metric is not None and test_freq <= 0:
        yield f"trainer.best_metric={trainer.best_metric!r} is of validations: it needs trainer.test_freq"
    if trainer.checkpoint_url is not None:
        if not is_url(trainer.checkpoint_url):
            yield (
                f"trainer.checkpoint_url={trainer.checkpoint_url!r} must be a URL, such as s3://bucket/run; a folder that is "
                "mounted is given as trainer.default_local_dir"
            )
        else:
            try:
                check_url(trainer.checkpoint_url)
            except ValueError as error:
                yield f"trainer.checkpoint_url: {error}"
    yield from _idle_keys(trainer)


def _idle_keys(trainer: SavingConfig) -> Iterator[str]:
    """Keys of checkpoints in a run that saves none."""
    if trainer.save_freq > 0 or trainer.save_minutes is not None or trainer.best_metric is not None:
        return
    given = {
        "keep_every": trainer.keep_every is not None,
        "save_hf": trainer.save_hf,
        "async_save": trainer.async_save,
    }
    for name in (name for name, there in given.items() if there):
        yield f"trainer.{name} is of checkpoints: give trainer.save_freq or trainer.save_minutes"
