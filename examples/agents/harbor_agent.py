"""Tasks of Harbor 0.26 (https://harborframework.com), as they are: a data set of a folder of tasks, and an agent that plays one by `harbor`.

    python harbor_agent.py TASKS train.jsonl -- --agent terminus-2 --model openai/policy --env docker

writes a row a task. `play` is the agent: `harbor trial start` makes the task's environment, has Harbor's agent call the policy there, and runs the
task's verifier, whose reward is the score. The options behind "--" are those of that command, which is run as it is found in PATH.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

OPTIONS = ("--agent", "terminus-2", "--model", "openai/policy")


def write_rows(tasks: Path, out: Path, options: list[str]) -> None:
    """A row for each folder of `tasks` with a task.toml, sorted by name; `tasks` itself may be one."""
    folders = sorted(path.parent for path in (*tasks.glob("task.toml"), *tasks.glob("*/task.toml")))
    if not folders:
        sys.exit(f"{tasks} has no folder with a task.toml")
    with out.open("w", encoding="utf-8") as file:
        for folder in folders:
            instruction = folder / "instruction.md"  # tasks of several steps have one each
            row = {
                "data_source": f"harbor/{tasks.resolve().name}",
                "prompt": instruction.read_text(encoding="utf-8") if instruction.exists() else folder.name,
                "extra_info": {"task": str(folder.resolve()), "options": json.dumps(options or OPTIONS)},
            }
            file.write(json.dumps(row) + "\n")


def play(task: dict[str, Any]) -> dict[str, Any]:
    """The score of a trial and all its rewards, as numbers by name."""
    told, trials = task["extra_info"], Path.cwd() / "trials"
    command = ["harbor", "trial", "start", "--path", told["task"]]
    command += ["--trials-dir", str(trials), "--trial-name", "trial", *json.loads(told["options"])]
    subprocess.run(command, check=True)
    result = json.loads((trials / "trial/result.json").read_text(encoding="utf-8"))
    rewards = (result.get("verifier_result") or {}).get("rewards")
    if not rewards:
        problem = result.get("exception_info") or {}
        sys.exit(f"no reward: {problem.get('exception_type')}: {problem.get('exception_message')}")
    # Of a verifier's reward.txt, which is the reward `reward`, or of its reward.json, whose rewards are added up without one of that name.
    score = float(rewards.get("reward", sum(rewards.values())))
    return {
        "score": score,
        "numbers": {f"harbor_{name}": float(value) for name, value in rewards.items()},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", type=Path, help="a folder of tasks")
    parser.add_argument("out", type=Path, help="file of JSON lines")
    parser.add_argument("options", nargs="*", help="of `harbor trial start`, behind --")
    given = parser.parse_args()
    write_rows(given.tasks, given.out, given.options)
