"""Checks of what is noted of where a run's time goes."""

from collections.abc import Iterator

from megarl.config.schema.tracing import TracingConfig


def tracing_problems(trainer: TracingConfig) -> Iterator[str]:
    """Of the section `trainer` of a run that trains."""
    if not trainer.profile_steps and trainer.profile_ranks != TracingConfig().profile_ranks:
        yield "trainer.profile_ranks is of traces: give trainer.profile_steps"
