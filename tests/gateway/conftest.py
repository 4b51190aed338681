"""The gateway behind a real HTTP server, in a thread, in front of a policy whose words are scripted."""

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import uvicorn

from megarl.gateway.reader import TurnReader
from megarl.gateway.server import KEEP_ALIVE, listen, make_app
from megarl.gateway.service import Gateway, Limits, Session
from megarl.rollout.engine import SamplingParams
from tests.gateway.policy import WrittenPolicy
from tests.gateway.published import published

OWNER = "sk-owner"
MODEL = "policy"


@dataclass
class Served:
    """A running server."""

    url: str
    gateway: Gateway
    policy: WrittenPolicy
    now: list[float]
    loop: asyncio.AbstractEventLoop

    def session(self) -> Session:
        """A new session; its key is `token`."""
        return self.gateway.begin("s")


@pytest.fixture
def sglang_parsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang can be imported without a GPU."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")


# Creating a context reads a file of certificates, though no client of these tests uses any.
_ssl_context = cache(ssl.create_default_context)


@pytest.fixture(autouse=True)
def certificates_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each HTTP client creates a TLS context; here all share one."""
    monkeypatch.setattr(ssl, "create_default_context", _ssl_context)


@pytest.fixture(scope="session")
def ending() -> Iterator[list[threading.Thread]]:
    """Threads of servers that were told to end. A server notices within a tenth of a second, and no test waits for that."""
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join(10)


@pytest.fixture
def serve(sglang_parsers: None, ending: list[threading.Thread]) -> Iterator[Callable[..., Served]]:
    """serve(words of the policy, options of the gateway): a server, which ends with the test."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(
        words: list[str],
        template: str = "qwen2_5",
        tools: str | None = "qwen25",
        reasoning: str | None = None,
        limits: Limits | None = None,
        fixed_sampling: bool = False,
        players: tuple[str, ...] = (),
        **options: object,
    ) -> Served:
        tokenizer = published(template)
        policy = WrittenPolicy(tokenizer, words, **options)  # type: ignore[arg-type]
        reader = TurnReader(tokenizer, tools, reasoning)
        sampling, now = SamplingParams(), [0.0]
        gateway = Gateway(
            policy,
            tokenizer,
            reader,
            [MODEL],
            sampling,
            limits,
            players=players,
            fixed_sampling=fixed_sampling,
            clock=lambda: now[0],
        )
        listener = listen("127.0.0.1", 0)
        app = make_app(gateway, OWNER)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=KEEP_ALIVE))
        loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=lambda: loop.run_until_complete(server.serve([listener])), daemon=True
        )
        thread.start()
        while not server.started:
            time.sleep(0.002)
        servers.append((server, thread))
        return Served(f"http://127.0.0.1:{listener.getsockname()[1]}", gateway, policy, now, loop)

    yield start
    for server, thread in servers:
        server.should_exit = True
        ending.append(thread)
