"""Sections that say where scores come from."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.

from dataclasses import dataclass

from megarl.config.options import option


@dataclass(frozen=True, kw_only=True)
class CustomRewardConfig:
    """A reward function of the user's."""

    path: str | None = option(
        "A .py file; null: the rule that belongs to each row's data_source.", None, is_path=True
    )
    name: str = option("The function in it.", "compute_score")
