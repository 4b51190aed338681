"""An agent that writes a program: the policy tries drafts by a tool, and its last message has the program as a block of Python.

It runs in a sandbox (`gateway.sandbox`), and the drafts in it, too, without the session's key. The agent knows no tests and posts no score: the rule
of the data judges the last message, outside the sandbox (`data_source: codecontests` and the like, docs/rewards.md).
"""

import json
import subprocess
import sys
from typing import Any

from openai import OpenAI

TURNS = 6
SECONDS = 10.0  # of a draft
CHARACTERS = 2000  # of its output that the policy reads
RUN = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Runs a Python program, and gives its exit code and what it has printed.",
        "parameters": {
            "type": "object",
            "properties": {"program": {"type": "string"}, "stdin": {"type": "string"}},
            "required": ["program"],
        },
    },
}


def run(program: str, stdin: str = "") -> str:
    """The exit code of a program and the end of what it has printed."""
    command = [sys.executable, "-I", "-c", program]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            env={},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"not ended after {SECONDS:g} s"
    return f"exit code {done.returncode}\n{done.stdout[-CHARACTERS:]}"


def answer_call(name: str, arguments: str) -> str:
    """What the policy is told of a call, also of one that is wrong."""
    if name != "run":
        return f"there is no tool {name}, only run"
    try:
        given = json.loads(arguments)
    except json.JSONDecodeError as error:
        return f"arguments: {error}"
    program, stdin = given.get("program"), given.get("stdin", "")
    if not isinstance(program, str) or not isinstance(stdin, str):
        return "arguments: program and stdin are texts"
    return run(program, stdin)


def agent(task: dict[str, Any]) -> None:
    """A session of `TURNS` requests at most."""
    policy = OpenAI(max_retries=0, timeout=None)
    messages: list[Any] = task["messages"] or [{"role": "user", "content": task["prompt"]}]
    for _ in range(TURNS):
        said = (
            policy.chat.completions.create(model="policy", messages=messages, tools=[RUN]).choices[0].message
        )
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return
        for call in said.tool_calls:
            told = answer_call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
