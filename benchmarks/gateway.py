"""The gateway's own time: sessions a second, and seconds that it adds to a request, with an engine that answers at once.

    python benchmarks/gateway.py --out FILE

The server has a process, and so one core; the clients are coroutines of another. Each turn adds a message of `--words` words to its
session, as the output of a tool would. First one session at a time is asked, then `--at-once` of them.
"""

import argparse
import asyncio
import multiprocessing
import multiprocessing.connection
import statistics
import time
from collections.abc import Callable, Sequence

import httpx
import psutil
import uvicorn
from facts import announce, write_report

from megarl.gateway.reader import TurnReader
from megarl.gateway.server import KEEP_ALIVE, listen, make_app
from megarl.gateway.service import Gateway
from megarl.rollout.engine import Generation, SamplingParams
from megarl.util.packages import example

KEY = "sk-benchmark"


class ReadyEngine:
    """Answers every prompt at once, by the same tokens."""

    context_length = longest_input = 1 << 20

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    async def answer(
        self,
        uid: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        experts_from: int = 0,
        heard: Callable[[Sequence[int]], None] | None = None,
    ) -> Generation:
        """The tokens, each with log-prob -1."""
        return Generation(uid, self._ids, [-1.0] * len(self._ids), "stop", 1)


def serve(address: multiprocessing.connection.Connection, tokens: int) -> None:
    """Serve until this process is killed; its port goes through the connection."""
    tokenizer = example("tiny_model").train_tokenizer(example("arithmetic").arithmetic_texts(500), 512)
    words = tokenizer("Tom has 3 pens. " * tokens, add_special_tokens=False)["input_ids"][: tokens - 1]
    engine = ReadyEngine([*words, tokenizer.eos_token_id])
    gateway = Gateway(engine, tokenizer, TurnReader(tokenizer), ["policy"], SamplingParams())
    listener = listen("127.0.0.1", 0)
    address.send(listener.getsockname()[1])
    app = make_app(gateway, KEY)
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=KEEP_ALIVE)
    asyncio.run(uvicorn.Server(config).serve([listener]))


async def session(client: httpx.AsyncClient, turns: int, words: int) -> list[float]:
    """A session from its beginning to its trajectories; the seconds of each of its requests to the policy."""
    begun = await client.post("/sessions", json={}, headers={"x-api-key": KEY})
    headers = {"x-api-key": begun.json()["key"]}
    told = {"role": "user", "content": "Tom buys 4 pens. " * (words // 4)}
    messages, seconds = [told], []
    for _ in range(turns):
        start = time.perf_counter()
        answer = await client.post(
            "/v1/chat/completions", json={"model": "policy", "messages": messages}, headers=headers
        )
        seconds.append(time.perf_counter() - start)
        messages += [answer.json()["choices"][0]["message"], told]
    (only,) = (await client.post("/session/end", headers=headers)).json()["trajectories"]
    assert only["num_turns"] == turns, only["num_turns"]
    return seconds


async def measure(
    url: str, server: psutil.Process, options: argparse.Namespace, at_once: int
) -> dict[str, float]:
    """Sessions a second, the median and 95th percentile of a request's milliseconds, and the server's processor milliseconds of one."""
    places = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one() -> list[float]:
            async with places:
                return await session(client, options.turns, options.words)

        await one()  # what is made once
        used, begun = sum(server.cpu_times()[:2]), time.perf_counter()
        found = await asyncio.gather(*(one() for _ in range(options.sessions)))
        rate = options.sessions / (time.perf_counter() - begun)
    used = (sum(server.cpu_times()[:2]) - used) / (options.sessions * options.turns)
    requests = [value * 1e3 for seconds in found for value in seconds]
    median, late = statistics.median(requests), statistics.quantiles(requests, n=20)[-1]
    return {
        "at_once": at_once,
        "sessions_per_second": rate,
        "median_ms": median,
        "p95_ms": late,
        "processor_ms": used * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5, help="requests of a session")
    parser.add_argument("--words", type=int, default=400, help="of each message of the client's")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--at-once", type=int, default=32, help="sessions at a time")
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    options = parser.parse_args()
    facts = announce(("starlette", "uvicorn", "transformers", "tokenizers"))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, options.tokens), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    print("\nsessions at once   sessions/s   ms of a request: median     95%   processor")
    results = []
    for at_once in (1, options.at_once):
        found = asyncio.run(measure(url, psutil.Process(server.pid), options, at_once))
        results.append(found)
        rate, median, late, used = list(found.values())[1:]
        print(f"{at_once:16} {rate:12.1f} {median:25.1f} {late:7.1f} {used:11.1f}", flush=True)
    server.kill()
    server.join()
    sizes = {name: value for name, value in vars(options).items() if name != "out"}
    write_report(options.out, **facts, **sizes, results=results)


if __name__ == "__main__":
    main()
