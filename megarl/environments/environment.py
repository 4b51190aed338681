"""The interface of environments, and the registry of their names.

A user adds one by a class in a file that the recipe names in `plugins`:

    from megarl.environments.environment import Environment, StepResult, register_environment

    @register_environment("guess")
    class Guess(Environment):
        def reset(self, task):
            self.number = int(task.ground_truth)

        def step(self, turn):
            guess = int(turn.text)
            if guess == self.number:
                return StepResult(done=True, score=1.0)
            return StepResult("higher" if guess < self.number else "lower", score=0.0)

An object is made for each trajectory, with `multi_turn.options` as its keyword arguments, and is used by one call at a
time. Methods that are `async def` run on the engine's event loop, between its requests, and must not block; others run
in a thread of their own. All environments of an engine live in its process.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.util.plugins import Registry

Message = Mapping[str, Any]
"""A chat message: role, content and further keys that the model's template reads."""

Observation = str | Sequence[Message]
"""The environment's words to the policy. Messages go through the chat template, and open the assistant's next turn. A text is
appended unchanged to the policy's text: for environments that stop the policy inside a turn (`rollout.stop_token_ids`)."""


@dataclass(frozen=True)
class Task:
    """The task of a trajectory.

    Attributes:
        uid: the trajectory's: "<prompt uid>/<sample number>".
        prompt: its text, without special tokens.
        messages: its chat messages; None without data.return_raw_input_ids=true.
        extra_info: the field of that name in the data's row.
        template_kwargs: further arguments of the chat template for this chat, such as the row's `tools`; None:
            `data.apply_chat_template_kwargs`.
    """

    uid: str
    prompt: str
    messages: Sequence[Message] | None
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any]
    template_kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Turn:
    """A turn of the policy.

    Attributes:
        number: 0 for the first.
        text: without special tokens.
        token_ids: as they were sampled, an end token included.
        finish_reason: "stop"; "length": the trajectory's tokens are used up, and the observation will not be read.
    """

    number: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str


@dataclass(frozen=True)
class StepResult:
    """An environment's answer to a turn.

    Attributes:
        observation: the words to the policy before its next turn; None ends the trajectory, as `done` does.
        score: score of the trajectory, in place of the reward's; the last given score counts.
        numbers: metrics, added up over the turns.
        state: the state that the environment is in now, if the observation does not say it; turns of a prompt's trajectories that begin in
            the same state are compared by `algorithm.adv_estimator=gigpo`.
    """

    observation: Observation | None = None
    done: bool = False
    score: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    state: str | None = None


class Environment(ABC):
    """One trajectory's counterpart. Any of its methods may be `async def`, or not."""

    async def reset(self, task: Task) -> Observation | None:
        """Begin. An observation is added to the prompt: messages before the policy's turn is opened, a text after it."""
        return None

    @abstractmethod
    def step(self, turn: Turn) -> StepResult | Awaitable[StepResult]:
        """Answer a turn; called after each one, also the last."""

    async def close(self) -> None:
        """The trajectory is over, also after an error."""
        return None


ENVIRONMENTS: Registry[type[Environment]] = Registry("environment", "rollout.multi_turn.environment")
register_environment = ENVIRONMENTS.register
