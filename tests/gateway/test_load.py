"""Many sessions at once, and an engine that is lost while they run."""

import asyncio

import httpx

from megarl.rollout.engine import EngineError
from tests.data.test_published_templates import user
from tests.gateway.conftest import MODEL, OWNER

SESSIONS, TURNS = 200, 3


def test_sessions_whose_engine_is_lost_lose_nothing_and_are_trained_on_once(serve):
    served = serve(["It rains. " * 3], tools=None, delay=0.005, piece=8)
    refused: list[dict] = []

    async def turn(client, key, messages):
        while True:
            body = {"model": MODEL, "messages": messages}
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-api-key": key})
            if answer.status_code == 200:
                return answer.json()["choices"][0]["message"]
            refused.append(answer.json())
            await asyncio.sleep(0.05)

    async def agent(number):
        # Each agent has a client of its own: a pool that they share would look through all connections at each request.
        async with httpx.AsyncClient(base_url=served.url, timeout=100, verify=False) as client:
            begun = await client.post("/sessions", json={"uid": f"p/{number}"}, headers={"x-api-key": OWNER})
            key, messages = begun.json()["key"], [user(f"Rain {number}?")]
            for _ in range(TURNS):
                messages += [await turn(client, key, messages), user("Sure?")]
            return (await client.post("/session/end", headers={"x-api-key": key})).json()["trajectories"]

    async def lose_the_engine():
        while len(served.policy.asked) < SESSIONS // 2:
            await asyncio.sleep(0.01)
        served.policy.failure = EngineError("the engine was killed")
        while len(refused) < 50:
            await asyncio.sleep(0.01)
        served.policy.failure = None

    async def all_of_them():
        return (await asyncio.gather(lose_the_engine(), *map(agent, range(SESSIONS))))[1:]

    ended = asyncio.run(all_of_them())
    assert {one["error"]["type"] for one in refused} == {"server_error"} and len(refused) >= 50
    trained = []
    for number, trajectories in enumerate(ended):
        (only,) = trajectories
        assert (only["uid"], only["num_turns"]) == (f"p/{number}.0", TURNS)
        live = zip(only["log_probs"], only["response_mask"], strict=True)
        trained += [log_prob for log_prob, mask in live if mask]
    answered = [log_prob for asked in served.policy.asked for log_prob in asked.log_probs]
    assert sorted(trained) == sorted(answered) and len(served.policy.asked) == SESSIONS * TURNS
