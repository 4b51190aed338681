"""A process in which reward functions run. `scorer` starts it, sends it samples, and replaces it when it dies.

Guarantees
- It ends with the controller, however that ends, and with every process of its own process group.
- It never outlives a reward that hangs: after `timeout` seconds it writes where the function was to the report file
  and exits, also from C code that never returns. Async functions that are over time are cancelled alone; the
  process dies only if they keep the event loop from running.
- Whatever a function raises (SystemExit included) is the result of that sample.

Messages are pickles over a socket. First it gets a `Setup` and answers `None`, or the text of an error. Then it gets
samples, and answers each, in any order, with its Score.
"""

import asyncio
import ctypes
import faulthandler
import inspect
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from megarl.rewards.registry import Reward, RewardFunctions, RewardSpec
from megarl.rewards.sample import Sample, Score, read_result
from megarl.util.signals import outlive_job_signals

_PR_SET_PDEATHSIG = 1
_TRACEBACK_LINES = 8
_MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True)
class Setup:
    """The first message to a worker. `timeout`: seconds a sample."""

    spec: RewardSpec
    timeout: float


def main(socket: int, report: int, parent: int) -> None:
    """Serve until the other end of `socket` closes. `report`: a file for the output of faulthandler."""
    _die_with(parent)
    outlive_job_signals()
    for descriptor in (socket, report):
        os.set_inheritable(descriptor, False)  # a process that a reward starts must not keep them open
    faulthandler.enable(report)
    connection = Connection(socket)
    try:
        setup: Setup = connection.recv()
    except EOFError:
        return
    try:
        functions = RewardFunctions(setup.spec)
    except BaseException as error:
        connection.send(str(error) if isinstance(error, ValueError) else describe(error))
        return
    connection.send(None)
    asyncio.run(_serve(connection, functions, _Watchdog(report, setup.timeout)))


def describe(error: BaseException) -> str:
    """An exception as `Type: message` and the last lines of its traceback, this file's own frames left out."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = "".join(traceback.format_tb(trace)).splitlines()[-_TRACEBACK_LINES:]
    return "\n".join([f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS], *lines])


class _Watchdog:
    """Ends the process once `timeout` seconds have passed since `arm`, from a thread of C that needs no GIL."""

    def __init__(self, report: int, timeout: float) -> None:
        self.timeout = timeout
        self._report = report

    def arm(self) -> None:
        faulthandler.dump_traceback_later(self.timeout, exit=True, file=self._report)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()


async def _serve(connection: Connection, functions: RewardFunctions, watchdog: _Watchdog) -> None:
    loop = asyncio.get_running_loop()
    closed: asyncio.Future[None] = loop.create_future()
    running: set[asyncio.Task] = set()

    async def run(sample: Sample) -> None:
        connection.send(await _score(functions.of(sample.data_source), sample, watchdog))
        running.discard(asyncio.current_task())
        if not running:
            watchdog.disarm()

    def receive() -> None:
        try:
            sample = connection.recv()
        except (EOFError, OSError):
            if not closed.done():
                closed.set_result(None)
            return
        running.add(loop.create_task(run(sample)))

    async def feed_watchdog() -> None:
        while True:
            await asyncio.sleep(min(1.0, watchdog.timeout / 4))
            if running:
                watchdog.arm()

    loop.add_reader(connection.fileno(), receive)
    feeder = loop.create_task(feed_watchdog())
    await closed
    feeder.cancel()
    for task in running:
        task.cancel()


async def _score(reward: Reward, sample: Sample, watchdog: _Watchdog) -> Score:
    begun = time.perf_counter()
    watchdog.arm()
    try:
        extra = None if sample.extra_info is None else json.loads(sample.extra_info)
        prompt = {"prompt_str": sample.prompt} if reward.takes_prompt else {}
        result = reward.function(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            extra_info=extra,
            **prompt,
        )
        if inspect.isawaitable(result):
            result = await asyncio.wait_for(result, watchdog.timeout)
        return read_result(sample.uid, result, time.perf_counter() - begun, len(sample.response))
    except BaseException as error:
        seconds = time.perf_counter() - begun
        if isinstance(error, TimeoutError) and seconds >= watchdog.timeout:
            return Score(sample.uid, None, error=f"no result within {watchdog.timeout:g} s", seconds=seconds)
        return Score(sample.uid, None, error=describe(error), seconds=seconds)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        sys.exit(1)
