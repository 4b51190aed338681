"""The command that a worker's process executes is the one that Ray's own script makes."""

import os
import shlex
import sys

import pytest
from ray._private.runtime_env.context import RuntimeEnvContext
from ray.core.generated.common_pb2 import Language

from megarl.cluster.setup_worker import command

WORKER = ["/ray/default_worker.py", "--node-ip-address=127.0.0.1", "--name=two words"]


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"py_executable": f"{sys.executable} -S '/a b/fork_server.py' /socket"},
        {"env_vars": {"ONE_OF_THIS_TEST": "${HOME}/x:${MISSING_OF_THIS_TEST}", "OTHER_OF_THIS_TEST": "7"}},
        {"command_prefix": ["cd / &&"], "override_worker_entrypoint": "/in/the/container.py"},
    ],
    ids=["nothing", "interpreter", "variables", "prefix"],
)
def test_it_is_that_of_rays_script(context, monkeypatch):
    became = []
    # Ray executes a shell command; its words are the ones that the shell passes on.
    monkeypatch.setattr(os, "execvp", lambda program, args: became.extend(args))
    monkeypatch.setenv("ONE_OF_THIS_TEST", "")
    monkeypatch.setenv("OTHER_OF_THIS_TEST", "")
    text = RuntimeEnvContext(**context).serialize()
    RuntimeEnvContext.deserialize(text).exec_worker([*WORKER], Language.Value("PYTHON"))
    _, _, shell = became
    made, variables = command([*WORKER, f"--serialized-runtime-env-context={text}", "--language=PYTHON"])
    if context.get("command_prefix"):
        assert made == ["bash", "-c", shell]
    else:
        assert ["exec", *made] == shlex.split(shell)
    assert variables == {name: os.environ[name] for name in context.get("env_vars", {})}
