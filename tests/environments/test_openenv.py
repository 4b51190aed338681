"""The environment `openenv` in front of a server that speaks OpenEnv's messages."""

import asyncio
import json

import pytest
from aiohttp import web

from megarl.environments.environment import Task, Turn
from megarl.environments.openenv import OpenEnv, ServerError

ASKED = web.AppKey("asked", list)
LEAVES = web.AppKey("leaves", bool)  # whether the server ends the connection itself when an episode is done
TASK = Task("p/0", "Guess.", None, "source", "7", {"seed": 7, "hint": "x"})


async def guessing(request):
    """An episode: guess the seed; each wrong guess costs 0.25."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    secret = None
    async for message in socket:
        asked = json.loads(message.data)
        request.app[ASKED].append(asked)
        if asked["type"] == "close":
            break
        if asked["type"] == "reset":
            secret = asked["data"].get("seed")
            answer = {"observation": {"text": "guess", "tries": 0}, "reward": None, "done": False}
        elif asked["data"].get("guess") == "leave":
            break
        elif not asked["data"].get("guess", "").isdigit():
            await socket.send_json(
                {"type": "error", "data": {"message": "no number", "code": "VALIDATION_ERROR"}}
            )
            continue
        else:
            right = int(asked["data"]["guess"]) == secret
            seen = {"text": "right" if right else "wrong", "tries": 1}
            answer = {"observation": seen, "reward": 1.0 if right else -0.25, "done": right}
        await socket.send_json({"type": "observation", "data": answer})
        if answer["done"] and request.app[LEAVES]:
            request.transport.abort()
    return socket


def play(*texts, leaves=False, **options):
    """The environment's first message, the result of each turn, and the messages that the server got."""

    async def run():
        app = web.Application()
        app[ASKED], app[LEAVES] = [], leaves
        app.router.add_get("/ws", guessing)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        environment = OpenEnv(f"http://127.0.0.1:{port}/", action="guess", **options)
        try:
            first = await environment.reset(TASK)
            results = [
                await environment.step(Turn(number, text, [], "stop")) for number, text in enumerate(texts)
            ]
            while leaves:  # until the client has noticed the end of the connection
                try:
                    await environment._socket.ping()
                except ConnectionResetError:
                    break
                await asyncio.sleep(0.01)
        finally:
            await environment.close()
            await runner.cleanup()
        assert environment._socket is None or environment._socket.closed
        assert environment._http is None or environment._http.closed
        return first, results, app[ASKED]

    return asyncio.run(run())


def test_an_episode():
    first, results, asked = play("3", "7", observation="text", reset=("seed",), fields={"mode": "easy"})
    assert first == [{"role": "user", "content": "guess"}]
    wrong, right = results
    assert (
        wrong.observation == [{"role": "user", "content": "wrong"}]
        and wrong.score == -0.25
        and not wrong.done
    )
    assert right.observation is None and right.done and right.score == 0.75
    assert asked == [
        {"type": "reset", "data": {"seed": 7}},
        {"type": "step", "data": {"mode": "easy", "guess": "3"}},
        {"type": "step", "data": {"mode": "easy", "guess": "7"}},
        {"type": "close"},
    ]


def test_an_episode_counts_although_its_server_has_left():
    _, (right,), _ = play("7", leaves=True, reset=("seed",))
    assert right.done and right.score == 1.0


def test_an_observation_as_a_whole_is_json():
    first, _, _ = play(role="tool")
    assert first == [{"role": "tool", "content": '{"text": "guess", "tries": 0}'}]


def test_what_goes_wrong_is_told():
    with pytest.raises(ServerError, match="no number"):
        play("seven")
    with pytest.raises(ServerError, match="has ended the session"):
        play("leave")
    with pytest.raises(ServerError, match="no field 'words', but text, tries"):
        play(observation="words")
    with pytest.raises(ValueError, match="extra_info has no difficulty"):
        play(reset=("difficulty",))
    with pytest.raises(ValueError, match="must begin with http"):
        OpenEnv("localhost:8000")


def test_a_session_outlives_a_long_turn():
    """The server ends connections whose pings are not answered, as uvicorn does."""

    async def watchful(request):
        socket = web.WebSocketResponse(heartbeat=1.0)
        await socket.prepare(request)
        async for message in socket:
            if message.type != web.WSMsgType.TEXT or json.loads(message.data)["type"] == "close":
                break
            data = {"observation": {}, "reward": 1.0, "done": False}
            await socket.send_json({"type": "observation", "data": data})
        return socket

    async def run():
        app = web.Application()
        app.router.add_get("/ws", watchful)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        environment = OpenEnv(f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            await environment.reset(TASK)
            await asyncio.sleep(2.0)  # the policy writes
            return await environment.step(Turn(0, "a", [], "stop"))
        finally:
            await environment.close()
            await runner.cleanup()

    assert asyncio.run(run()).score == 1.0
