"""Steps `options` and `layouts`: short training runs of tiny models, each with options whose code only a GPU runs in full.

A run has to end, with finite losses and gradients; how far its first gradient is from that of the run without the options is recorded, and
judged by no one: engines of different options may draw other responses.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.gpu_test.runner import Check
from megarl.gpu_test.several import TINY, read_metrics
from megarl.util.packages import example, shipped

NUM_STEPS = 2
NORM = "actor/grad_norm"
ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
COMMON = (
    "data.val_files=null",
    "data.train_batch_size=32",
    "data.max_response_length=24",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    f"{ACTOR}.tensor_model_parallel_size=1",
    f"{ACTOR}.pipeline_model_parallel_size=1",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    "critic.megatron.pipeline_model_parallel_size=1",
    "trainer.test_freq=-1",
    "trainer.logger=[console]",
    f"trainer.total_training_steps={NUM_STEPS}",
)
ONE = (*COMMON, f"{ROLLOUT}.num_engines=1", "trainer.n_gpus_per_node=1")
TWO = (*COMMON, f"{ROLLOUT}.num_engines=2", "trainer.n_gpus_per_node=2")
PLAIN = "as it is"
# A mixture of experts on one GPU.
OPTIONS: Mapping[str, tuple[str, ...]] = {
    PLAIN: (),
    "parts computed again, routing replayed in the updates": (
        f"{ACTOR}.recompute_granularity=selective",
        f"{ACTOR}.recompute_modules=[layernorm,moe]",
        "actor_rollout_ref.actor.router_replay=trainer",
    ),
    "an engine's routing replayed, its cache in float8, its experts by Triton": (
        "actor_rollout_ref.actor.router_replay=rollout",
        "algorithm.rollout_correction.rollout_is=token",
        f"{ROLLOUT}.kv_cache_dtype=fp8_e4m3",
        f"{ROLLOUT}.moe_runner_backend=triton",
    ),
}
# A dense model on two GPUs.
LAYOUTS: Mapping[str, tuple[str, ...]] = {
    PLAIN: (),
    "without overlapped gradients and weights": (
        f"{ACTOR}.overlap_grad_reduce=false",
        f"{ACTOR}.overlap_param_gather=false",
    ),
    "Megatron-FSDP, actor and critic": (
        f"{ACTOR}.fsdp=optim_grads",
        "critic.megatron.fsdp=optim_grads_params",
    ),
    "a pipeline's layout by its own notation": (
        f"{ACTOR}.pipeline_model_parallel_size=2",
        f"{ACTOR}.pipeline_model_parallel_layout=Et|tL",
    ),
}


def run_options(folder: Path) -> Iterator[Check]:
    yield from run_all(folder, ONE, OPTIONS, "qwen3_moe")


def run_layouts(folder: Path) -> Iterator[Check]:
    yield from run_all(folder, TWO, LAYOUTS, "qwen2")


def run_all(
    folder: Path, settings: tuple[str, ...], cases: Mapping[str, tuple[str, ...]], family: str
) -> Iterator[Check]:
    """A run for each case, of a model of this family."""
    arithmetic = example("arithmetic")
    arithmetic.write_arithmetic(folder / "data", 16, 64, 16, seed=3)
    example("tiny_model").make_tiny_model(
        folder / "model", arithmetic.arithmetic_texts(), family=family, **TINY
    )
    usual = math.nan
    for number, (name, keys) in enumerate(cases.items()):
        run = folder / f"run{number}"
        done = subprocess.run([*command(folder, run), *settings, *keys], check=False)
        rows = read_metrics(run / "metrics.jsonl")
        yield judged(name, done.returncode, rows)
        if rows and NORM in rows[0]:
            usual = rows[0][NORM] if name == PLAIN else usual
            yield Check(
                f"{name}: the first gradient's norm",
                None,
                f"{rows[0][NORM]:.4g}, {PLAIN} {usual:.4g}",
                {"norm": rows[0][NORM]},
            )


def command(folder: Path, run: Path) -> list[str]:
    """Of a run on the step's model and data."""
    return [
        *(sys.executable, "-m", "megarl", "train", str(shipped() / "recipes" / "quickstart_ppo.yaml")),
        f"data.train_files={folder}/data/train.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
        f"trainer.default_local_dir={run}",
    ]


def judged(name: str, code: int, rows: list[dict[str, float]]) -> Check:
    """Whether a run ended well, with all steps and finite numbers."""
    steps = [int(row["step"]) for row in rows]
    wrong = sorted(key for row in rows for key, value in row.items() if not math.isfinite(value))
    right = code == 0 and steps[-1:] == [NUM_STEPS] and not wrong
    text = f"exit code {code}, steps {steps}" + (f", not finite: {', '.join(wrong)}" if wrong else "")
    return Check(name, right, text)
