"""Keys of every run that trains: what is noted of where its time goes."""

from dataclasses import dataclass

from megarl.config.schema.options import option


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """What each process does and when."""

    timeline_mb: int = option(
        "MB that <run folder>/timeline.json may take: what every process did and when, as ui.perfetto.dev shows it. Of a longer "
        "run it has the newest, in two files (timeline.earlier.json). 0: none.",
        64,
        ge=0,
    )
    profile_steps: tuple[int, ...] = option(
        "Steps in which ranks with a Megatron model write traces of torch.profiler: <run folder>/profiles/step-<n>/"
        "<role>-rank<r>.json, for ui.perfetto.dev. These steps are slower.",
        (),
        ge=1,
    )
    profile_ranks: tuple[int, ...] = option(
        "Which ranks of each role profile_steps is of; a role with fewer ranks leaves the others out.",
        (0,),
        ge=0,
    )
