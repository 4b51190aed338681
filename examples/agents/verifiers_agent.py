"""Environments of verifiers 0.4, as they are: a data set of an environment's tasks, and an agent that plays one of them.

    PYTHON verifiers_agent.py '{"taskset": {"id": "MODULE"}}' train.jsonl --stop 256

writes a row a task, and `play` is the agent. PYTHON (`gateway.python`) is that of a virtual environment with verifiers and the environment's
package: verifiers and SGLang need different versions of openai.
"""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf


def load(environment: str) -> vf.Env:
    """The environment of a configuration, verifiers' section `env` as JSON text."""
    return vf.load_environment(vf.resolve_env_config(json.loads(environment)))


def write_rows(environment: str, path: Path, start: int, stop: int) -> None:
    env = load(environment)
    with path.open("w", encoding="utf-8") as file:
        for task in itertools.islice(env.taskset, start, stop):
            row = {
                "data_source": f"verifiers/{env.config.env_id}",
                "prompt": task.data.prompt_text or "-",
                "extra_info": {"environment": environment, "index": task.data.idx},
            }
            file.write(json.dumps(row) + "\n")


async def play(task: dict[str, Any]) -> float:
    """The sum of the rewards of all agents that the policy has played."""
    env, index = load(task["extra_info"]["environment"]), task["extra_info"]["index"]
    one = next(itertools.islice(env.taskset, index, None))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
        episode = await env.run_episode(one, context)
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        sys.exit("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode has failed")
    return sum(trace.reward for trace in episode.traces if trace.agent.trainable)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("environment", help="verifiers' section env, as JSON")
    parser.add_argument("out", type=Path, help="file of JSON lines")
    parser.add_argument("--start", type=int, default=0, help="first task")
    parser.add_argument("--stop", type=int, help="task after the last one; all where it is left out")
    options = parser.parse_args()
    write_rows(options.environment, options.out, options.start, options.stop)
