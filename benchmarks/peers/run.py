"""megarl compared with TRL and verl on one task, on this machine: seconds of a step by phase, memory, start-up.

    python benchmarks/peers/run.py                       # all of them; writes benchmarks/results/peers.json
    python benchmarks/peers/run.py --only megarl,trl --steps 10
    python benchmarks/peers/run.py --prepare             # only makes the environments and the task

Each framework has a virtual environment of its own under --root; those that are there are taken as they are. The frameworks
take turns, round after round, until each has --steps quiet steps (or --rounds are over). Run it in megarl's environment.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from facts import commit
from facts import environment as facts_of_machine
from figures import Step, figures, read_log, read_metrics, read_steps, table
from frameworks import HERE, REPOSITORY, Framework, command, environment, frameworks, python_of
from task import make_task
from watching import Watched, watch

WARMUP = 2  # first steps of each run, which are not counted
VERSIONS = "import sys, importlib.metadata as m; print(*(f'{n}={m.version(n)}' for n in sys.argv[1:]))"


def prepare(framework: Framework, root: Path) -> None:
    """Make its environment, unless that is finished."""
    if framework.environment is None:
        return
    folder = root / "venvs" / framework.environment
    wanted = json.dumps([framework.packages, framework.alone])
    done = folder / "finished.json"
    if not done.is_file() or done.read_text() != wanted:
        print(f"making {folder} ...", flush=True)
        done.unlink(missing_ok=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(python_of(framework, root)), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *framework.packages], check=True)
        if framework.alone:
            subprocess.run([*pip, "--no-deps", *framework.alone], check=True)
        done.write_text(wanted)
    if framework.prepare is not None:
        subprocess.run([str(python_of(framework, root)), str(HERE / framework.prepare)], check=True)


def versions(framework: Framework, root: Path) -> dict[str, str]:
    printed = subprocess.run(
        [str(python_of(framework, root)), "-c", VERSIONS, *framework.reported],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(entry.split("=") for entry in printed.stdout.split())


def run_once(
    framework: Framework, root: Path, task: Path, steps: int, number: int, timeout: float
) -> dict[str, Any]:
    """One run: its steps after the first ones, or how it failed."""
    out = root / "runs" / f"{framework.name}-{framework.algorithm}-{number}-{os.getpid()}"
    out.mkdir(parents=True)
    log = out.with_suffix(".log")
    called = command(framework, root, task, WARMUP + steps, out)
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as scratch:
        env = environment(framework, dict(os.environ), out, scratch)
        seen = watch(called, env, out, log, timeout)
    if seen.exit_code != 0:
        how = f"after {timeout} s" if seen.exit_code is None else f"exit code {seen.exit_code}"
        return {"error": f"{how}, see {log}"}
    rows = read_metrics(out / "metrics.jsonl") if framework.name == "megarl" else read_log(log)
    if len(rows) < WARMUP + 1:
        return {"error": f"{len(rows)} steps, see {log}"}
    found = read_steps(rows, seen)
    return {"steps": found[WARMUP:], **facts_of_run(rows, found, seen)}


def facts_of_run(rows: list[dict[str, Any]], steps: list[Step], seen: Watched) -> dict[str, Any]:
    return {
        "start_seconds": rows[0]["begin"] - seen.began,
        "first_step_seconds": steps[0].seconds,
        "peak_pss_gib": seen.peak_pss / 2**30,
        "processes": seen.processes,
        "first_reward": steps[0].reward,
        "last_reward": steps[-1].reward,
    }


def result_of(runs: list[dict[str, Any]], cores: float, wanted: int) -> dict[str, Any]:
    """All runs of a framework as one: of start-up the least seconds, of memory the most."""
    good = [run for run in runs if "error" not in run]
    if not good:
        return {"error": runs[-1]["error"]}
    steps = [step for run in good for step in run["steps"]]
    return {
        "figures": figures(steps, cores, wanted),
        "start_seconds": min(run["start_seconds"] for run in good),
        "first_step_seconds": min(run["first_step_seconds"] for run in good),
        "peak_pss_gib": max(run["peak_pss_gib"] for run in good),
        "processes": max(run["processes"] for run in good),
        "rewards": [(run["first_reward"], run["last_reward"]) for run in good],
        "errors": [run["error"] for run in runs if "error" in run],
        "steps": [vars(step) for step in steps],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("megarl", "trl", "verl")
    parser.add_argument("--only", default=",".join(names), help="of megarl, trl, verl")
    parser.add_argument("--algorithms", default="grpo,ppo")
    parser.add_argument("--steps", type=int, default=10, help="quiet steps of each")
    parser.add_argument("--rounds", type=int, default=4, help="at most")
    parser.add_argument(
        "--quiet", type=float, default=0.15, help="cores that others take at most in a quiet step"
    )
    parser.add_argument("--timeout", type=float, default=240, help="seconds of a run")
    parser.add_argument("--minutes", type=float, default=60, help="after which no further round begins")
    parser.add_argument("--root", type=Path, default=REPOSITORY / "outputs" / "peers")
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks/results/peers.json")
    parser.add_argument("--prepare", action="store_true", help="only make the environments and the task")
    args = parser.parse_args()
    args.only, args.algorithms = args.only.split(","), args.algorithms.split(",")
    if not set(args.only) <= set(names) or not set(args.algorithms) <= {"grpo", "ppo"}:
        parser.error(f"--only {','.join(args.only)}: choose of {', '.join(names)}; --algorithms of grpo, ppo")
    return args


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs is ended
    root = args.root.resolve()
    chosen = [one for one in frameworks() if one.name in args.only and one.algorithm in args.algorithms]
    for framework in chosen:
        prepare(framework, root)
    per_round = -(-args.steps // 2)
    task = root / "task"
    make_task(task, steps=WARMUP + per_round)
    if args.prepare:
        return
    report = {
        **facts_of_machine(()),
        **commit(),
        "warmup_steps": WARMUP,
        "versions_of": {one.label: versions(one, root) for one in chosen},
    }
    runs: dict[str, list[dict[str, Any]]] = {one.label: [] for one in chosen}
    results: dict[str, dict[str, Any]] = {}
    begun = time.monotonic()
    for number in range(args.rounds):
        if time.monotonic() - begun > 60 * args.minutes:
            break
        for framework in chosen:
            done = results.get(framework.label, {}).get("figures", {}).get("quiet_steps", 0)
            if done >= args.steps:
                continue
            run = run_once(framework, root, task, per_round, number, args.timeout)
            runs[framework.label].append(run)
            results[framework.label] = result_of(runs[framework.label], args.quiet, args.steps)
            print(f"round {number + 1}: {framework.label}: {run.get('error', 'done')}", flush=True)
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({**report, "results": results}, indent=1) + "\n")
    print(table(results))
    sys.exit(any("figures" not in result for result in results.values()))


if __name__ == "__main__":
    main()
