"""Calls an agent that is a Python function, in the process that the agent runner has started for a task.

    python -m megarl.gateway.call FILE.py FUNCTION

The function gets the task (the JSON of MEGARL_TASK as a dict) and may be a coroutine function. A number that it returns is posted as the
session's score; a dict is posted as it is (`score`, a number or one for each player, `numbers`: docs/gateway.md); None: the score is posted
otherwise, or is the reward function's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.util.plugins import import_file


def find_function(name: str, key: str) -> Callable[..., Any]:
    """The function that "FILE.py:FUNCTION" names.

    Args:
        key: the key of the configuration that gives it, for messages.

    Raises:
        ValueError: it is not of this form, the file is missing or fails, or it has no such function.
    """
    file, _, function = name.rpartition(":")
    if not file or not function.isidentifier():
        raise ValueError(f"{key}={name!r} must be FILE.py:FUNCTION")
    found = getattr(import_file(file, key), function, None)
    if not callable(found):
        raise ValueError(f"{key}={name!r}: {file} has no function {function}")
    return found


def main() -> None:
    """As a script."""
    call(*sys.argv[1:])


def call(file: str, function: str) -> None:
    """Call the agent with the task of this process, and post its score."""
    # As for a script: modules next to the file can be imported.
    sys.path.insert(0, str(Path(file).parent))
    agent = find_function(f"{file}:{function}", "agent")
    score = agent(json.loads(Path(os.environ["MEGARL_TASK"]).read_text(encoding="utf-8")))
    if inspect.iscoroutine(score):
        score = asyncio.run(score)
    if score is not None:
        _post(score if isinstance(score, dict) else {"score": float(score)})


def _post(body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"{os.environ['MEGARL_GATEWAY']}/session/score",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    try:  # The gateway is near: a proxy of the environment is not for it.
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()
    except urllib.error.HTTPError as error:
        told = error.read().decode(errors="replace")
        raise ValueError(f"the gateway has refused what the agent returned, {body}: {told}") from None


if __name__ == "__main__":
    main()
