"""Steps `nccl` and `killed`: a tiny model trained on two GPUs, tensor parallel, with an engine on each.

Half of an engine's weights lie on the other GPU, so weights reach it over NCCL. One run is left alone; in the other an engine's
scheduler is killed in the middle of the run, and is started anew by the run itself.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil

from megarl.gpu_test.runner import Check
from megarl.trainer.run import logger
from megarl.util.packages import example, shipped

NUM_STEPS = 6
POLL_SECONDS = 0.2
MARK = "MEGARL_GPU_TEST"  # in the environment of all processes of a run: Ray's are no children of its command
BETWEEN = ("intra_node", "inter_node")
SCHEDULER = "sglang::scheduler"  # begins the title of an engine's process
# Small, but with heads of 64, which all kernels of attention take.
TINY = {
    "vocab_size": 512, "hidden_size": 256, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "ffn_hidden_size": 512,
}  # fmt: skip
ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
# Of all short runs of tiny models.
SHORT = (
    "data.val_files=null",
    "data.train_batch_size=32",
    "data.max_response_length=24",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    f"{ACTOR}.pipeline_model_parallel_size=1",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    "critic.megatron.pipeline_model_parallel_size=1",
    "trainer.test_freq=-1",
    "trainer.logger=[console]",
)
SETTINGS = (
    *SHORT,
    f"{ACTOR}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.num_engines=2",
    f"{ROLLOUT}.max_restarts=5",
    "trainer.n_gpus_per_node=2",
    f"trainer.total_training_steps={NUM_STEPS}",
)


def train(folder: Path, *, kill: bool) -> Iterator[Check]:
    """Train for a few steps; with `kill` one of the engines' schedulers is killed after the second."""
    arithmetic = example("arithmetic")
    arithmetic.write_arithmetic(folder / "data", 16, 64, 16, seed=3)
    example("tiny_model").make_tiny_model(folder / "model", arithmetic.arithmetic_texts(), **TINY)
    run, token = folder / "run", secrets.token_hex(8)
    metrics, arguments = run / "metrics.jsonl", [*command(folder, "model", run), *SETTINGS]
    with subprocess.Popen(arguments, env={**os.environ, MARK: token}) as process:
        if kill:
            yield _killed(process, token, metrics)
        code = process.wait()
    yield Check("the run ends", code == 0, f"exit code {code}")
    rows = read_metrics(metrics)
    steps = [int(row["step"]) for row in rows]
    yield Check("steps", steps[-1:] == [NUM_STEPS] and len(set(steps)) == NUM_STEPS, str(steps))
    if rows:
        yield from _figures(rows[-1])


run_pairs, run_killed = partial(train, kill=False), partial(train, kill=True)


def command(folder: Path, model: str, run: Path) -> list[str]:
    """The command of a run on the step's data and one of its models."""
    return [
        *(sys.executable, "-m", "megarl", "train", str(shipped() / "recipes" / "quickstart_ppo.yaml")),
        f"data.train_files={folder}/data/train.parquet",
        f"actor_rollout_ref.model.path={folder}/{model}",
        f"trainer.default_local_dir={run}",
    ]


def _killed(process: subprocess.Popen, token: str, metrics: Path) -> Check:
    while process.poll() is None and len(read_metrics(metrics)) < 2:
        time.sleep(POLL_SECONDS)
    victims = schedulers(token) if process.poll() is None else []
    if not victims:
        return Check("an engine is killed", False, "none was found, or the run had ended before")
    victims[0].kill()
    return Check("an engine is killed", True, f"process {victims[0].pid} of {len(victims)}, after two steps")


def schedulers(token: str) -> list[psutil.Process]:
    """SGLang's schedulers of the run whose processes have `token` in their environment; others' are left alone."""
    found = []
    for process in psutil.process_iter():
        try:
            titled = any(word.startswith(SCHEDULER) for word in process.cmdline()[:1])
            if titled and process.environ().get(MARK) == token:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or is another user's
            continue
    return found


def read_metrics(file: Path) -> list[dict[str, float]]:
    """Rows of the steps that have ended; none before the first."""
    return logger.read_metrics(file) if file.exists() else []


def _figures(row: dict[str, float]) -> Iterator[Check]:
    """Seconds and bytes of a step, and whether weights went from device to device."""
    between = sum(row.get(f"sync/bytes_{link}", 0.0) for link in BETWEEN)
    yield Check("weights from other devices", between > 0, f"{between:,.0f} bytes a sync", {"bytes": between})
    wanted = {name: value for name, value in row.items() if name.startswith(("sync/", "timing_s/"))}
    for name, value in sorted(wanted.items()):
        yield Check(name, None, f"{value:,.4g}", {"value": value})
