"""Small jobs on a given machine: guards, ports, log tails."""

import os
import random
import re
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster import guard

TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
# Lines of Python's `warnings`: advice to programmers that does not explain why a process ended.
_WARNING = re.compile(r"\S+\.py:\d+: \w*Warning: ")
# Outside Linux's ephemeral ports (32768-60999) and Ray's worker ports (10002-19999): from either, some other
# process may take the port between the choice and its use seconds later.
_PORTS = range(20000, 32768)


def start_guard(
    mark: str, parent: int, directories: Sequence[str] = (), output: int = subprocess.DEVNULL
) -> None:
    """Starts a guard (see guard.py) over the calling process.

    `mark` is `NAME=value`, set in this process's environment by the caller; `parent` is the pid that must live
    as long as this process, 0 for none; `directories` are removed at the end, if they are there; `output` is a
    file descriptor.
    """
    command = [sys.executable, "-S", "-I", guard.__file__, str(os.getpid()), str(parent), mark, *directories]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(guard.MARK_PREFIX)
    }
    # Its own session: it must survive Ctrl-C in a terminal and the kill of this process's group.
    subprocess.run(
        command,
        check=True,
        start_new_session=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


def reserve_port() -> socket.socket:
    """A socket bound, not listening, to a free port of this machine; to be closed before the port is used."""
    for port in random.sample(_PORTS, len(_PORTS)):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind(("", port))
        except OSError:
            sock.close()
            continue
        return sock
    raise RuntimeError(f"no free port between {_PORTS.start} and {_PORTS.stop - 1} on {socket.gethostname()}")


def log_tail(path: str) -> tuple[str, str]:
    """(the last TAIL_LINES lines of a rank's log, without Python's warnings, and its guard's line about its end, or "")."""
    if not Path(path).exists():
        return "", ""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    cause = next(
        (line.removeprefix(guard.ENDED) for line in reversed(lines) if line.startswith(guard.ENDED)), ""
    )
    own = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if not line.startswith(guard.ENDED)
        and not _WARNING.match(line)
        and not (_WARNING.match(before) and line.startswith("  "))  # the line of code that it is about
    ]
    return "\n".join(own[-TAIL_LINES:]), cause


def on_node(node_id: str, seconds: float, function: Callable[..., Any], *args: Any) -> Any | None:
    """`function(*args)` on a node of the cluster; None if that node did not answer within `seconds`."""
    if node_id == ray.get_runtime_context().get_node_id():
        return function(*args)
    try:
        return ray.get(submit(node_id, function, *args), timeout=seconds)
    except ray.exceptions.RayError:  # the node may be as dead as the process in question
        return None


def submit(node_id: str, function: Callable[..., Any], *args: Any) -> ray.ObjectRef:
    """Start `function(*args)` on a node of the cluster."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return _call.options(scheduling_strategy=strategy).remote(function, *args)


def living_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that are alive, as Ray describes them."""
    return [node for node in ray.nodes() if node["Alive"]]


def spread(
    nodes: Sequence[str], function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, str | None, Any]]:
    """Make many calls of a function, on each node one at a time, with the arguments in `calls`.

    A node on which a call failed is given no other. The call is made on another node, after all others have begun.

    Yields:
        (index of the call, its node, result) as calls end, and then (index, None, None) for those that no node could make.
    """
    waiting, idle = deque(range(len(calls))), deque(nodes)
    running: dict[ray.ObjectRef, tuple[int, str]] = {}

    def give() -> None:
        while waiting and idle:
            index, node = waiting.popleft(), idle.popleft()
            running[submit(node, function, *calls[index])] = index, node

    give()
    while running:
        [done], _ = ray.wait(list(running), num_returns=1)
        index, node = running.pop(done)
        try:
            result = ray.get(done)
        except ray.exceptions.RayError:  # the function's own error, too
            waiting.append(index)
            give()
            continue
        idle.append(node)
        give()
        yield index, node, result
    for index in sorted(waiting):
        yield index, None, None


@ray.remote(num_cpus=0, max_retries=0)
def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
