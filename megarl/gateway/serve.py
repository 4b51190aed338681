"""`megarl serve`: a model alone behind the gateway, with one engine in this process."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
from pathlib import Path

from megarl.gateway.reader import TurnReader
from megarl.gateway.server import KEEP_ALIVE, listen, make_app, url_of
from megarl.gateway.service import Gateway, Limits
from megarl.rollout.engine import EngineConfig, SamplingParams
from megarl.rollout.sglang.before_import import sglang_environment
from megarl.util.gpus import gpus_here


def run(options: argparse.Namespace) -> None:
    """Start the engine and serve until a signal comes.

    Raises:
        ValueError: there is no such model or parser, or the model cannot be served; OSError: the address is taken.
    """
    config = _engine_config(options)
    key, limits = _key(options.key_file), _limits(options)
    # Before the first import of torch, in which the parts that SGLang lacks on a machine without a GPU are installed.
    os.environ.update(sglang_environment(config.device, config.tensor_parallel_size))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the engine's processes are all on this machine
    from megarl.data.tokenizer import load_tokenizer
    from megarl.rollout.sglang.engine import SGLangEngine

    engine = SGLangEngine(config)  # it refuses models that cannot be served
    tokenizer = load_tokenizer(options.model)
    reader = TurnReader(tokenizer, options.tool_parser, options.reasoning_parser)
    names = options.name.split(",") if options.name else [Path(options.model).resolve().name]
    listener = listen(options.host, options.port)
    engine.start()
    try:
        players = options.players.split(",") if options.players else []
        gateway = Gateway(engine, tokenizer, reader, names, SamplingParams(), limits, players=players)
        host, port = listener.getsockname()[:2]
        url = url_of(host, port)
        print(f"serving {', '.join(names)} at {url} (OpenAI: /v1), key {key}", flush=True)
        engine.run(serve(gateway, key, listener))
    finally:
        engine.shutdown()


async def serve(gateway: Gateway, owner_key: str, listener: socket.socket) -> None:
    """Serve on a socket until SIGINT or SIGTERM; answers in progress have ten seconds to end."""
    import uvicorn

    config = uvicorn.Config(
        make_app(gateway, owner_key),
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=10,
    )
    await uvicorn.Server(config).serve([listener])


def _engine_config(options: argparse.Namespace) -> EngineConfig:
    device = options.device or ("cuda" if gpus_here() else "cpu")
    return EngineConfig(
        options.model,
        tensor_parallel_size=options.tensor_parallel_size,
        device=device,
        dtype=options.dtype or ("float32" if device == "cpu" else "bfloat16"),
        load_format="auto",
        context_length=options.context_length,
        gpu_memory_utilization=0.85,  # it has the GPU for itself
    )


def _limits(options: argparse.Namespace) -> Limits:
    """The limits of the options. Raises ValueError: one is below 1."""
    for name in ("max_new_tokens", "requests_per_minute"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, found {value}")
    return Limits(new_tokens=options.max_new_tokens, requests_per_minute=options.requests_per_minute)


def _key(file: str | None) -> str:
    """The text of a file, or a new key.

    Raises:
        ValueError: the file is empty.
    """
    if file is None:
        return f"sk-{secrets.token_urlsafe(24)}"
    key = Path(file).read_text(encoding="utf-8").strip()
    if not key:
        raise ValueError(f"--key-file {file} is empty")
    return key
