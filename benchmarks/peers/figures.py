"""From the steps of runs to medians and a table. Knows nothing of any framework but the names of its phases."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steps import MARK
from task import NUM_PROMPTS, SAMPLES
from watching import Watched

PHASES = ("sync", "generate", "reward", "evaluate", "update", "other")
# A framework's names for them; `evaluate` is every forward pass without a gradient, by actor, reference or critic.
NAMES = {
    "sync": ("sync",),
    "generate": ("generate", "gen"),
    "reward": ("reward",),
    "evaluate": ("evaluate_models", "log_probs", "ref_log_probs", "old_log_prob", "ref", "values"),
    "update": ("update", "update_actor", "update_critic"),
}


@dataclass(frozen=True)
class Step:
    """One step: its seconds, those of its phases, and processor seconds of its own processes and of all others."""

    seconds: float
    phases: dict[str, float]
    own: float
    others: float
    reward: float

    def is_quiet(self, cores: float) -> bool:
        """Whether other processes took less than so many cores during the step."""
        return self.others < cores * self.seconds


def read_log(log: Path) -> list[dict[str, Any]]:
    """The steps that a framework's process has printed."""
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(line.partition(MARK)[2]) for line in lines if MARK in line]


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The steps of a run of megarl's."""
    found = []
    for line in file.read_text().splitlines():
        metrics = json.loads(line)
        phases = {
            key.removeprefix("timing_s/"): value
            for key, value in metrics.items()
            if key.startswith("timing_s/")
        }
        end = metrics["time"]
        found.append(
            {
                "begin": end - phases["step"],
                "end": end,
                "phases": phases,
                "reward": metrics["critic/score/mean"],
            }
        )
    return found


def read_steps(rows: list[dict[str, Any]], seen: Watched) -> list[Step]:
    """The measurements of each step."""
    steps = []
    for row in rows:
        seconds = row["end"] - row["begin"]
        own, others = seen.used(row["begin"], row["end"])
        phases = split_phases(row["phases"], seconds)
        steps.append(Step(seconds, phases, own, max(0.0, others), row["reward"]))
    return steps


def split_phases(timed: dict[str, float], seconds: float) -> dict[str, float]:
    """The seconds of a step by PHASES; what no phase has is `other`, or the update's where that is not timed by itself."""
    found = {
        phase: sum(timed[name] for name in names if name in timed)
        for phase, names in NAMES.items()
        if any(name in timed for name in names)
    }
    rest = seconds - sum(found.values())
    if "update" in found:
        return found | {"other": rest}
    other = timed.get("other", 0.0)
    return found | {"update": rest - other, "other": other}


def figures(steps: list[Step], cores: float, wanted: int) -> dict[str, Any]:
    """Medians over the quiet steps: those in which others took less than `cores` cores.

    Where fewer than `wanted` are quiet, over all, and `quiet_steps` says so.
    """
    quiet = [step for step in steps if step.is_quiet(cores)]
    used = quiet if len(quiet) >= wanted else steps
    seconds = statistics.median(step.seconds for step in used)
    names = [name for name in PHASES if any(name in step.phases for step in used)]
    return {
        "steps": len(steps),
        "quiet_steps": len(quiet),
        "of_quiet_steps": used is quiet,
        "seconds": seconds,
        "least_seconds": min(step.seconds for step in used),
        "most_seconds": max(step.seconds for step in used),
        "phases": {name: statistics.median(step.phases.get(name, 0.0) for step in used) for name in names},
        "processor_seconds": statistics.median(step.own for step in used),
        "samples_per_s": NUM_PROMPTS * SAMPLES / seconds,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """The figures of all frameworks, in Markdown."""
    header = ["", "step s", *PHASES, "CPU s", "samples/s", "PSS GiB", "processes", "start s", "quiet"]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for label, result in results.items():
        if "figures" not in result:
            lines.append(f"| {label} | failed: {result['error']} |" + " |" * (len(header) - 2))
            continue
        found = result["figures"]
        cells = [
            label,
            f"**{found['seconds']:.2f}**",
            *(f"{found['phases'][name]:.2f}" if name in found["phases"] else "-" for name in PHASES),
            f"{found['processor_seconds']:.2f}",
            f"{found['samples_per_s']:.0f}",
            f"{result['peak_pss_gib']:.1f}",
            str(result["processes"]),
            f"{result['start_seconds']:.0f}",
            f"{found['quiet_steps']}/{found['steps']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
