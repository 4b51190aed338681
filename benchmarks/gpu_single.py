"""PPO with a critic on a single GPU: tokens/s of each phase, MFU, peak memory. A real run of the recipe
`qwen2.5_0.5b_ppo_single_gpu.yaml`: actor, reference, critic and engine on one GPU, batches of 64 trajectories of 512 + 512
tokens, the hyper-parameters of the article that the recipe names. Weights are random, of Qwen2.5-0.5B's shape, so nearly
every response is as long as it may be; what is learnt means nothing.

    python benchmarks/gpu_single.py --steps 5 --out gpu_single.json
    python benchmarks/gpu_single.py actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16   # any key of the recipe
    python benchmarks/gpu_single.py --case rl-16k   # a policy's updates alone, Qwen3-0.6B at 16,384 tokens

Where SGLang's kernels are not installed (or with --train-only) the training phases alone run, on synthetic trajectories of
these lengths, and the output says so. `--shrink` is the same with a tiny model and short texts, also on a CPU.

MFU: the operations of a phase (megarl/costs/flops.py: matrices forward and backward, causal attention, the output layer at
response tokens only; nothing that is computed twice) over its seconds and the card's peak in bfloat16 (megarl/costs/hardware.py; none
for a card that is not listed there).
"""

import argparse
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from facts import environment, write_report
from transformers import AutoTokenizer

from megarl.config import TrainConfig, load_config, needs_old_log_probs, needs_ref_log_probs, resolve
from megarl.costs.flops import ModelFlops, causal_pairs, model_flops
from megarl.costs.hardware import BF16
from megarl.data.gsm8k import word_problem
from megarl.data.trajectories import Generation, build_trajectories, expand_prompts
from megarl.models import read_model_config
from megarl.util.packages import example

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes/qwen2.5_0.5b_ppo_single_gpu.yaml"
ARTICLE = "the article's run, on an H800: 1,702 tokens/s, 13.3 s a step"
SHAPE = {
    "vocab_size": 151936, "hidden_size": 896, "num_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "ffn_hidden_size": 4864, "max_position_embeddings": 32768, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
TINY = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "ffn_hidden_size": 128, "dtype": "float32"}
SAMPLE_SECONDS = 0.2
QWEN3 = {
    "family": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "ffn_hidden_size": 3072, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "dtype": "bfloat16",
}  # fmt: skip
# Of a trainer alone, as others publish figures of it: one update a step, everything recomputed, no critic and no reference.
TRAINER = (
    "critic=null",
    "algorithm.adv_estimator=reinforce_plus_plus",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.megatron.recompute_granularity=full",
)


@dataclass(frozen=True)
class Job:
    """The job: trajectories of a step, tokens of prompts and responses, the model's shape."""

    shape: dict
    batch: int
    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.response


CASES = {
    "article": Job(SHAPE, 64, 512, 512),
    "rl-16k": Job(QWEN3, 4, 64, 16384 - 64),
    "rl-64k": Job(QWEN3, 1, 64, 65536 - 64),
}


class PeakMemory:
    """The most memory in use while this is active, MiB: of the GPU, as nvidia-smi sees it, or of the run's processes."""

    def __init__(self, run: int, gpu: bool) -> None:
        """`run`: the process id of the command, from which all others descend."""
        self.mib, self._run, self._read = 0.0, run, self._of_gpu if gpu else self._of_processes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_SECONDS):
            self.mib = max(self.mib, self._read())

    @staticmethod
    def _of_gpu() -> float:
        return float(ask_gpu("memory.used"))

    def _of_processes(self) -> float:
        total = 0
        try:
            command = psutil.Process(self._run)
            for process in (command, *command.children(recursive=True)):
                total += process.memory_info().rss
        except psutil.NoSuchProcess:  # some have ended
            return 0.0
        return total / 2**20


@functools.cache
def first_gpu() -> str:
    """How nvidia-smi names torch's device 0, which is physical GPU 0 only if CUDA_VISIBLE_DEVICES does not say otherwise.

    Another process asks torch, which takes memory of the GPU for as long as it lives.
    """
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_properties(0).uuid)"]
    return f"GPU-{subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}"


def ask_gpu(what: str) -> str:
    """A property of torch's first GPU."""
    command = ["nvidia-smi", f"--id={first_gpu()}", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_prompts(folder: Path, job: Job, num: int) -> Path:
    """Prompts of exactly `job.prompt` tokens, chat template included."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def length(text: str) -> int:
        chat = [{"role": "user", "content": text}]
        return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

    random, rows = np.random.default_rng(0), []
    for index in range(num):
        text = ""
        while length(text) < job.prompt:  # a token a digit, but for what the tokenizer joins
            text += "".join(
                f" {digit}" for digit in random.integers(0, 10, max(1, (job.prompt - length(text)) // 3))
            )
        while length(text) > job.prompt:
            text = text[:-1]
        rows.append(word_problem("openai/gsm8k", text, "1", "train", index, text, "1"))
    path = folder / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def make_trajectories(folder: Path, job: Job, steps: int) -> Path:
    """Synthetic, scored trajectories of `steps` steps, as a run writes them."""
    random, out = np.random.default_rng(0), folder / "trajectories"
    out.mkdir()
    ids = lambda size: random.integers(300, job.shape["vocab_size"], size, dtype=np.int32)  # noqa: E731
    for step in range(1, steps + 1):
        names = [f"p{row}" for row in range(job.batch)]
        texts = {
            "data_source": ["synthetic"] * job.batch,
            "ground_truth": [""] * job.batch,
            "extra_info": ["{}"] * job.batch,
        }
        lists = pa.array([ids(job.prompt) for _ in names], pa.list_(pa.int32()))
        requests = expand_prompts(pa.table({"uid": names, **texts, "prompt_ids": lists}), 1)
        log_probs = np.full(
            job.response, -np.log(job.shape["vocab_size"]), np.float32
        )  # about a random model's
        answers = [Generation(f"{name}/0", ids(job.response), log_probs, "length", step) for name in names]
        scores = pa.array(random.integers(0, 2, job.batch).astype(np.float32))
        pq.write_table(
            build_trajectories(requests, answers).append_column("score", scores),
            out / f"step-{step:06d}.parquet",
        )
    return out


def overrides(folder: Path, job: Job, options: argparse.Namespace, generates: bool) -> list[str]:
    """Over the recipe; the user's own come last."""
    steps = options.steps + 1
    keys = [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_batch_size={job.batch}",
        f"data.max_prompt_length={job.prompt}",
        f"data.max_response_length={job.response}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={job.batch if options.case != 'article' else job.batch // 2}",
        "data.val_files=null",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console]",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder / 'run'}",
    ]
    if options.case != "article":
        keys += [*TRAINER, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    if generates:
        keys.append(f"data.train_files={make_prompts(folder, job, steps * job.batch)}")
    else:
        keys.append(f"trainer.train_only={make_trajectories(folder, job, steps)}")
    return keys + options.overrides


def phase_flops(config: TrainConfig, job: Job, flops: dict[str, ModelFlops]) -> dict[str, float]:
    """Operations of a step's phases that megarl's formulas know."""

    def forward(head: str) -> float:
        """Of the whole batch."""
        known = flops[head]
        body = known.forward(causal_pairs(job.tokens)) - 2 * known.head
        return job.batch * (job.tokens * body + job.response * 2 * known.head)

    evaluated = (needs_old_log_probs(config) + needs_ref_log_probs(config)) * forward("lm")
    updated = 3 * forward("lm") * config.actor_rollout_ref.actor.ppo_epochs
    if config.critic is not None:
        evaluated += forward("value")
        updated += 3 * forward("value") * config.critic.ppo_epochs
    return {"generate": forward("lm"), "evaluate_models": evaluated, "update": updated}


def phase_figures(
    metrics: list[dict[str, float]], job: Job, flops: dict[str, float], peak: float | None
) -> dict[str, dict[str, float | None]]:
    """Of each phase: median seconds; tokens/s (of responses where they are generated); MFU where the peak is known."""
    tokens = {"generate": job.batch * job.response}
    found = {}
    for phase in ("sync", "generate", "reward", "evaluate_models", "advantages", "update", "memory", "step"):
        seconds = [step[f"timing_s/{phase}"] for step in metrics if f"timing_s/{phase}" in step]
        if not seconds:
            continue
        median, operations = statistics.median(seconds), flops.get(phase)
        counted = phase in flops or phase == "step"
        found[phase] = {
            "seconds": median,
            "tokens_per_s": tokens.get(phase, job.batch * job.tokens) / median if counted else None,
            "mfu": operations / median / peak if operations is not None and peak else None,
        }
    return found


def show(report: dict) -> None:
    print(f"\n$ {report['command']}\n{report['what']}\n{report['device']}; versions: {report['versions']}")
    print("phase              seconds   tokens/s     MFU")
    for phase, figures in report["phases"].items():
        rate = f"{figures['tokens_per_s']:10,.0f}" if figures["tokens_per_s"] else " " * 10
        mfu = f"{figures['mfu']:7.1%}" if figures["mfu"] else ""
        print(f"{phase:16} {figures['seconds']:9.3f} {rate} {mfu}")
    print(f"peak memory: {report['peak_mib']:,.0f} MiB, {report['peak_of']}")
    if report["case"] == "article":
        print(f"({ARTICLE})")


def run(options: argparse.Namespace, gpu: bool, generates: bool) -> dict:
    job = CASES[options.case] if not options.shrink else Job(TINY, 8, 64, 16)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = example("arithmetic").arithmetic_texts()
        example("tiny_model").make_tiny_model(folder / "model", texts, **job.shape)
        keys = overrides(folder, job, options, generates)
        command = [sys.executable, "-m", "megarl", "train", str(RECIPE), *keys]
        config = resolve(load_config(TrainConfig, RECIPE, keys))
        output = None if options.verbose else subprocess.DEVNULL
        with (
            subprocess.Popen(command, cwd=ROOT, stdout=output) as process,
            PeakMemory(process.pid, gpu) as peak,
        ):
            if process.wait():
                raise SystemExit(f"the run ended with exit code {process.returncode}; --verbose shows it")
        lines = (folder / "run/metrics.jsonl").read_text().splitlines()
        model = read_model_config(str(folder / "model"))
    metrics = [json.loads(line) for line in lines][1:]  # the first step is warm-up
    device = ask_gpu("name") if gpu else "no GPU: these figures say nothing of one"
    fastest = BF16.get(device) if gpu else None
    flops = phase_flops(config, job, {head: model_flops(model, head) for head in ("lm", "value")})
    if not generates:
        del flops["generate"]
    what = (
        "PPO with a critic, SGLang included"
        if generates
        else "training phases alone, on synthetic trajectories: no SGLang"
        if options.case == "article"
        else "a policy's updates alone, on synthetic trajectories: no SGLang"
    )
    return {
        **environment(("torch", "megatron-core", "ray", *(["sglang"] if generates else []))),
        "case": options.case,
        "what": f"{what}; {job.batch} trajectories of {job.prompt} + {job.response} tokens, {len(metrics)} steps after a first one",
        "device": device,
        "peak_tflops": fastest / 1e12 if fastest else None,
        "phases": phase_figures(metrics, job, flops, fastest),
        "peak_mib": peak.mib,
        "peak_of": "of the GPU" if gpu else "of all processes (shared pages are counted more than once)",
    }


def why_no_engine(gpu: bool, found: Callable[[str], object] = importlib.util.find_spec) -> str | None:
    """Why SGLang cannot generate here; None: it can."""
    missing = [name for name in ("sglang", *(["sgl_kernel"] if gpu else [])) if found(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="keys of the recipe, as key=value")
    parser.add_argument("--steps", type=int, default=5, help="that count, after a first one")
    parser.add_argument(
        "--case", choices=CASES, default="article", help="model and lengths; all but the first train only"
    )
    parser.add_argument("--train-only", action="store_true", help="the training phases alone")
    parser.add_argument("--shrink", action="store_true", help="a tiny model and short texts")
    parser.add_argument("--verbose", action="store_true", help="print what the run prints")
    parser.add_argument("--out", metavar="FILE", help="the figures as JSON")
    options = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu and not options.shrink:
        parser.error("there is no CUDA GPU here; --shrink runs the same code with a tiny model on a CPU")
    train_only = "--train-only" if options.train_only else f"--case {options.case}"
    reason = train_only if options.train_only or options.case != "article" else why_no_engine(gpu)
    if reason is not None:
        print(f"the training phases alone, on synthetic trajectories: {reason}", flush=True)
    report = run(options, gpu, generates=reason is None)
    show(report)
    write_report(options.out, **report)


if __name__ == "__main__":
    main()
