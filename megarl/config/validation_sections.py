"""Validation sets that are sampled in their own way: the values of `data.val_sets`."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.

from dataclasses import dataclass, fields, replace

from megarl.config.options import option
from megarl.config.sections import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class ValSetConfig:
    """One validation set; what is null here is as in rollout.val_kwargs."""

    files: str | tuple[str, ...] = option("Parquet files: a path, a glob, or a list.", is_path=True)
    max_samples: int | None = option(
        "The first so many rows of files; -1: all; null: data.val_max_samples (of an evaluation, data.max_samples).",
        None,
        ge=-1,
    )
    n: int | None = option("Responses a prompt; null: val_kwargs.n.", None, ge=1)
    temperature: float | None = option("0: greedy; null: that of val_kwargs.", None, ge=0)
    top_p: float | None = option(
        "Probability mass that is sampled from; null: that of val_kwargs.", None, gt=0, le=1
    )
    top_k: int | None = option(
        "Most probable tokens that are sampled from; -1: all; null: that of val_kwargs.", None, ge=-1
    )
    min_p: float | None = option("Null: that of val_kwargs.", None, ge=0, le=1)
    repetition_penalty: float | None = option("Null: that of val_kwargs.", None, gt=0, le=2)
    frequency_penalty: float | None = option("Null: that of val_kwargs.", None, ge=-2, le=2)
    presence_penalty: float | None = option("Null: that of val_kwargs.", None, ge=-2, le=2)
    pass_threshold: float | None = option("Score from which on an answer passes; null: val_kwargs'.", None)


def val_set_sampling(val_set: ValSetConfig, val_kwargs: SamplingConfig) -> SamplingConfig:
    """How a validation set is sampled: `val_kwargs`, where the set does not say otherwise."""
    own = {member.name: getattr(val_set, member.name) for member in fields(val_kwargs)}
    return replace(val_kwargs, **{name: value for name, value in own.items() if value is not None})
