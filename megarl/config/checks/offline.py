"""Checks of runs that only generate, or only train."""

from collections.abc import Iterator
from pathlib import Path

from megarl.config.schema.commands import TrainConfig


def halves_problems(config: TrainConfig) -> Iterator[str]:
    """Of trainer.rollout_only and trainer.train_only; `config` is resolved."""
    trainer = config.trainer
    if not trainer.rollout_only and trainer.train_only is None:
        return
    key = "trainer.rollout_only" if trainer.rollout_only else "trainer.train_only"
    if trainer.rollout_only and trainer.train_only is not None:
        yield "trainer.rollout_only and trainer.train_only: give one of them, or neither, which is both in turns"
    validating = {"test_freq=-1": trainer.test_freq > 0, "val_before_train=false": trainer.val_before_train}
    for off in (off for off, given in validating.items() if given):
        name = off.partition("=")[0]
        yield f"trainer.{name}: with {key} nothing is validated; megarl eval does that. Set trainer.{off}"
    if trainer.rollout_only:
        yield from _rollout_only_problems(config)
    elif trainer.train_only is not None and not Path(trainer.train_only).is_dir():
        yield f"trainer.train_only={trainer.train_only}: there is no such folder"


def _rollout_only_problems(config: TrainConfig) -> Iterator[str]:
    trainer = config.trainer
    saving = {
        "save_freq=-1": trainer.save_freq > 0,
        "save_minutes=null": trainer.save_minutes is not None,
        "best_metric=null": trainer.best_metric is not None,
        "max_run_minutes=null": trainer.max_run_minutes is not None,
        "checkpoint_url=null": trainer.checkpoint_url is not None,
        "resume_from_path=null": trainer.resume_from_path is not None,
    }
    for off in (off for off, given in saving.items() if given):
        name = off.partition("=")[0]
        yield f"trainer.{name}: with trainer.rollout_only no model changes, and there are no checkpoints; set trainer.{off}"
    if config.actor_rollout_ref.model.lora.rank:
        yield (
            "actor_rollout_ref.model.lora.rank: trainer.rollout_only has no adapters; leave it out, or give the merged model "
            "(the folder hf of the run that trained them) as actor_rollout_ref.model.path"
        )
