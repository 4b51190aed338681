"""The demo: megarl's whole job on one machine, by its public commands, each printed so that it can be run by hand.

Makes a tiny model and word problems, fine-tunes it, trains it with PPO, measures its accuracy before and after, checks
the exported model with transformers, and ends with a table and `<out>/summary.json`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent
MEMORY_PERIOD = 2.0  # seconds between two looks at the memory of all processes
console = Console(highlight=False)


class PeakMemory(threading.Thread):
    """The largest sum of proportional set sizes of this process and all below it, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(MEMORY_PERIOD):
            self.peak = max(self.peak, self._now())

    def stop(self) -> int:
        self._done.set()
        self.join()
        return self.peak

    def _now(self) -> int:
        total = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:  # it has ended
                continue
        return total


def run(*arguments: str) -> float:
    """Run one megarl command; returns its seconds. Ends the demo where the command fails."""
    console.print(f"\n[bold]$ megarl {shlex.join(arguments)}[/bold]")
    begun = time.perf_counter()
    result = subprocess.run([sys.executable, "-m", "megarl", *arguments], cwd=REPOSITORY)
    if result.returncode:
        sys.exit(f"the demo ended: the command above failed with exit code {result.returncode}")
    return time.perf_counter() - begun


def read_steps(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def summarise(out: Path, seed: int, seconds: dict[str, float], peak: int) -> dict[str, object]:
    """The demo's figures under stable keys; medians over steps but the first."""
    before, after = (
        json.loads((out / name / "scores.json").read_text()) for name in ("eval-before", "eval-after")
    )
    ppo, sft = read_steps(out / "ppo"), read_steps(out / "sft")

    def typical(steps: list[dict[str, float]], name: str) -> float:
        return median([step[name] for step in steps[1:] if name in step])

    return {
        "seed": seed,
        "accuracy_before": before["score/mean"],
        "accuracy_after": after["score/mean"],
        "accuracy_curve": {str(s["step"]): s["val/score/mean"] for s in ppo if "val/score/mean" in s},
        "num_problems": int(after["num_problems"]),
        "sft_tokens_per_s": typical(sft, "perf/tokens_per_s"),
        "generate_tokens_per_s": typical(ppo, "perf/generate_tokens_per_s"),
        "evaluate_models_tokens_per_s": typical(ppo, "perf/evaluate_models_tokens_per_s"),
        "update_tokens_per_s": typical(ppo, "perf/update_tokens_per_s"),
        "ppo_step_seconds": typical(ppo, "timing_s/step"),
        "sync_bytes": typical(ppo, "sync/bytes_total"),
        "sync_bytes_max_per_rank": typical(ppo, "sync/bytes_max_per_rank"),
        "sync_seconds": typical(ppo, "timing_s/sync"),
        "max_log_prob_difference": max(step.get("training/rollout_log_prob_diff_max", 0.0) for step in ppo),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "total_seconds": round(sum(seconds.values()), 1),
        "peak_memory_gib": round(peak / 2**30, 2),
        "cores": os.cpu_count(),
        "model": str(out / "ppo" / "hf"),
        "trajectories": str(out / "ppo" / "rollouts"),
        "tensorboard": str(out / "ppo" / "tensorboard"),
    }


def print_summary(summary: dict[str, object], path: Path) -> None:
    table = Table(title="megarl demo", box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    curve = " -> ".join(f"{value:.1%}" for value in summary["accuracy_curve"].values())
    rows = [
        (
            "accuracy before PPO",
            f"{summary['accuracy_before']:.1%} of {summary['num_problems']} held-out problems",
        ),
        ("accuracy after PPO", f"{summary['accuracy_after']:.1%}"),
        ("on the way", curve),
        ("SFT", f"{summary['sft_tokens_per_s']:,.0f} tokens/s"),
        ("rollout", f"{summary['generate_tokens_per_s']:,.0f} generated tokens/s"),
        ("log-probs and values", f"{summary['evaluate_models_tokens_per_s']:,.0f} tokens/s"),
        ("actor and critic update", f"{summary['update_tokens_per_s']:,.0f} tokens/s"),
        ("PPO step", f"{summary['ppo_step_seconds']:.2f} s"),
        ("weight sync", f"{summary['sync_bytes']:,.0f} bytes in {summary['sync_seconds']:.2f} s, verified"),
        ("trainer and engine differ by", f"{summary['max_log_prob_difference']:.1e} nats at most"),
        ("memory of all processes", f"{summary['peak_memory_gib']} GiB at most"),
        ("time", f"{summary['total_seconds']:.0f} s on {summary['cores']} cores"),
        ("model", str(summary["model"])),
        ("trajectories", str(summary["trajectories"])),
        ("TensorBoard", str(summary["tensorboard"])),
        ("these figures", str(path)),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="outputs/demo", help="folder, relative to the repository")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    out, seed = options.out, str(options.seed)
    memory = PeakMemory()
    memory.start()
    model = f"{out}/ppo/hf"
    seconds = {
        "make_task": run("make-task", out, "--seed", seed),
        "sft": run(
            "sft",
            "recipes/quickstart_sft.yaml",
            f"data.train_files={out}/data/sft.parquet",
            f"data.seed={seed}",
            f"model.path={out}/model",
            f"trainer.default_local_dir={out}/sft",
        ),
        "eval_before": run(*_eval(out, "eval-before", f"{out}/sft/hf")),
        "ppo": run(
            "train",
            "recipes/quickstart_ppo.yaml",
            f"data.train_files={out}/data/train.parquet",
            f"data.val_files={out}/data/test.parquet",
            f"data.seed={seed}",
            f"actor_rollout_ref.model.path={out}/sft/hf",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"trainer.seed={seed}",
            f"trainer.default_local_dir={out}/ppo",
        ),
        "eval_after": run(*_eval(out, "eval-after", model)),
        "verify": run("verify", model, f"{out}/eval-after/trajectories.parquet"),
    }
    summary = summarise(REPOSITORY / out, options.seed, seconds, memory.stop())
    path = REPOSITORY / out / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n")
    print_summary(summary, path)


def _eval(out: str, name: str, model: str) -> tuple[str, ...]:
    return (
        "eval",
        "recipes/quickstart_eval.yaml",
        f"model.path={model}",
        f"data.val_files={out}/data/test.parquet",
        f"trainer.default_local_dir={out}/{name}",
    )


if __name__ == "__main__":
    main()
