"""Trajectories of several turns: the policy and an environment, one after the other.

Guarantees, each asserted by a test:

- the request of a turn is, token by token, the beginning of the final response: prompt, generated tokens and the environment's
  words;
- generated tokens are never tokenised again: a policy may write the same text by other tokens than a tokenizer would, and would then
  be trained on tokens that it never chose. So only the new part of the conversation is rendered: the chat template is given a
  stand-in for the past, and the text after the stand-in is tokenised by itself;
- tokens that the policy did not choose are false in `response_mask` and 0 in the log-probs, and a response ends with
  one that it did choose;
- all turns together, the environment's words included, have at most `max_new_tokens` tokens, and no request has more tokens than
  the engine takes;
- the noise of turn k depends on (seed, uid, k) only; that of the first turn is that of a single one;
- an environment that raises, or takes longer than its limit, costs its trajectory: the error is recorded, the whole
  response masked. Other trajectories go on. Time in which the event loop stands still, as while the models learn, does not count.
"""

import asyncio
import hashlib
import inspect
import json
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from megarl.config.schema.rollout import MultiTurnConfig
from megarl.data.kept import KeptTokens, kept_of
from megarl.environments.environment import Environment, Observation, StepResult, Task, Turn
from megarl.rollout.completions import within
from megarl.rollout.continuation import Continuation
from megarl.rollout.engine import Generation, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Result = TypeVar("Result")
Answer = Callable[[str, Sequence[int], SamplingParams, int], Awaitable[Generation]]
"""(uid, token ids, sampling, first token whose experts are asked for) -> the response: `SGLangEngine.answer`."""
MAX_THREADS = 64  # at a time, for environments whose methods are no coroutines


def shorten(observation: Observation, most: int, side: str) -> Observation:
    """An observation whose texts have at most `most` characters each, and a mark where some were left out.

    Args:
        side: the part that is kept: "left" the beginning, "right" the end, "middle" half of each.
    """
    if isinstance(observation, str):
        return _shorten_text(observation, most, side)
    return [
        {**message, "content": _shorten_text(message["content"], most, side)}
        if isinstance(message.get("content"), str)
        else message
        for message in observation
    ]


def _shorten_text(text: str, most: int, side: str) -> str:
    if len(text) <= most:
        return text
    if side == "left":
        return text[:most] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[len(text) - most :]
    assert side == "middle", side
    half = most // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


def state_of(told: Observation | None) -> str:
    """A short hash of what an environment says before a turn: equal for equal words."""
    return hashlib.blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


class EnvironmentFailed(Exception):
    """A call of an environment raised, took too long, or returned an invalid value."""


class Player:
    """Plays trajectories with environments of one class."""

    def __init__(
        self,
        make: Callable[[], Environment],
        limits: MultiTurnConfig,
        tokenizer: "PreTrainedTokenizerBase",
        answer: Answer,
        stop_token_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        longest_input: int | None = None,
    ) -> None:
        """
        Args:
            stop_token_ids: stop tokens of the engine other than the model's end tokens.
            longest_input: most tokens of a request, which the engine may refuse although they fit its context; None: any number.
        """
        self._make, self._limits, self._tokenizer, self._answer = make, limits, tokenizer, answer
        self._stop_token_ids = frozenset(stop_token_ids)
        self._template_kwargs, self._longest_input = template_kwargs, longest_input
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def play(
        self, task: Task, prompt_ids: Sequence[int], sampling: SamplingParams, weight_version: int
    ) -> Generation:
        """Play one trajectory to its end. The engine's exceptions are raised, the environment's are recorded; after these, and where the
        trajectory is cancelled, the environment is closed, too."""
        keywords = self._template_kwargs if task.template_kwargs is None else task.template_kwargs
        continuation = Continuation(self._tokenizer, keywords)
        most = len(prompt_ids) + sampling.max_new_tokens
        if self._longest_input is not None:  # a turn has a token at least, before which its request ends
            most = min(most, self._longest_input + 1)
        draft = _Draft(task.uid, list(prompt_ids), most)
        environment: Environment | None = None
        try:
            environment = await self._call("__init__", self._make)
            observation = await self._call("reset", environment.reset, task)
            draft.state = _state(observation)
            if observation is not None:
                shortened = self._shorten(observation)
                draft.prompt_ids = _rendered(partial(continuation.after_prompt, draft.prompt_ids, shortened))
                if draft.room < 1:
                    raise EnvironmentFailed("reset: what it says leaves no room for a response")
            await self._turns(environment, draft, sampling, continuation)
            error = None
        except EnvironmentFailed as failure:
            error = str(failure)
        except BaseException:
            if environment is not None:
                with suppress(EnvironmentFailed):
                    await self._call("close", environment.close)
            raise
        if environment is not None:
            try:
                await self._call("close", environment.close)
            except EnvironmentFailed as failure:
                error = error or str(failure)
        return draft.generation(prompt_ids, weight_version, error)

    async def _turns(
        self, environment: Environment, draft: "_Draft", sampling: SamplingParams, continuation: Continuation
    ) -> None:
        limits = self._limits
        while True:
            # The policy's turn: the request is everything so far.
            number = draft.num_turns
            uid = draft.uid if number == 0 else f"{draft.uid}#{number}"
            request_sampling = replace(sampling, max_new_tokens=draft.room)
            asked = [*draft.prompt_ids, *draft.ids]
            generation = await self._answer(uid, asked, request_sampling, draft.num_routed)
            draft.add_turn(generation)
            ids = list(generation.response_ids)
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            result = await self._call(
                "step", environment.step, Turn(number, text, ids, generation.finish_reason)
            )
            draft.note(result)
            if result.done or result.observation is None or generation.finish_reason == "length":
                return
            _check_observation(result.observation)
            if not result.observation:
                return
            if draft.num_turns == limits.max_assistant_turns or number == limits.max_user_turns:
                return
            # The environment's words end the trajectory where they leave no room for another token of the policy.
            shortened = self._shorten(result.observation)
            ended_by = None if ids[-1] in self._stop_token_ids else ids[-1]
            observation_ids = _rendered(
                partial(continuation.after_turn, shortened, ended_by is not None, ended_by)
            )
            if len(observation_ids) >= draft.room:
                draft.finish_reason = "length"
                return
            draft.add(observation_ids, [0.0] * len(observation_ids), chosen=False)
            draft.state = _state(result.observation if result.state is None else result.state)

    def _shorten(self, observation: Observation) -> Observation:
        _check_observation(observation)
        limits = self._limits
        return shorten(observation, limits.max_tool_response_length, limits.tool_response_truncate_side)

    async def _call(self, what: str, method: Callable[..., Any], *args: Any) -> Any:
        """Call the environment, within its time, of which only seconds count in which the event loop runs.

        Raises:
            EnvironmentFailed: it raised, or did not end in time; a thread that hangs is left behind.
        """
        timeout = self._limits.step_timeout
        try:
            if inspect.iscoroutinefunction(method):
                return await within(timeout, method(*args))
            async with self._threads:
                return await within(timeout, _in_thread(method, *args))
        except TimeoutError:
            raise EnvironmentFailed(f"{what}: no answer within {timeout:g} s") from None
        except Exception as error:  # whatever a user's code raises
            raise EnvironmentFailed(f"{what}: {type(error).__name__}: {error}") from error


@dataclass
class _Draft:
    """A trajectory in progress."""

    uid: str
    prompt_ids: list[int]
    most_tokens: int  # most tokens of prompt and response together
    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[tuple[int, str]] = field(default_factory=list)  # first token and state of each
    state: str = ""  # of the environment, before the next turn
    finish_reason: str = "stop"
    score: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    versions: tuple[int, int] | None = None  # of the weights that chose the first token and the last one
    # Of the tokens, by turn, where the engine returns them.
    experts: list[np.ndarray] = field(default_factory=list)

    kept: list[KeptTokens] = field(default_factory=list)  # of each turn and observation

    @property
    def num_routed(self) -> int:
        """Tokens, from the first one on, whose experts are known."""
        return sum(map(len, self.experts))

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return self.most_tokens - len(self.prompt_ids) - len(self.ids)

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    def add_turn(self, generation: Generation) -> None:
        self.turns.append((len(self.ids), self.state))
        self.finish_reason = generation.finish_reason
        first, last = generation.weight_version, generation.last_weight_version
        self.versions = (
            first if self.versions is None else self.versions[0],
            first if last is None else last,
        )
        if generation.routed_experts is not None:
            self.experts.append(generation.routed_experts)
        self.add(generation.response_ids, generation.log_probs, True, generation.kept)

    def add(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        chosen: bool,
        kept: KeptTokens | None = None,
    ) -> None:
        self.kept.append(kept_of(kept, len(ids)))
        self.ids.extend(ids)
        self.log_probs.extend(log_probs)
        self.mask.extend([chosen] * len(ids))

    def note(self, result: StepResult) -> None:
        """Record the score and numbers of a step.

        Raises:
            EnvironmentFailed: the result is no StepResult, its numbers have no names, or its score or a number is not finite.
        """
        if not isinstance(result, StepResult):
            raise EnvironmentFailed(f"step: it returned {result!r}, not a StepResult")
        if not isinstance(result.numbers, Mapping):
            raise EnvironmentFailed(f"step: numbers={result.numbers!r} is no mapping of names to numbers")
        given = {**result.numbers, **({} if result.score is None else {"score": result.score})}
        for name, value in given.items():
            if not isinstance(value, Real) or not math.isfinite(value):  # numpy's numbers, too
                raise EnvironmentFailed(f"step: {name}={value!r} is no finite number")
        if result.score is not None:
            self.score = float(result.score)
        for name, value in result.numbers.items():
            self.numbers[name] = self.numbers.get(name, 0.0) + float(value)

    def generation(self, request_ids: Sequence[int], weight_version: int, error: str | None) -> Generation:
        """The trajectory; after an error all of it is masked.

        Args:
            request_ids: the prompt of the request.
            weight_version: the version when the trajectory began; used if the policy has had no turn.
        """
        first, last = self.versions or (weight_version, weight_version)
        if error is not None:
            self.mask, self.score = [False] * len(self.ids), None
        if not self.ids:  # it failed before the first turn, and a response has at least one token
            self.add(self.prompt_ids[-1:], [0.0], False)
        numbers = {"num_turns": float(self.num_turns), **self.numbers}
        kept = KeptTokens.joined(self.kept)
        return Generation(
            self.uid,
            self.ids,
            self.log_probs,
            self.finish_reason,
            first,
            response_mask=self.mask,
            num_turns=self.num_turns,
            environment_score=self.score,
            environment_notes=json.dumps({"numbers": numbers, "error": error, "turns": self.turns}),
            prompt_ids=None if self.prompt_ids == list(request_ids) else self.prompt_ids,
            last_weight_version=last,
            routed_experts=np.concatenate(self.experts) if self.experts else None,
            kept=kept if len(kept.ids) else None,
        )


def _state(told: Observation | None) -> str:
    try:
        return state_of(told)
    except (TypeError, ValueError) as error:  # such as keys that are tuples
        raise EnvironmentFailed(f"its state cannot be written as JSON: {error}") from error


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
        if not ended.done():  # after a timeout nothing waits for the result
            ended.set_result(outcome)

    def run() -> None:
        try:
            outcome = function(*args), None
        except Exception as error:
            outcome = None, error
        except BaseException as error:  # as it is, it would end the process
            outcome = None, RuntimeError(repr(error))
        with suppress(RuntimeError):  # the loop is closed: nothing waits for the result
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="environment", daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result
