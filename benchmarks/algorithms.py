"""Every algorithm for a few steps on the demo's task (those of several turns: on the calculator's): the reward at the start and at the end of a real run of each.

    python benchmarks/algorithms.py [--steps 10] [--only grpo rloo] [--seed 1]

Each run is a `megarl train` of its own: Megatron ranks under Ray, a SGLang engine, the demo's model after its supervised
warm-up (made first where it is not there). The estimators and the policy losses are paired, so that every one of them is
in a run. Prints a table, writes `outputs/algorithms/results.json`; exit code 1 if a reward did not rise.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from facts import environment, write_report
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = Path("outputs/algorithms")
ENDS = 2  # steps at either end of a run whose mean scores are compared
POLICY = "actor_rollout_ref.actor"
LOSS = f"{POLICY}.policy_loss.loss_mode"


@dataclass(frozen=True)
class Case:
    """One run: a recipe with `overrides` for an estimator and a policy loss."""

    estimator: str
    loss: str
    overrides: tuple[str, ...] = ()
    samples: int = 8
    recipe: str = "quickstart_ppo"

    @property
    def name(self) -> str:
        return f"{self.estimator} {self.loss}"

    def arguments(self, folder: Path, steps: int, seed: int) -> list[str]:
        critic = () if self.estimator == "gae" else ("critic=null",)
        return [
            f"recipes/{self.recipe}.yaml",
            f"algorithm.adv_estimator={self.estimator}",
            f"{LOSS}={self.loss}",
            f"actor_rollout_ref.rollout.n={self.samples}",
            f"data.train_batch_size={128 // self.samples}",
            f"{POLICY}.ppo_mini_batch_size={64 // self.samples}",
            f"{POLICY}.optim.lr_warmup_steps=4",
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={folder}",
            f"trainer.seed={seed}",
            f"data.seed={seed}",
            "trainer.test_freq=-1",
            "data.val_files=null",
            *critic,
            *self.overrides,
        ]


CASES = (
    Case("gae", "vanilla", samples=1),
    Case("grpo", "gspo", (f"{POLICY}.loss_agg_mode=seq-mean-token-mean",)),
    Case("grpo_passk", "vanilla", samples=4),
    Case("rloo", "cispo"),
    Case("remax", "vanilla", samples=1),
    Case("reinforce_plus_plus", "sapo", samples=1),
    Case("reinforce_plus_plus_baseline", "gmpo"),
    Case("opo", "clip_cov"),
    Case("grpo", "kl_cov"),
    Case("gpg", "gpg"),
    Case("maxrl", "vanilla"),
    Case(
        "gdpo",
        "vanilla",
        (
            "custom_reward_function.path=benchmarks/two_rewards.py",
            "algorithm.reward_weights={score: 1.0, form: 0.5}",
            "algorithm.use_kl_in_reward=false",
        ),
    ),
    Case("gigpo", "vanilla", ("algorithm.gamma=0.95",), recipe="calculator_cpu"),
    Case(
        "reinforce_plus_plus",
        "vanilla",
        ("custom_reward_function.path=benchmarks/step_rewards.py",),
        samples=1,
    ),
    Case("rloo", "topr", (f"{POLICY}.optim.lr=1e-4",)),
    Case("grpo", "dppo_tv", (f"{POLICY}.clip_ratio=0.15", f"{POLICY}.clip_ratio_c=20")),
    Case("grpo", "dppo_kl", (f"{POLICY}.clip_ratio=0.05", f"{POLICY}.clip_ratio_c=20")),
)


# By recipe: the folder of its task, the options of `megarl make-task`, and the recipe of its supervised warm-up.
TASKS = {
    "quickstart_ppo": (Path("outputs/demo"), (), "quickstart_sft"),
    "calculator_cpu": (Path("outputs/calculator"), ("--calculator", "--max-operand", "20"), "calculator_sft"),
}


def prepare(recipe: str) -> None:
    """The task of a recipe and its model after a supervised warm-up, made where it is not there."""
    folder, options, warm_up = TASKS[recipe]
    if (folder / "sft" / "hf" / "config.json").is_file():
        return
    for command in (["make-task", str(folder), *options], ["sft", f"recipes/{warm_up}.yaml"]):
        subprocess.run([sys.executable, "-m", "megarl", *command], cwd=REPOSITORY, check=True)


def run_case(case: Case, steps: int, seed: int) -> dict[str, object]:
    """Run a case; its mean scores at both ends. Ends the program with the run's output where it fails."""
    folder = OUT / case.name.replace(" ", "-")
    (REPOSITORY / folder / "metrics.jsonl").unlink(missing_ok=True)
    begun = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-m", "megarl", "train", *case.arguments(folder, steps, seed)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        sys.exit(f"{case.name} ended with exit code {result.returncode}:\n{result.stdout}{result.stderr}")
    lines = (REPOSITORY / folder / "metrics.jsonl").read_text().splitlines()
    scores = [json.loads(line)["critic/score/mean"] for line in lines]
    first, last = sum(scores[:ENDS]) / ENDS, sum(scores[-ENDS:]) / ENDS
    seconds = round(time.perf_counter() - begun, 1)
    return {"case": case.name, "first": first, "last": last, "scores": scores, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="runs whose name has one of these words")
    options = parser.parse_args()
    facts = environment(("torch", "megatron-core", "sglang", "ray", "megarl"))
    console, results = Console(highlight=False), []
    for case in CASES:
        if options.only and not set(options.only) & set(case.name.split()):
            continue
        prepare(case.recipe)
        found = run_case(case, options.steps, options.seed)
        console.print(f"{case.name}: {found['first']:.3f} -> {found['last']:.3f}  {found['seconds']} s")
        results.append(found)
    table = Table("estimator and loss", "first two steps", "last two", "seconds", title="mean scores")
    for found in results:
        table.add_row(found["case"], f"{found['first']:.3f}", f"{found['last']:.3f}", str(found["seconds"]))
    console.print(table)
    write_report(REPOSITORY / OUT / "results.json", **facts, steps=options.steps, results=results)
    if any(found["last"] <= found["first"] for found in results):
        sys.exit("a reward did not rise")


if __name__ == "__main__":
    main()
