"""Trajectories of several turns: the policy and an environment, one after the other.

Guarantees, each asserted by a test:

- what is asked for a turn is token by token what the response will hold: prompt, what was generated, what the
  environment said; nothing that was generated is tokenised again;
- tokens that the policy did not choose are false in `response_mask` and 0 in the log-probs, and a response ends with
  one that it did choose;
- all turns together, the environment's words included, have at most `max_new_tokens` tokens;
- the noise of turn k depends on (seed, uid, k) only; that of the first turn is that of a single one;
- an environment that raises, or takes longer than its limit, costs its trajectory: the error is recorded, the whole
  response masked. Others go on meanwhile.
"""

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.environments.environment import Environment, Observation, StepResult, Task, Turn
from megarl.rollout.engine import Generation, SamplingParams
from megarl.rollout.observations import Continuation, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")
Answer = Callable[[str, Sequence[int], SamplingParams], Awaitable[Generation]]
"""(uid, token ids, sampling) -> the response: `RolloutEngine.answer`."""

MAX_THREADS = 64  # of environments that are no coroutines, at a time


@dataclass(frozen=True)
class TurnLimits:
    """How far a trajectory may go.

    Attributes:
        max_assistant_turns, max_user_turns: turns of the policy, and of the environment; None: as tokens allow.
        max_characters: of a text of the environment; longer ones are shortened.
        keep_side: what is kept of them, see `shorten`.
        step_timeout: seconds that one call of the environment may take.
    """

    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_characters: int = 256
    keep_side: str = "middle"
    step_timeout: float = 60.0


class EnvironmentFailed(Exception):
    """A call of an environment raised, took too long, or returned what it must not."""


class Player:
    """Plays trajectories with environments of one class."""

    def __init__(
        self,
        make: Callable[[], Environment],
        limits: TurnLimits,
        tokenizer: "PreTrainedTokenizerBase",
        answer: Answer,
        stop_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`stop_token_ids`: those of the engine that are not the model's end tokens."""
        self._make, self._limits, self._tokenizer, self._answer = make, limits, tokenizer, answer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._template_kwargs = template_kwargs
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def play(
        self, task: Task, prompt_ids: Sequence[int], sampling: SamplingParams, weight_version: int
    ) -> Generation:
        """One trajectory, to its end. What the engine raises is raised; what the environment raises is recorded."""
        keywords = self._template_kwargs if task.template_kwargs is None else task.template_kwargs
        continuation = Continuation(self._tokenizer, keywords)
        draft = _Draft(task.uid, list(prompt_ids), len(prompt_ids) + sampling.max_new_tokens)
        environment: Environment | None = None
        try:
            environment = await self._call("__init__", self._make)
            await self._reset(environment, task, draft, continuation)
            await self._turns(environment, draft, sampling, continuation)
            error = None
        except EnvironmentFailed as failure:
            error = str(failure)
        if environment is not None:
            try:
                await self._call("close", environment.close)
            except EnvironmentFailed as failure:
                error = error or str(failure)
        return draft.generation(prompt_ids, weight_version, error)

    async def _reset(
        self, environment: Environment, task: Task, draft: "_Draft", continuation: Continuation
    ) -> None:
        observation = await self._call("reset", environment.reset, task)
        if observation is None:
            return
        said = self._shorten(observation)
        draft.prompt_ids = _rendered(partial(continuation.after_prompt, draft.prompt_ids, said))
        if draft.room < 1:
            raise EnvironmentFailed("reset: what it says leaves no room for a response")

    async def _turns(
        self, environment: Environment, draft: "_Draft", sampling: SamplingParams, continuation: Continuation
    ) -> None:
        limits = self._limits
        while True:
            number = draft.num_turns
            uid = draft.uid if number == 0 else f"{draft.uid}#{number}"
            asked = replace(sampling, max_new_tokens=draft.room)
            generation = await self._answer(uid, [*draft.prompt_ids, *draft.ids], asked)
            draft.add_turn(generation)
            ids = list(generation.response_ids)
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            result = await self._call(
                "step", environment.step, Turn(number, text, ids, generation.finish_reason)
            )
            draft.note(result)
            if result.done or not result.observation or generation.finish_reason == "length":
                return
            if draft.num_turns == limits.max_assistant_turns or number == limits.max_user_turns:
                return
            said = self._shorten(result.observation)
            ended_by = None if ids[-1] in self._stop_token_ids else ids[-1]
            said_ids = _rendered(partial(continuation.after_turn, said, ended_by is not None, ended_by))
            if len(said_ids) >= draft.room:
                draft.finish_reason = "length"
                return
            draft.add_observation(said_ids)

    def _shorten(self, observation: Observation) -> Observation:
        _check_observation(observation)
        return shorten(observation, self._limits.max_characters, self._limits.keep_side)

    async def _call(self, what: str, method: Callable[..., Any], *args: Any) -> Any:
        """Call the environment, within its time.

        Raises:
            EnvironmentFailed: it raised, or did not end in time; a thread that hangs is left behind.
        """
        timeout = self._limits.step_timeout
        try:
            if inspect.iscoroutinefunction(method):
                return await asyncio.wait_for(method(*args), timeout)
            async with self._threads:
                return await asyncio.wait_for(_in_thread(method, *args), timeout)
        except TimeoutError:
            raise EnvironmentFailed(f"{what}: no answer within {timeout:g} s") from None
        except Exception as error:  # whatever a user's code raises
            raise EnvironmentFailed(f"{what}: {type(error).__name__}: {error}") from error


@dataclass
class _Draft:
    """A trajectory in the making."""

    uid: str
    prompt_ids: list[int]
    most_tokens: int  # of prompt and response
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_turns: int = 0
    finish_reason: str = "stop"
    score: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    versions: tuple[int, int] | None = None  # of the weights that chose the first token, and the last one

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.most_tokens - len(self.prompt_ids) - len(self.ids)

    def add_turn(self, generation: Generation) -> None:
        self.num_turns += 1
        self.finish_reason = generation.finish_reason
        first, last = generation.weight_version, generation.last_weight_version
        self.versions = (
            first if self.versions is None else self.versions[0],
            first if last is None else last,
        )
        self._add(generation.response_ids, generation.log_probs, True)

    def add_observation(self, ids: Sequence[int]) -> None:
        self._add(ids, [0.0] * len(ids), False)

    def _add(self, ids: Sequence[int], log_probs: Sequence[float], chosen: bool) -> None:
        self.ids.extend(ids)
        self.log_probs.extend(log_probs)
        self.mask.extend([chosen] * len(ids))

    def note(self, result: StepResult) -> None:
        """Score and numbers of a step.

        Raises:
            EnvironmentFailed: it is no StepResult, or they are no finite numbers.
        """
        if not isinstance(result, StepResult):
            raise EnvironmentFailed(f"step: it returned {result!r}, not a StepResult")
        given = {**result.numbers, **({} if result.score is None else {"score": result.score})}
        for name, value in given.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise EnvironmentFailed(f"step: {name}={value!r} is no finite number")
        if result.score is not None:
            self.score = float(result.score)
        for name, value in result.numbers.items():
            self.numbers[name] = self.numbers.get(name, 0.0) + float(value)

    def generation(self, asked: Sequence[int], weight_version: int, error: str | None) -> Generation:
        """The trajectory; after an error all of it is masked.

        Args:
            asked: the request's prompt.
            weight_version: when it began; counts if the policy has had no turn.
        """
        first, last = self.versions or (weight_version, weight_version)
        if error is not None:
            self.mask, self.score = [False] * len(self.ids), None
        if not self.ids:  # it failed before the first turn, and a response has at least one token
            self._add(self.prompt_ids[-1:], [0.0], False)
        numbers = {"num_turns": float(self.num_turns), **self.numbers}
        return Generation(
            self.uid,
            self.ids,
            self.log_probs,
            self.finish_reason,
            first,
            response_mask=self.mask,
            num_turns=self.num_turns,
            environment_score=self.score,
            environment_notes=json.dumps({"numbers": numbers, "error": error}),
            prompt_ids=None if self.prompt_ids == list(asked) else self.prompt_ids,
            last_weight_version=last,
        )


def _check_observation(observation: Observation) -> None:
    messages = [] if isinstance(observation, str) else observation
    if not isinstance(messages, Sequence) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    ):
        raise EnvironmentFailed(
            f"what it says must be a text or a list of chat messages, not {observation!r}"
        )


def _rendered(render: Callable[[], list[int]]) -> list[int]:
    try:
        return render()
    except ValueError as error:
        raise EnvironmentFailed(f"what it says cannot be rendered: {error}") from error


async def _in_thread(function: Callable[..., Result], *args: Any) -> Result:
    """Run a function in a thread of its own, which does not keep the process alive if it hangs."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def settle(outcome: tuple[Any, Exception | None]) -> None:
        if not ended.done():  # else nobody waits any more
            ended.set_result(outcome)

    def run() -> None:
        try:
            outcome = function(*args), None
        except Exception as error:
            outcome = None, error
        except BaseException as error:  # as it is, it would end the process
            outcome = None, RuntimeError(repr(error))
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="environment", daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result
