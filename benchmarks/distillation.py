"""Curves of the demo's tiny model that learns from a teacher, and of the same by GRPO from rewards, three seeds each, from two starts.

The teacher is the policy that the demo's PPO has trained. Students begin with random weights (`scratch`) or as the demo's fine-tuning leaves
the model (`sft`); both ways have the same prompts, samples a prompt, learning rate and layout. A run's seed is that of its data's order and
of its sampling.

    make demo                                                                             # outputs/demo: data, models, the teacher
    python benchmarks/distillation.py --out benchmarks/results/distillation.json            # 15 minutes on two cores
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from facts import announce, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table
from routing_replay import megarl

RECIPE = "recipes/distillation_cpu.yaml"
STARTS = {"scratch": "model", "sft": "sft/hf"}
ACTOR = "actor_rollout_ref.actor"
WAYS: dict[str, tuple[str, ...]] = {
    "teacher": (),
    "grpo": (
        "actor_rollout_ref.ref.model.path=null",
        f"{ACTOR}.pg_loss_coef=1",
        f"{ACTOR}.use_kl_loss=false",
        f"{ACTOR}.kl_loss_type=low_var_kl",
        f"{ACTOR}.kl_loss_beta=1",
    ),
}


def learn(folder: Path, start: str, way: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: its reward at each step, and its accuracy on held-out problems by step."""
    name, demo = f"{start}-{way}-{seed}", options.demo
    megarl(
        "train", RECIPE, f"data.train_files={demo}/data/train.parquet", f"data.val_files={demo}/data/test.parquet",
        f"actor_rollout_ref.model.path={demo}/{STARTS[start]}", f"actor_rollout_ref.ref.model.path={demo}/ppo/hf", *WAYS[way],
        f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}", f"actor_rollout_ref.rollout.n={options.samples}",
        f"trainer.total_training_steps={options.steps}", f"trainer.test_freq={options.steps // 4}",
        f"trainer.default_local_dir={folder}/{name}", log=folder / f"{name}.log",
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    accuracy = {
        line["step"]: line[key]
        for line in lines
        for key in line
        if key.startswith("val/") and key.endswith("/mean")
    }
    rewards = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    return {"start": start, "way": way, "seed": seed, "reward": rewards, "accuracy": accuracy}


def show(runs: list[dict[str, Any]]) -> None:
    steps = sorted({int(step) for run in runs for step in run["accuracy"]})
    table = Table("start", "way", *(f"step {step}" for step in steps), title="accuracy of each seed")
    for start in STARTS:
        for way in WAYS:
            own = [run["accuracy"] for run in runs if (run["start"], run["way"]) == (start, way)]
            if own:
                table.add_row(start, way, *(", ".join(f"{one[step]:.3f}" for one in own) for step in steps))
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--demo", type=Path, default=Path("outputs/demo"), metavar="FOLDER", help="of `make demo`"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--samples", type=int, default=2, help="responses to a prompt")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=[*STARTS])
    parser.add_argument("--out", metavar="FILE", help="all curves, as JSON")
    options = parser.parse_args()
    options.demo = options.demo.resolve()
    if not (options.demo / "ppo/hf/config.json").is_file():
        parser.error(f"--demo: {options.demo} has no ppo/hf, the teacher; run `make demo` first")
    facts = announce(("torch", "megatron-core", "sglang", "megarl"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asked = [(start, way, seed) for start in options.starts for seed in options.seeds for way in WAYS]
        runs = [learn(folder, *one, options) for one in track(asked, "runs")]
    show(runs)
    write_report(options.out, **facts, steps=options.steps, samples=options.samples, runs=runs)


if __name__ == "__main__":
    main()
