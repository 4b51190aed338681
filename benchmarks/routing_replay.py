"""Curves of a mixture of experts that learns by GRPO in bfloat16, with routing replay and without, three seeds each.

A tiny Qwen3-MoE of 16 experts (4 a token) in 4 layers is fine-tuned on the demo's word problems for a few steps; then each run begins
with that model: the actor on two expert parallel ranks, two engines, all in bfloat16. Their kernels and the shapes of their batches
differ, and with them some of the experts that they choose. A run's seed is that of its
data's order and of its sampling; the two runs of a seed differ in `actor.router_replay` alone.

    python benchmarks/routing_replay.py --out benchmarks/results/routing_replay.json    # 9 minutes on two cores
    python benchmarks/routing_replay.py actor_rollout_ref.rollout.quantization=fp8         # engines in float8
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from facts import announce, write_report
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megarl.util.packages import example

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipes/quickstart_ppo.yaml"
REPLAY = (None, "rollout")
# What is kept of each step: the mismatch of engine and trainer, and what is learned.
CURVES = {
    "reward": "critic/score/mean",
    "k3_kl": "training/rollout_k3_kl",
    "log_prob_diff_mean": "training/rollout_log_prob_diff_mean",
    "log_prob_diff_max": "training/rollout_log_prob_diff_max",
    "routing_changed": "actor/routing_changed",
    "grad_norm": "actor/grad_norm",
}
FIELDS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "head_dim": 128}


def megarl(*arguments: str, log: Path) -> None:
    """Run a command of megarl; its output goes to `log`, whose end is shown if it fails."""
    with log.open("w") as out:
        command = [sys.executable, "-m", "megarl", *arguments]
        failed = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT).returncode
    if failed:
        sys.exit(f"megarl {' '.join(arguments)}: exit code {failed}\n{log.read_text()[-3000:]}")


def fine_tuned(folder: Path, steps: int) -> Path:
    """The task in `folder`, and the model that all runs begin with."""
    arithmetic, tiny_model = example("arithmetic"), example("tiny_model")
    arithmetic.write_arithmetic(folder / "data", 4096, 2048, 200, seed=7)
    tiny_model.make_tiny_model(
        folder / "model", arithmetic.arithmetic_texts(), family="qwen3_moe", fields=FIELDS, seed=7
    )
    megarl(
        "sft", "recipes/quickstart_sft.yaml", f"data.train_files={folder}/data/sft.parquet", f"model.path={folder}/model",
        "megatron.tensor_model_parallel_size=1", "megatron.pipeline_model_parallel_size=1",
        "megatron.expert_model_parallel_size=2", "trainer.n_gpus_per_node=2", f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}/sft", log=folder / "sft.log",
    )  # fmt: skip
    return folder / "sft" / "hf"


def learn(
    folder: Path, model: Path, replay: str | None, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One run, and its curves: a number a step."""
    name = f"{replay or 'none'}-{seed}"
    actor = "actor_rollout_ref.actor"
    megarl(
        "train", RECIPE, f"data.train_files={folder}/data/train.parquet", f"data.val_files={folder}/data/test.parquet",
        f"data.seed={seed}", "data.train_batch_size=32", f"actor_rollout_ref.model.path={model}",
        f"{actor}.ppo_mini_batch_size=16", f"{actor}.optim.lr={options.lr}",
        f"{actor}.megatron.tensor_model_parallel_size=1", f"{actor}.megatron.pipeline_model_parallel_size=1",
        f"{actor}.megatron.expert_model_parallel_size=2", f"{actor}.megatron.dtype=bfloat16",
        f"{actor}.router_replay={replay or 'null'}", "actor_rollout_ref.rollout.dtype=bfloat16", *options.overrides,
        f"actor_rollout_ref.rollout.seed={seed}", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.num_engines=2",
        "critic=null",
        "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={options.steps}", f"trainer.test_freq={options.steps}",
        f"trainer.default_local_dir={folder}/{name}", log=folder / f"{name}.log",
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    curves = {curve: [line[key] for line in lines if key in line] for curve, key in CURVES.items()}
    tested = [line[key] for line in lines for key in line if key.startswith("val/") and key.endswith("/mean")]
    return {"replay": replay, "seed": seed, "curves": curves, "accuracy": tested[-1:]}


def over(runs: Sequence[dict[str, Any]], curve: str, part: slice) -> tuple[float, float, float]:
    """Mean over steps of a part of a curve: of all seeds, least and greatest of a seed."""
    means = [float(np.mean(run["curves"][curve][part])) for run in runs]
    return float(np.mean(means)), min(means), max(means)


def show(runs: Sequence[dict[str, Any]], steps: int) -> None:
    table = Table(
        "", "steps", "without replay", "router_replay=rollout", title="mean of the seeds (least-greatest)"
    )
    third = steps // 3
    for curve in CURVES:
        for label, part in (("first third", slice(0, third)), ("last third", slice(-third, None))):
            cells = []
            for replay in REPLAY:
                own = [run for run in runs if run["replay"] == replay and run["curves"][curve]]
                cells.append("{:.3g} ({:.3g}-{:.3g})".format(*over(own, curve, part)) if own else "")
            table.add_row(curve, label, *cells)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of all runs")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sft-steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--keep", metavar="FOLDER", help="where the runs are, and stay")
    parser.add_argument("--out", metavar="FILE", help="all curves, as JSON")
    options = parser.parse_args()
    facts = announce(("torch", "megatron-core", "sglang", "megarl"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model = fine_tuned(folder, options.sft_steps)
        asked = [(replay, seed) for seed in options.seeds for replay in REPLAY]
        runs = [learn(folder, model, *one, options) for one in track(asked, "runs")]
    show(runs, options.steps)
    write_report(
        options.out,
        **facts,
        steps=options.steps,
        lr=options.lr,
        overrides=options.overrides,
        fields=FIELDS,
        runs=runs,
    )


if __name__ == "__main__":
    main()
