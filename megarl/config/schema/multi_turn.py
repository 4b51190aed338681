"""Section `rollout.multi_turn`: trajectories of several turns, with an environment that answers the policy."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.
# ruff: noqa: RUF009

from dataclasses import dataclass
from typing import Any

from megarl.config.schema.options import option

ENVIRONMENTS = ("calculator",)
TRUNCATE_SIDES = ("left", "right", "middle")


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig:
    """Trajectories of several turns. All turns together, the environment's too, have data.max_response_length tokens."""

    enable: bool = option("An environment answers the policy, in training, validation and evaluation.", False)
    environment: str | None = option(
        "The environment's name: calculator, or one that a file of plugins registers.", None
    )
    options: dict[str, Any] | None = option("What each of its objects is made with.", None)
    max_assistant_turns: int | None = option("Most turns of the policy; null: as tokens allow.", None, ge=1)
    max_user_turns: int | None = option("Most turns of the environment; null: as tokens allow.", None, ge=1)
    max_tool_response_length: int = option(
        "Characters of a text of the environment; longer ones are shortened.", 256, ge=1
    )
    tool_response_truncate_side: str = option(
        "What is kept of them: left the beginning, right the end, middle half of each.",
        "middle",
        choices=TRUNCATE_SIDES,
    )
    step_timeout: float = option(
        "Seconds that the environment may take for an answer; then its trajectory is given up.", 60.0, gt=0
    )
