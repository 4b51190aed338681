"""The processes of sandboxes: an agent's program from its start to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import IO, Protocol

from megarl.gateway.sandboxes.interface import AgentProcess, Program, Sandbox

_TICK = 1.0  # seconds between two looks at an agent, of which at most two count
_STOP_SECONDS = 60.0


async def run_agent(sandbox: Sandbox, agent: AgentProcess, log: IO[bytes], seconds: float) -> int | None:
    """Start an agent and wait until it ends, by itself or at its time limit; leave nothing of it, also where this coroutine is cancelled.

    Returns:
        Its exit code; None: it did not end in time.

    Raises:
        ValueError: this task's agent cannot be started; OSError: its program cannot be.
    """
    process = await _start(sandbox.start(agent), agent, log)
    code = None
    try:
        code = await ended_within(process, seconds)
    finally:
        with suppress(ProcessLookupError):  # none of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        # Also where the program has failed by itself: the agent need not have ended with it.
        if code != 0 and (stopping := sandbox.stop(agent)) is not None:
            await _stop(stopping, agent)
    return code


async def _start(program: Program, agent: AgentProcess, log: IO[bytes] | int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *program.arguments,
        cwd=agent.work,
        env=dict(program.environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


async def _stop(program: Program, agent: AgentProcess) -> None:
    process = await _start(program, agent, asyncio.subprocess.DEVNULL)
    if await ended_within(process, _STOP_SECONDS) is None:
        process.kill()
    await process.wait()


class Ending(Protocol):
    async def wait(self) -> int: ...


async def ended_within(process: Ending, seconds: float) -> int | None:
    """The exit code of a process; None: it did not end within this time, in which the event loop's standstills do not count."""
    end = asyncio.ensure_future(process.wait())
    try:
        while seconds > 0:
            begun = time.monotonic()
            await asyncio.wait({end}, timeout=min(seconds, _TICK))
            if end.done():
                return end.result()
            # The event loop may have stood still.
            seconds -= min(time.monotonic() - begun, 2 * _TICK)
        return None
    finally:
        end.cancel()
