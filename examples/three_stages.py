"""InstructGPT's three stages on one machine, by megarl's public commands, each printed so that it can be run by hand.

Makes a tiny model and a preference task, lets the model read plain texts, fine-tunes it on demonstrations, trains a reward
model on ranked answers, and trains the policy with PPO against it; then, for comparison, with DPO on the rankings alone.
After each stage a rule that no stage has seen judges answers to held-out requests. Ends with a table of what each stage
gained, and `<out>/summary.json`.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

DEFAULT_OUT = "outputs/three_stages"  # the recipes' folder
POLICIES = {
    "pretrain": "plain texts",
    "sft": "1: demonstrations",
    "ppo": "3: PPO with the reward model",
    "dpo": "2 and 3 in one: DPO",
}
TASK = {"num-layers": "4", "teacher-errors": "0.3"}
COMMANDS = {"pretrain": "sft", "sft": "sft", "rm": "rm", "dpo": "dpo"}
QUALITIES = ("name", "thing", "tone", "score", "perfect")
console = Console(highlight=False)


def run(*arguments: str) -> float:
    """Run one megarl command; returns its seconds. Ends everything where the command fails."""
    console.print(f"\n[bold]$ megarl {shlex.join(arguments)}[/bold]")
    begun = time.perf_counter()
    result = subprocess.run([sys.executable, "-m", "megarl", *arguments])
    if result.returncode:
        sys.exit(f"ended: the command above failed with exit code {result.returncode}")
    return time.perf_counter() - begun


def commands(out: str, seed: int) -> dict[str, tuple[str, ...]]:
    """The stages' names and commands, in their order."""
    # Three kinds of commands, which share most keys: supervised training, judging by the rule, and PPO.
    data = f"{out}/data"
    task = [text for name, number in TASK.items() for text in (f"--{name}", number)]

    def tune(name: str, recipe: str, files: str, model: str, *more: str) -> tuple[str, ...]:
        return (
            COMMANDS[name],
            f"recipe:three_stages_{recipe}_cpu",
            f"data.train_files={data}/{files}.parquet",
            f"data.seed={seed}",
            f"model.path={out}/{model}",
            f"trainer.default_local_dir={out}/{name}",
            *more,
        )

    def judged(name: str) -> tuple[str, ...]:
        return (
            "eval",
            "recipe:three_stages_eval_cpu",
            f"model.path={out}/{name}/hf",
            f"data.val_files={data}/test.parquet",
            f"rollout.seed={seed}",
            f"trainer.default_local_dir={out}/eval-{name}",
        )

    return {
        "make_task": ("make-task", out, "--preferences", "--seed", str(seed), *task),
        "pretrain": tune("pretrain", "pretrain_sft", "texts", "model"),
        "eval_pretrain": judged("pretrain"),
        "sft": tune("sft", "sft", "sft", "pretrain/hf"),
        "eval_sft": judged("sft"),
        "rm": tune(
            "rm",
            "rm",
            "rankings",
            "sft/hf",
            f"data.val_files={data}/pairs_test.parquet",
            f"data.normalize_files={data}/sft.parquet",
        ),
        "ppo": (
            "train",
            "recipe:three_stages_ppo_cpu",
            f"data.train_files={data}/train.parquet",
            f"data.ptx.files={data}/texts.parquet",
            f"data.seed={seed}",
            f"actor_rollout_ref.model.path={out}/sft/hf",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"critic.model.path={out}/rm/hf",
            f"reward_model.model.path={out}/rm/hf",
            f"trainer.seed={seed}",
            f"trainer.default_local_dir={out}/ppo",
        ),
        "eval_ppo": judged("ppo"),
        "dpo": tune("dpo", "dpo", "rankings", "sft/hf", f"data.val_files={data}/pairs_test.parquet"),
        "eval_dpo": judged("dpo"),
    }


def read_steps(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def accuracies(folder: Path) -> dict[str, float]:
    """By step, the part of the held-out pairs that the model orders right."""
    return {str(step["step"]): step["val/accuracy"] for step in read_steps(folder) if "val/accuracy" in step}


def summarise(out: Path, seed: int, seconds: dict[str, float]) -> dict[str, object]:
    """The figures under stable keys."""
    rule = {}
    for name in POLICIES:
        scores = json.loads((out / f"eval-{name}" / "scores.json").read_text())
        rule[name] = {
            quality: scores["score/mean" if quality == "score" else f"reward/{quality}"]
            for quality in QUALITIES
        }
    ppo = read_steps(out / "ppo")
    return {
        "seed": seed,
        "rule": rule,
        "rm_accuracy": accuracies(out / "rm"),
        "dpo_accuracy": accuracies(out / "dpo"),
        "reward": [ppo[0]["critic/score/mean"], ppo[-1]["critic/score/mean"]],
        "ptx_loss": [ppo[0]["actor/ptx_loss"], ppo[-1]["actor/ptx_loss"]],
        "kl": ppo[-1]["actor/ref_kl"],
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "total_seconds": round(sum(seconds.values()), 1),
        "cores": os.cpu_count(),
        "model": str(out / "ppo" / "hf"),
    }


def print_summary(summary: dict, path: Path) -> None:
    table = Table(
        title="What the hidden rule finds in answers at temperature 1",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for column in ("stage", *QUALITIES):
        table.add_column(column, justify="left" if column == "stage" else "right")
    for name, text in POLICIES.items():
        table.add_row(text, *(f"{summary['rule'][name][quality]:.1%}" for quality in QUALITIES))
        if name == "sft":
            step, accuracy = list(summary["rm_accuracy"].items())[-1]
            told = f"2: reward model, right of {accuracy:.1%} of held-out pairs after step {step}"
            table.add_row(told, *("" for _ in QUALITIES))
    console.print(table)
    console.print(
        f"reward of the first and the last PPO step: {summary['reward'][0]:.2f}, {summary['reward'][1]:.2f}"
    )
    console.print(f"KL to the SFT policy in the last one: {summary['kl']:.3f} nats a token")
    console.print(
        f"loss of the plain texts in them (PPO-ptx): {summary['ptx_loss'][0]:.3f}, {summary['ptx_loss'][1]:.3f}"
    )
    console.print(
        f"{summary['total_seconds']:.0f} s on {summary['cores']} cores; model {summary['model']}; figures {path}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=DEFAULT_OUT, help="folder")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    seconds = {name: run(*command) for name, command in commands(options.out, options.seed).items()}
    summary = summarise(Path(options.out), options.seed, seconds)
    path = Path(options.out, "summary.json")
    path.write_text(json.dumps(summary, indent=2) + "\n")
    print_summary(summary, path)


if __name__ == "__main__":
    main()
