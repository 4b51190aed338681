"""Seconds and memory of planning the weight sync of a very large model over hundreds of ranks, on one core.

For each transition: what one trainer rank sends and what one engine rank receives, each from nothing; then the whole
plan of all ranks: account, placement, slices (each read once for all ranks that get a copy), buckets. Each transition runs in a process of its own; no weight is made.
Seconds are those of the processor (the process has one thread), so that a busy machine does not change them much.

    python benchmarks/plan_scale.py --out plan_scale.json
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from facts import announce, write_report

from megarl.layout import Plan, make_plan, place_engines
from megarl.layout.grid import ParallelLayout
from megarl.models import keeps_float32, read_model_config
from megarl.plan.sync import pool_places
from megarl.weight_sync.layouts import EngineLayout, megatron_layout, sglang_layout

MODEL = str(Path(__file__).resolve().parent.parent / "recipes/models/deepseek-v3")
WORLD, PER_NODE, ENGINE = 512, 8, 32
BUCKET = 256 << 20
UNEVEN = {"pp": 16, "first_layers": 3, "last_layers": 2}  # 61 layers: 3, then 14 times 4, then 2
TRAIN = {"tp8-pp16-ep8": {"tp": 8, "ep": 8, **UNEVEN}, "tp1-pp16-ep32": {"tp": 1, "ep": 32, **UNEVEN}}
ROLLOUT = {"tp32-ep32": {"ep": 32}, "tp32-ep32-dp32": {"ep": 32, "dp": 32}}


@dataclass(frozen=True)
class Measured:
    """One transition: processor seconds of each part, and what came out; `peak_mib`: resident memory."""

    train: str
    rollout: str
    one_sends: float
    one_receives: float
    placement: float
    account: float
    slices: float
    buckets: float
    peak_mib: int
    num_slices: int
    num_copies: int
    num_buckets: int
    fewest_buckets: int

    @property
    def all_ranks(self) -> float:
        return self.placement + self.account + self.slices + self.buckets


def make(train: str, rollout: str) -> Plan:
    """The plan, nothing of it worked out yet; engines on the trainers' devices, in the pool's order."""
    config, places = read_model_config(MODEL), pool_places(WORLD, PER_NODE)
    return make_plan(
        megatron_layout(config, ParallelLayout(WORLD, **TRAIN[train]), places=places),
        sglang_layout(config, EngineLayout(ENGINE, num_engines=WORLD // ENGINE, **ROLLOUT[rollout]), places),
        lambda tensor: 4 if keeps_float32(tensor) else 2,
        BUCKET // 4,
        most_senders=1,  # as of a trainer of so many shards
    )


def measure(train: str, rollout: str, rank: int = 300) -> Measured:
    """One transition, in this process."""
    seconds, last = {}, time.process_time()

    def lap(name: str) -> None:
        nonlocal last
        now = time.process_time()
        seconds[name], last = round(now - last, 2), now

    make(train, rollout).deliveries_from(rank)
    lap("one_sends")
    make(train, rollout).copies_to(rank)
    lap("one_receives")
    plan = make(train, rollout)
    place_engines(plan.source, plan.target, pool_places(WORLD, PER_NODE), ENGINE, plan.itemsize)
    lap("placement")
    plan = make(train, rollout)
    account = plan.account()
    lap("account")
    num_slices = len(plan.deliveries)
    lap("slices")
    num_buckets = len(plan.buckets(BUCKET))
    lap("buckets")
    received = [sum(by_link.values()) for by_link in account.received]
    packed: Counter[int] = (
        Counter()
    )  # a source has a slice in its bucket once, however many ranks it sends it to
    for one in plan.deliveries:
        packed[one.source_rank] += plan.bytes_of(one)
    return Measured(
        train,
        rollout,
        **seconds,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        num_slices=num_slices,
        num_copies=sum(len(one.target_ranks) for one in plan.deliveries),
        num_buckets=num_buckets,
        fewest_buckets=-(-max(*received, *packed.values()) // BUCKET),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", nargs="+", choices=TRAIN, default=list(TRAIN))
    parser.add_argument("--rollout", nargs="+", choices=ROLLOUT, default=list(ROLLOUT))
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(asdict(measure(options.train[0], options.rollout[0]))))
        return
    results, facts = [], announce(("numpy",))
    print(f"671B parameters, {WORLD} ranks, a bucket is {BUCKET >> 20} MiB")
    print(
        f"{'train':14} {'rollout':15} {'one sends':>9} {'one gets':>9} {'all ranks':>9} {'RSS':>9} {'slices':>10} {'buckets':>7}"
    )
    for train in options.train:
        for rollout in options.rollout:
            command = [sys.executable, __file__, "--worker", "--train", train, "--rollout", rollout]
            found = Measured(
                **json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            )
            results.append(asdict(found))
            print(
                f"{train:14} {rollout:15} {found.one_sends:7.2f} s {found.one_receives:7.2f} s {found.all_ranks:7.2f} s "
                f"{found.peak_mib:5} MiB {found.num_slices:10,} {found.num_buckets:7} (at least {found.fewest_buckets})",
                flush=True,
            )
    write_report(options.out, **facts, results=results)


if __name__ == "__main__":
    main()
