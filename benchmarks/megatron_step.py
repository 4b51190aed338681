"""Tokens per second of one training step (forward, backward, optimizer) for a list of parallel layouts.

Every layout runs in fresh processes on this machine's cores, over gloo, on the same global batch of packed
sequences of equal length. A step's time is that of its slowest rank: all ranks leave a barrier together
before it and enter one after it.

    python benchmarks/megatron_step.py --layouts 1 dp2 pp2 tp2 tp2-pp2-dp2 --out step.json
"""

import argparse
import json
import logging
import os
import re
import resource
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.multiprocessing
from facts import announce, write_report

from megarl.config.schema.models import OptimConfig
from megarl.layout.grid import ParallelLayout

LAYOUTS = ("1", "dp2", "pp2", "pp2-vpp2", "tp2", "cp2", "tp2-pp2", "tp2-pp2-dp2")
# For the ranks: one thread each (they are as many as the cores, or more), the loopback interface, no GPU.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_VISIBLE_DEVICES": "",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Workload:
    """The work that every layout computes; lengths and batch sizes in tokens."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    length: int
    batch_tokens: int
    micro_batch_tokens: int
    steps: int
    warmup: int

    @property
    def num_sequences(self) -> int:
        return self.batch_tokens // self.length

    def micro_batches(self, dp_rank: int, dp: int) -> list[list[int]]:
        """The sequences of each micro-batch of a data parallel rank."""
        share = self.num_sequences // dp
        mine = list(range(dp_rank * share, (dp_rank + 1) * share))
        size = self.micro_batch_tokens // self.length
        return [mine[start : start + size] for start in range(0, share, size)]


def parse_layout(text: str) -> ParallelLayout:
    """ "tp2-pp2-dp2" -> a layout of 8 ranks; "1" is one rank. With tp, sequence parallelism is on.

    Raises:
        ValueError: not such a name, or sizes that do not fit each other.
    """
    sizes = {"tp": 1, "pp": 1, "vpp": None, "cp": 1, "dp": 1}
    for part in [] if text == "1" else text.split("-"):
        found = re.fullmatch(r"(tp|pp|vpp|cp|dp)(\d+)", part)
        if found is None:
            raise ValueError(f"layout {text!r}: {part!r} is not one of tp, pp, vpp, cp, dp with a number")
        sizes[found[1]] = int(found[2])
    world = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes.pop("dp")
    return ParallelLayout(world=world, sp=sizes["tp"] > 1, **sizes)


def check_workload(work: Workload, name: str, layout: ParallelLayout) -> None:
    """Raises ValueError where the batch cannot be cut into equal micro-batches for the layout."""
    unit = work.micro_batch_tokens * layout.dp * (layout.pp if layout.vpp else 1)
    if work.micro_batch_tokens % work.length or work.batch_tokens % unit:
        raise ValueError(
            f"layout {name!r}: --batch-tokens {work.batch_tokens} must be a multiple of {unit}, and "
            f"--micro-batch-tokens {work.micro_batch_tokens} one of --length {work.length}"
        )


def write_model_config(work: Workload, folder: Path) -> None:
    """A Qwen2 `config.json` of the workload's size; weights start at random, so there are none."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": work.num_layers,
        "hidden_size": work.hidden_size,
        "intermediate_size": 4 * work.hidden_size,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": work.vocab_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": work.length,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def run_rank(rank: int, layout: ParallelLayout, work: Workload, folder: str) -> None:
    """One process of a layout: takes its place, steps, and writes `rank-<n>.json` into `folder`."""
    # These import megatron-core, which the parent does not need.
    from megarl.megatron.build import build_model, wrap_for_training
    from megarl.megatron.heads.outputs import lm_head
    from megarl.megatron.optimizer import build_optimizer
    from megarl.megatron.packing import PackedBatch, arrange_sequences
    from megarl.megatron.parallel import coords, init_parallel
    from megarl.megatron.step import train_step
    from megarl.models import read_model_config

    logging.disable(logging.WARNING)  # megatron-core's advice to its own callers, once a rank
    torch.set_num_threads(1)
    init_parallel(layout, rank, layout.world, init_method=f"file://{folder}/rendezvous", timeout_s=300)
    config = read_model_config(folder)
    chunks = wrap_for_training(build_model(config, layout, dtype=torch.float32))
    optimizer, scheduler = build_optimizer(chunks, OptimConfig(lr=1e-4))
    ids = np.random.default_rng(0).integers(0, work.vocab_size, (work.num_sequences, work.length), np.int32)
    table = pa.table({"input_ids": list(ids), "loss_mask": list(np.ones_like(ids, bool))})
    place = coords()
    batches = [
        arrange_sequences(
            table, rows, tp=layout.tp, cp=layout.cp, cp_rank=place.cp, sequence_parallel=layout.sp
        ).on_device()
        for rows in work.micro_batches(place.dp, layout.dp)
    ]
    predicted = work.num_sequences * (work.length - 1)

    def loss(outputs: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total = -outputs[batch.live, 0].sum() / predicted
        return total, {"loss": total}

    seconds, losses = [], []
    for _ in range(work.warmup + work.steps):
        dist.barrier()
        begun = time.perf_counter()
        result = train_step(chunks, optimizer, scheduler, batches, lm_head(vocab_size=work.vocab_size), loss)
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
        losses.append(result.stats["loss"])
    report = {
        "seconds": seconds[work.warmup :],
        "losses": losses,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,  # KiB on Linux
    }
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, layout: ParallelLayout, work: Workload) -> dict[str, Any]:
    """Run one layout in processes of its own; tokens/s are of the whole global batch."""
    with tempfile.TemporaryDirectory(prefix="megatron-step-") as folder:
        write_model_config(work, Path(folder))
        torch.multiprocessing.spawn(run_rank, (layout, work, folder), nprocs=layout.world)
        ranks = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(layout.world)]
    rates = [work.batch_tokens / seconds for seconds in ranks[0]["seconds"]]
    return {
        "layout": name,
        "ranks": layout.world,
        "tokens_per_second": {
            "median": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
        },
        "seconds_per_step": ranks[0]["seconds"],
        "peak_rss_mib_per_rank": max(rank["peak_rss_mib"] for rank in ranks),
        "first_loss": ranks[0]["losses"][0],
        "last_loss": ranks[0]["losses"][-1],
    }


def parse_arguments() -> tuple[list[str], Workload, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layouts", nargs="+", default=list(LAYOUTS), metavar="LAYOUT", help="such as tp2-pp2"
    )
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--length", type=int, default=128, help="tokens of each sequence")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens of one step, over all ranks")
    parser.add_argument("--micro-batch-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before, not measured")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    given = vars(options)
    layouts, out = given.pop("layouts"), given.pop("out")
    work = Workload(**given)
    try:
        for name in layouts:
            check_workload(work, name, parse_layout(name))
    except ValueError as error:
        parser.error(str(error))
    return layouts, work, out


def main() -> None:
    layouts, work, out = parse_arguments()
    os.environ.update(ENVIRONMENT)  # the ranks inherit it; some of it is read when torch is imported
    facts = announce(("torch", "megatron-core", "numpy", "megarl"))
    print(
        f"work      {work.num_layers} layers, hidden {work.hidden_size}, vocabulary {work.vocab_size}, float32; "
        f"{work.batch_tokens} tokens a step in sequences of {work.length}, micro-batches of "
        f"{work.micro_batch_tokens}; {work.steps} steps after {work.warmup}"
    )
    print(f"\n{'layout':<14}{'ranks':>5}{'tokens/s':>11}{'min':>9}{'max':>9}{'MiB/rank':>10}{'loss':>18}")
    results = []
    for name in layouts:
        result = measure(name, parse_layout(name), work)
        results.append(result)
        rate = result["tokens_per_second"]
        print(
            f"{name:<14}{result['ranks']:>5}{rate['median']:>11.0f}{rate['min']:>9.0f}{rate['max']:>9.0f}"
            f"{result['peak_rss_mib_per_rank']:>10.0f}{result['first_loss']:>9.4f}{result['last_loss']:>9.4f}",
            flush=True,
        )
    write_report(out, **facts, work=asdict(work), results=results)


if __name__ == "__main__":
    main()
