"""The gateway over HTTP.

    POST /v1/chat/completions       OpenAI's Chat Completions
    POST /v1/responses              OpenAI's Responses
    POST /v1/messages               Anthropic's Messages, and /v1/messages/count_tokens
    GET  /v1/models                 and /v1/models/{name}
    POST /sessions                  begin a session (with the owner's key); answers {"uid", "key"}
    POST /session/score             its reward, {"score": number or {player: number}, "numbers": {...}} (with the session's key, as all below)
    GET  /session/trajectories      its trajectories so far
    POST /session/end               end it; answers with its trajectories

A key comes as `Authorization: Bearer <key>` or `x-api-key: <key>`. Requests with the owner's key belong to no session, and nothing
is kept of them.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from anyio import CancelScope
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megarl.data.trajectories import Generation
from megarl.gateway import anthropic, openai_chat, openai_responses
from megarl.gateway.messages import Message
from megarl.gateway.players import SessionScore, checked_scores, is_finite_number
from megarl.gateway.requests import (
    TOO_LARGE,
    UNAUTHORIZED,
    UNKNOWN,
    WRONG_METHOD,
    Answer,
    Delta,
    Request,
    RequestError,
)
from megarl.gateway.service import Gateway, Session

LOG = logging.getLogger(__name__)
_LEFT = 499  # nginx's status of a client that has left; nobody reads it


class Parts(Protocol):
    """The parts of a streamed answer, as JSON objects."""

    def of(self, event: Delta | Answer) -> Iterator[dict[str, Any]]: ...

    def end(self) -> Iterator[dict[str, Any]]: ...


class Api:
    """An API as functions of JSON objects."""

    def __init__(
        self,
        parse: Callable[..., Request],
        answer: Callable[..., dict[str, Any]],
        parts: Callable[..., Parts],
        error: Callable[[RequestError], dict[str, Any]],
        prefix: str,
        last: str = "",
    ) -> None:
        """`prefix`: of an answer's name, by which a session remembers it; `last`: the last line of a stream."""
        self.parse, self.answer, self.parts, self.error = parse, answer, parts, error
        self.prefix, self.last = prefix, last


CHAT = Api(
    openai_chat.parse,
    openai_chat.completion,
    openai_chat.Chunks,
    openai_chat.error_body,
    "chatcmpl-",
    "data: [DONE]\n\n",
)
RESPONSES = Api(
    openai_responses.parse,
    openai_responses.response,
    openai_responses.Events,
    openai_chat.error_body,
    "resp_",
)
MESSAGES = Api(anthropic.parse, anthropic.message, anthropic.Events, anthropic.error_body, "msg_")


class ClientLeft(Exception):
    """The client has closed its connection."""


def make_app(gateway: Gateway, owner_key: str) -> Starlette:
    """The application, for a server on the event loop of the gateway's engine."""
    handlers = _Handlers(gateway, owner_key)

    def post(path: str, handler: Callable[[HttpRequest], Awaitable[Response]], api: Api = CHAT) -> Route:
        return Route(path, _guarded(handler, api), methods=["POST"])

    return Starlette(
        routes=[
            post("/v1/chat/completions", handlers.of(CHAT)),
            post("/v1/responses", handlers.of(RESPONSES)),
            post("/v1/messages", handlers.of(MESSAGES), MESSAGES),
            post("/v1/messages/count_tokens", handlers.count_tokens, MESSAGES),
            Route("/v1/models", _guarded(handlers.models, CHAT), methods=["GET"]),
            Route("/v1/models/{name:path}", _guarded(handlers.model, CHAT), methods=["GET"]),
            post("/sessions", handlers.begin),
            post("/session/score", handlers.score),
            post("/session/end", handlers.end),
            Route("/session/trajectories", _guarded(handlers.trajectories, CHAT), methods=["GET"]),
        ],
        exception_handlers={UNKNOWN: _not_found, WRONG_METHOD: _not_found},
    )


# Seconds that a connection stays open without a request. uvicorn's 5 are also those of OpenAI's and Anthropic's clients (httpx): where both close at the
# same time, a request meets a closed connection.
KEEP_ALIVE = 75


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an interface; port 0: any that is free.

    Raises:
        OSError: the address is taken, or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)
    # Accepted sockets inherit it. asyncio sets it only where the socket names its protocol, which these do not; and without it the second
    # part of an answer waits 40 ms for the client to acknowledge the first.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(host: str, port: int) -> str:
    """Where a server on an interface is reached."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen_locally(path: Path) -> socket.socket:
    """A Unix socket that listens."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(128)
    return listener


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    """No route has the path, or none with the method."""
    assert isinstance(error, HTTPException), "the handler of these statuses alone"
    api = MESSAGES if request.url.path.startswith("/v1/messages") else CHAT
    told = RequestError(f"there is no {request.method} {request.url.path}", error.status_code)
    return JSONResponse(api.error(told), error.status_code, error.headers)


def _model(name: str) -> dict[str, Any]:
    """A model as the three APIs describe one."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "owned_by": "megarl",
    }


def _guarded(
    handler: Callable[[HttpRequest], Awaitable[Response]], api: Api
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """A handler whose errors are answered in the form of an API."""

    async def answer(request: HttpRequest) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            wait = {} if error.retry_after is None else {"retry-after": str(math.ceil(error.retry_after))}
            return JSONResponse(api.error(error), error.status, wait)
        except ClientLeft:
            return Response(status_code=_LEFT)
        except Exception:
            LOG.exception("%s %s failed", request.method, request.url.path)
            return JSONResponse(api.error(RequestError("internal error", 500)), 500)

    return answer


class _Handlers:
    def __init__(self, gateway: Gateway, owner_key: str) -> None:
        self._gateway, self._owner_key = gateway, owner_key

    def of(self, api: Api) -> Callable[[HttpRequest], Awaitable[Response]]:
        """The handler of an API's requests."""

        async def handle(http: HttpRequest) -> Response:
            session = self._session(http)
            body = await self._body(http)
            earlier = _earlier(session, body) if api is RESPONSES else None
            request = self._parse(api, body, earlier)
            stream = bool(body.get("stream"))
            identity = api.prefix + secrets.token_hex(12)
            events = self._gateway.events(session, request, stream)
            if api is RESPONSES:
                events = _remembered(events, session, request, body, identity)
            gone = asyncio.create_task(_disconnected(http))
            if not stream:
                try:
                    answers = [event async for event in _until(events, gone)]
                finally:
                    gone.cancel()
                return JSONResponse(api.answer(answers, body, identity, body["model"]))
            iterator = _until(events, gone)
            try:  # an error before the first token has a status of its own
                first = await anext(iterator)
            except BaseException:
                gone.cancel()
                raise
            parts = api.parts(body, identity, body["model"])
            return StreamingResponse(
                _stream(api, parts, first, iterator, gone), media_type="text/event-stream"
            )

        return handle

    async def count_tokens(self, http: HttpRequest) -> Response:
        session = self._session(http)
        request = self._parse(MESSAGES, {"max_tokens": 1, **await self._body(http)})
        return JSONResponse({"input_tokens": self._gateway.num_prompt_tokens(session, request)})

    async def models(self, http: HttpRequest) -> Response:
        self._session(http)
        models = [_model(name) for name in self._gateway.models]
        return JSONResponse({"object": "list", "data": models, "has_more": False})

    async def model(self, http: HttpRequest) -> Response:
        self._session(http)
        return JSONResponse(_model(self._known(http.path_params["name"])))

    async def begin(self, http: HttpRequest) -> Response:
        if not self._is_owner(http):
            raise RequestError("sessions are begun with the owner's key", UNAUTHORIZED)
        body = await self._body(http)
        session = self._gateway.begin(str(body.get("uid") or secrets.token_hex(8)))
        return JSONResponse({"uid": session.uid, "key": session.token})

    async def score(self, http: HttpRequest) -> Response:
        session, body = self._kept(http), await self._body(http)
        given = {**(body.get("numbers") or {}), "score": body.get("score")}
        by_player = given.pop("score") if isinstance(given["score"], dict) else None
        for name, value in given.items():
            if not is_finite_number(value):
                raise RequestError(f"{name} must be a finite number, found {value!r}", param=name)
        if by_player is None:
            score: SessionScore = float(given.pop("score"))
        else:
            try:
                score = checked_scores(by_player, self._gateway.players, session.tree.players)
            except ValueError as error:
                raise RequestError(f"score: {error}", param="score") from None
        session.score = score
        session.numbers = {name: float(value) for name, value in given.items()}
        return JSONResponse({"uid": session.uid, "score": session.score})

    async def end(self, http: HttpRequest) -> Response:
        return _trajectories(self._gateway.end(self._kept(http)))

    async def trajectories(self, http: HttpRequest) -> Response:
        return _trajectories(self._kept(http))

    def _session(self, http: HttpRequest) -> Session:
        """The session of a request to the model, which counts it."""
        session = self._gateway.alone() if self._is_owner(http) else self._kept(http)
        self._gateway.count(session)
        return session

    def _kept(self, http: HttpRequest) -> Session:
        return self._gateway.session(_key(http))

    def _is_owner(self, http: HttpRequest) -> bool:
        return hmac.compare_digest(_key(http).encode(), self._owner_key.encode())

    def _parse(self, api: Api, body: Mapping[str, Any], earlier: Sequence[Message] | None = None) -> Request:
        model = body.get("model")
        if not isinstance(model, str):
            raise RequestError("model is missing", param="model")
        self._known(model)
        request = api.parse(body) if earlier is None else api.parse(body, earlier)
        return replace(request, player=model) if model in self._gateway.players else request

    def _known(self, model: str) -> str:
        if model not in self._gateway.models:
            known = ", ".join(self._gateway.models)
            raise RequestError(
                f"there is no model {model!r}, but {known}", UNKNOWN, "model", "model_not_found"
            )
        return model

    async def _body(self, http: HttpRequest) -> dict[str, Any]:
        read = bytearray()
        async for part in http.stream():
            read += part
            if len(read) > self._gateway.limits.body_bytes:
                raise RequestError(
                    f"the body is larger than {self._gateway.limits.body_bytes} bytes", TOO_LARGE
                )
        try:
            body = json.loads(read or b"{}")
        except ValueError as error:
            raise RequestError(f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        return body


def _earlier(session: Session, body: Mapping[str, Any]) -> Sequence[Message]:
    """The conversation that a request continues by the name of an answer; empty: it has all its messages itself.

    Raises:
        RequestError: the session has no such answer.
    """
    name = body.get("previous_response_id")
    if name is None:
        return ()
    if name not in session.answers:
        raise RequestError(f"the session has no response {name!r}", param="previous_response_id")
    return session.answers[name]


async def _remembered(
    events: AsyncIterator[Delta | Answer],
    session: Session,
    request: Request,
    body: Mapping[str, Any],
    identity: str,
) -> AsyncIterator[Delta | Answer]:
    """Events whose answer the session remembers by its name."""
    try:
        async for event in events:
            if isinstance(event, Answer):
                session.answers[identity] = openai_responses.conversation(request, body, event)
            yield event
    finally:
        with CancelScope(shield=True):
            await events.aclose()  # type: ignore[attr-defined]


def _key(http: HttpRequest) -> str:
    bearer = http.headers.get("authorization", "")
    return bearer[7:] if bearer.lower().startswith("bearer ") else http.headers.get("x-api-key", "")


def _trajectories(session: Session) -> Response:
    return JSONResponse(
        {"uid": session.uid, "trajectories": [_as_json(one) for one in session.trajectories()]}
    )


def _as_json(trajectory: Generation) -> dict[str, Any]:
    names = ("uid", "prompt_ids", "response_ids", "response_mask", "log_probs", "finish_reason", "num_turns")
    versions = ("weight_version", "last_weight_version")
    return {
        **{name: getattr(trajectory, name) for name in (*names, *versions)},
        "score": trajectory.environment_score,
        **({} if trajectory.player is None else {"player": trajectory.player}),
    }


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _until(
    events: AsyncIterator[Delta | Answer], gone: asyncio.Task[None]
) -> AsyncIterator[Delta | Answer]:
    """Events until the client has left.

    Raises:
        ClientLeft: it has; choices that were not answered are aborted.
    """
    try:
        while True:
            following = asyncio.ensure_future(anext(events))
            try:
                await asyncio.wait({following, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    raise ClientLeft
            finally:
                if not following.done():
                    following.cancel()
                    with CancelScope(shield=True), suppress(asyncio.CancelledError, StopAsyncIteration):
                        await following
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        with CancelScope(shield=True):
            await events.aclose()  # type: ignore[attr-defined]


async def _stream(
    api: Api,
    parts: Parts,
    first: Delta | Answer,
    events: AsyncIterator[Delta | Answer],
    gone: asyncio.Task[None],
) -> AsyncIterator[str]:
    try:
        for part in parts.of(first):
            yield _line(part)
        async for event in events:
            for part in parts.of(event):
                yield _line(part)
        for part in parts.end():
            yield _line(part)
        yield api.last
    except RequestError as error:
        yield _line(api.error(error))
    except ClientLeft:
        pass
    except Exception:
        LOG.exception("an answer failed while it was streamed")
        yield _line(api.error(RequestError("internal error", 500)))
    finally:
        gone.cancel()
        with CancelScope(shield=True):  # Starlette cancels this where the client has left
            await events.aclose()  # type: ignore[attr-defined]


def _line(part: Mapping[str, Any]) -> str:
    """A server-sent event; the events of Anthropic and of OpenAI's Responses name their type."""
    head = f"event: {part['type']}\n" if isinstance(part.get("type"), str) else ""
    return f"{head}data: {json.dumps(part, ensure_ascii=False)}\n\n"
