"""An OpenEnv server as an environment: the policy's text is an action, and the server's observation its answer.

Each trajectory has a WebSocket connection of its own, which to OpenEnv is a session of its own (openenv-core 0.3.0,
`openenv/core/env_server/types.py`: messages {"type": "reset" | "step" | "close", "data": ...}, answers {"type": "observation", "data":
{"observation", "reward", "done"}} or {"type": "error", "data": {"message", "code"}}). The package itself is not needed.

Numbers of the trajectory: `openenv_steps`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from megarl.environments.environment import Environment, StepResult, Task, Turn, register_environment

if TYPE_CHECKING:
    import aiohttp


class ServerError(Exception):
    """The server has refused an action, or ended the session."""


@register_environment("openenv")
class OpenEnv(Environment):
    """The server as described above. The score is the sum of the rewards of all steps.

    Args:
        base_url: of the server, such as http://127.0.0.1:8000.
        action: the field of an action that has the policy's text; its other fields are `fields`.
        fields: further fields of each action.
        observation: the field of an observation that is told to the policy; None: the whole observation as JSON.
        reset: names of values of the row's `extra_info` with which an episode is reset, such as seed.
        role: role of the messages with observations; the model's chat template must know it.
    """

    def __init__(
        self,
        base_url: str,
        action: str = "message",
        fields: Mapping[str, Any] | None = None,
        observation: str | None = None,
        reset: Sequence[str] = (),
        role: str = "user",
    ) -> None:
        if not base_url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"base_url={base_url!r} must begin with http:// or https://")
        self._url = f"{base_url.rstrip('/')}/ws"
        self._action, self._fields, self._observation = action, dict(fields or {}), observation
        self._reset, self._role = tuple(reset), role
        self._score = 0.0
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._next: asyncio.Future[aiohttp.WSMessage] | None = None

    async def reset(self, task: Task) -> list[dict[str, str]] | None:
        missing = [name for name in self._reset if name not in task.extra_info]
        if missing:
            raise ValueError(f"extra_info has no {', '.join(missing)}, with which the environment is reset")
        # aiohttp comes with SGLang, which a machine without engines need not have.
        import aiohttp

        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(self._url, max_msg_size=0)
        self._listen()
        data = await self._ask("reset", {name: task.extra_info[name] for name in self._reset})
        return self._told(data)

    async def step(self, turn: Turn) -> StepResult:
        data = await self._ask("step", {**self._fields, self._action: turn.text})
        self._score += float(data.get("reward") or 0.0)
        done = bool(data.get("done"))
        return StepResult(
            None if done else self._told(data), done, score=self._score, numbers={"openenv_steps": 1.0}
        )

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            # Some servers have left by now: they end the session when an episode is done.
            with suppress(ConnectionResetError):
                await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._next is not None:
            self._next.cancel()
        if self._http is not None:
            await self._http.close()

    def _listen(self) -> None:
        """Wait for the server's next message, also while the policy writes: aiohttp answers pings only while a message is waited for, and
        a server (uvicorn after 20 seconds) ends a connection whose pings are not answered."""
        assert self._socket is not None, "reset comes first"
        self._next = asyncio.ensure_future(self._socket.receive())

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None and self._next is not None, "reset comes first"
        await self._socket.send_json({"type": kind, "data": dict(data)})
        message = await self._next
        if not isinstance(message.data, str):  # the connection was closed
            raise ServerError(f"{self._url} has ended the session")
        self._listen()
        answer = json.loads(message.data)
        if answer.get("type") != "observation":
            raise ServerError(f"{self._url}: {answer.get('data', answer)}")
        return answer["data"]

    def _told(self, data: Mapping[str, Any]) -> list[dict[str, str]]:
        seen = data.get("observation", {})
        if self._observation is None:
            return [{"role": self._role, "content": json.dumps(seen, ensure_ascii=False)}]
        if self._observation not in seen:
            raise ServerError(f"the observation has no field {self._observation!r}, but {', '.join(seen)}")
        return [{"role": self._role, "content": str(seen[self._observation])}]
