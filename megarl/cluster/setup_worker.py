"""The script that Ray runs first in the process of each worker of a cluster that megarl starts: it becomes the worker's command.

It stands in for Ray's own script of this name (ray/_private/workers, 2.60), which imports Ray for these few lines: a second of a core for each rank.

This file needs the standard library only.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="


def command(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command that a worker's process becomes, and the variables that its environment gets.

    Args:
        arguments: of the script, as Ray gives them: the runtime environment as JSON, the language, and the worker's own.
    """
    own = [text for text in arguments if not text.startswith((_CONTEXT, _LANGUAGE))]
    given = {text.split("=", 1)[0] + "=": text.split("=", 1)[1] for text in arguments if text not in own}
    assert given.get(_LANGUAGE) == "PYTHON", given
    context = json.loads(given.get(_CONTEXT) or "{}")
    if entrypoint := context.get("override_worker_entrypoint"):
        own[0] = entrypoint
    interpreter = context.get("py_executable") or sys.executable  # as a shell reads it
    variables = {name: _expanded(value) for name, value in (context.get("env_vars") or {}).items()}
    if prefix := context.get("command_prefix"):
        return ["bash", "-c", " ".join([*prefix, "exec", interpreter, shlex.join(own)])], variables
    return [*shlex.split(interpreter), *own], variables


def _expanded(value: str) -> str:
    """`value` with the values of the variables that it names; unset variables are empty."""
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))


if __name__ == "__main__":
    becomes, added = command(sys.argv[1:])
    os.environ.update(added)
    os.execvp(becomes[0], becomes)
