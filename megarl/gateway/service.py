"""Sessions, and answers to their requests by an engine.

Guarantees, each asserted by a test:

- a session has a token of its own, and no request reaches another session's tree;
- a request whose client leaves, or that fails, is aborted in the engine and leaves no turn in the tree: nobody trains on it;
- an answer is in the tree before its client has all of it, so that the next request finds it; of n choices all are, or none;
- a session that is idle for longer than its limit ends, with what it has.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megarl.data.trajectories import Generation
from megarl.gateway.engine import TokenEngine
from megarl.gateway.messages import Message
from megarl.gateway.players import SessionScore, score_of
from megarl.gateway.prompts import TemplatePrompts
from megarl.gateway.rate import Rate
from megarl.gateway.reader import StreamedTurn, TurnReader
from megarl.gateway.requests import (
    BUSY,
    LATE,
    UNAUTHORIZED,
    UNAVAILABLE,
    Answer,
    Delta,
    Request,
    RequestError,
)
from megarl.gateway.tree import Prompt, SessionTree
from megarl.rollout.engine import EngineError, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Limits:
    """What clients may ask for.

    Attributes:
        body_bytes: of a request.
        in_flight: answers of a session at a time (a request for n of them counts n); more are refused, and clients try again.
        requests: of a session in all; None: any number.
        requests_per_minute: of a session, whatever they ask for; more are refused with the seconds to wait. None: any number.
        request_seconds: for an answer.
        idle_seconds: after which a session without requests ends.
        sessions: at a time.
        new_tokens: most tokens of an answer; None: as many as the context has room for.
    """

    body_bytes: int = 32 << 20
    in_flight: int = 64
    requests: int | None = None
    requests_per_minute: int | None = None
    request_seconds: float = 3600.0
    idle_seconds: float = 3600.0
    sessions: int = 4096
    new_tokens: int | None = None


@dataclass(eq=False)
class Session:
    """An agent's requests.

    Attributes:
        token: the key with which its requests come.
        sampling: of its requests, where they say nothing.
        rate: of its requests.
        score: its reward, as it was posted, or each player's; None: none was.
        last_used: by `time.monotonic`.
        failure: of the engine, in one of its requests.
        answers: conversations up to an answer, by its name, for the API that continues conversations by names.
    """

    uid: str
    token: str
    tree: SessionTree
    sampling: SamplingParams
    rate: Rate
    score: SessionScore | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    in_flight: int = 0
    num_requests: int = 0
    last_used: float = field(default_factory=time.monotonic)
    failure: EngineError | None = None
    answers: dict[str, list[Message]] = field(default_factory=dict)

    def trajectories(self) -> list[Generation]:
        """Its trajectories so far, with its score."""
        made = self.tree.trajectories(self.uid)
        return [replace(one, environment_score=score_of(self.score, one.player)) for one in made]


@dataclass(frozen=True)
class _Choice:
    """An answer, the generation that the tree keeps of it, and the parts that were not streamed before its end."""

    answer: Answer
    generation: Generation
    ended: bool
    rest: Sequence[Delta]


class Gateway:
    """Answers requests of sessions. All calls come from the event loop that the engine's coroutines run on."""

    def __init__(
        self,
        engine: TokenEngine,
        tokenizer: PreTrainedTokenizerBase,
        reader: TurnReader,
        models: Sequence[str],
        sampling: SamplingParams,
        limits: Limits | None = None,
        *,
        players: Sequence[str] = (),
        fixed_sampling: bool = False,
        stop_token_ids: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            models: the names by which requests may call the policy.
            players: other such names, each of them a player of the sessions' games.
            sampling: where a request says nothing.
            fixed_sampling: requests that say otherwise are sampled by `sampling` all the same, as training needs it.
            stop_token_ids: stop tokens of the engine that are not the model's own end tokens.
        """
        self.models, self.players, self.limits = (*models, *players), tuple(players), limits or Limits()
        self._engine, self._reader, self._sampling = engine, reader, sampling
        self._fixed, self._stop_token_ids = fixed_sampling, frozenset(stop_token_ids)
        self._tokenizer = tokenizer
        self._sessions: dict[str, Session] = {}
        self._clock = clock
        self._rate_alone = self._rate()

    def begin(
        self,
        uid: str,
        sampling: SamplingParams | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Session:
        """A new session.

        Args:
            sampling: of its requests; None: the gateway's.
            template_kwargs: of the chat template; those of a request take their place.

        Raises:
            RequestError: there are as many sessions as there may be.
        """
        self.end_idle()
        if len(self._sessions) >= self.limits.sessions:
            raise RequestError(f"there are {self.limits.sessions} sessions, which is the limit", BUSY)
        token = f"sk-{secrets.token_urlsafe(24)}"
        session = Session(
            uid,
            token,
            SessionTree(TemplatePrompts(self._tokenizer, template_kwargs)),
            sampling or self._sampling,
            self._rate(),
            last_used=self._clock(),
        )
        self._sessions[session.token] = session
        return session

    def alone(self) -> Session:
        """A session for one request, which is not kept. All such sessions have one rate."""
        return Session(
            secrets.token_hex(8),
            "",
            SessionTree(TemplatePrompts(self._tokenizer)),
            self._sampling,
            self._rate_alone,
        )

    def count(self, session: Session) -> None:
        """Count a request that has come with a session's key.

        Raises:
            RequestError: it is one too many in this minute.
        """
        if seconds := session.rate.take():
            most = self.limits.requests_per_minute
            raise RequestError(
                f"more than {most} requests a minute; try again in {seconds:.1f} s",
                BUSY,
                code="rate_limit_exceeded",
                retry_after=seconds,
            )

    def _rate(self) -> Rate:
        return Rate(self.limits.requests_per_minute, self._clock)

    def session(self, token: str) -> Session:
        """The session of a token.

        Raises:
            RequestError: there is none.
        """
        # By its hash: the time that this takes tells nothing of other keys, of which there may be thousands.
        session = self._sessions.get(token)
        if session is not None and self._is_idle(session):
            self.end(session)
            session = None
        if session is None:
            raise RequestError(
                "no session has this key, or it has ended", UNAUTHORIZED, code="invalid_api_key"
            )
        session.last_used = self._clock()
        return session

    def end(self, session: Session) -> Session:
        """End a session: its key is refused from now on."""
        self._sessions.pop(session.token, None)
        return session

    def end_idle(self) -> list[Session]:
        """End the sessions that have had no request for `Limits.idle_seconds`; returns them."""
        return [self.end(session) for session in [*filter(self._is_idle, self._sessions.values())]]

    def _is_idle(self, session: Session) -> bool:
        return not session.in_flight and self._clock() - session.last_used > self.limits.idle_seconds

    def num_prompt_tokens(self, session: Session, request: Request) -> int:
        """Tokens of a request's prompt. RequestError: as of `events`."""
        return len(self._prompt(session, request, "").all_ids())

    async def events(
        self, session: Session, request: Request, stream: bool = False
    ) -> AsyncIterator[Delta | Answer]:
        """The answers to a request, one for each choice; with `stream`, their parts come first.

        A caller that closes the iterator aborts the choices that are not answered.

        Raises:
            RequestError: the request cannot be answered.
        """
        limits = self.limits
        if limits.requests is not None and session.num_requests >= limits.requests:
            raise RequestError(f"the session has had {limits.requests} requests, which is the limit", BUSY)
        if session.in_flight + request.n > limits.in_flight:
            raise RequestError(
                f"{session.in_flight} answers of this session are in flight, and {limits.in_flight} may be",
                BUSY,
            )
        self._reader.check_tools(request)
        forced = self._reader.forced(request)
        if forced and self._reader.opens_reasoning(self._prompt(session, request, "").all_ids()):
            raise RequestError(
                "this model's turns begin with reasoning, before which no call can be: use tool_choice auto",
                param="tool_choice",
            )
        prompt = self._prompt(session, request, forced)
        number, session.num_requests = session.num_requests, session.num_requests + 1
        session.in_flight += request.n
        queue: asyncio.Queue[Delta | asyncio.Task[_Choice]] = asyncio.Queue()
        tell = queue.put_nowait if stream else None
        # Noise depends on seed and uid: a client that gives a seed gets the same noise whenever it does.
        seeded = "seed" in request.sampling and not self._fixed
        uid = "seeded" if seeded else f"{session.uid}#{number}"
        tasks = [
            asyncio.create_task(self._choice(session, request, prompt, f"{uid}.{index}", index, tell))
            for index in range(request.n)
        ]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        try:
            left = len(tasks)
            while left:
                event = await queue.get()
                if isinstance(event, Delta):
                    yield event
                else:
                    event.result()  # an error ends all
                    left -= 1
            choices = [task.result() for task in tasks]
            # Only now, when all have ended: the tree gets all choices of a request or none, and before the client has all of them.
            for choice in choices:
                session.tree.add(prompt, choice.generation, choice.answer.message, choice.ended)
            for choice in choices:
                for delta in choice.rest if stream else ():
                    yield delta
                yield choice.answer
        finally:
            session.in_flight -= request.n
            session.last_used = self._clock()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _prompt(self, session: Session, request: Request, forced: str) -> Prompt:
        try:
            prompt = session.tree.prompt(request.messages, request.keywords, forced, request.player)
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error
        length, context = len(prompt.all_ids()), self._engine.context_length
        # Beyond the last of these SGLang would end a streamed request as it ends one that failed (0.5.21).
        if length >= context or length > self._engine.longest_input:
            raise RequestError(
                f"the messages are {length} tokens, and this model's maximum context length is {context} tokens, of which "
                "the answer needs some",
                param="messages",
                code="context_length_exceeded",
            )
        return prompt

    async def _choice(
        self,
        session: Session,
        request: Request,
        prompt: Prompt,
        uid: str,
        index: int,
        tell: Callable[[Delta], None] | None,
    ) -> _Choice:
        ids = prompt.all_ids()
        turn = StreamedTurn(self._reader, request, index, ids, prompt.forced)

        def heard(tokens: Sequence[int]) -> None:
            assert tell is not None
            for delta in turn.heard(tokens):
                tell(delta)

        answering = self._engine.answer(
            uid,
            ids,
            self._sampling_of(session, request, self._engine.context_length - len(ids)),
            prompt.experts_from(),
            None if tell is None else heard,
        )
        try:
            generation = await asyncio.wait_for(answering, self.limits.request_seconds)
        except TimeoutError:
            raise RequestError(f"no answer within {self.limits.request_seconds:g} s", LATE) from None
        except EngineError as error:
            session.failure = error
            raise RequestError(f"the engine has failed: {error}", UNAVAILABLE) from error
        except ValueError as error:  # what the engine refuses
            raise RequestError(str(error), param="messages") from error
        kept, message, stop, rest = turn.end(generation)
        last = kept.response_ids[-1]
        ended = stop is None and kept.finish_reason == "stop" and last not in self._stop_token_ids
        reason = (
            "tool_calls" if message.get("tool_calls") and kept.finish_reason == "stop" else kept.finish_reason
        )
        tokens: list[tuple[str, float]] = []
        if request.log_probs:
            texts = [self._tokenizer.decode([token]) for token in kept.response_ids]
            tokens = list(zip(texts, map(float, kept.log_probs), strict=True))
        answer = Answer(index, message, reason, stop, tokens, len(ids), len(kept.response_ids))
        return _Choice(answer, kept, ended, rest)

    def _sampling_of(self, session: Session, request: Request, room: int) -> SamplingParams:
        most = min(x for x in (room, request.max_tokens, self.limits.new_tokens) if x is not None)
        asked: Mapping[str, object] = {} if self._fixed else request.sampling
        return replace(session.sampling, **asked, max_new_tokens=most)  # type: ignore[arg-type]
