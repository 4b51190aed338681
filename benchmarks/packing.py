"""How evenly the trajectories of a mini-batch are shared out over data parallel ranks and micro-batches.

megarl's plans compared with three usual ways, on the same mini-batches: rows in their order; the longest first, each to the emptiest
rank (LPT); Karmarkar-Karp over the ranks, then within each. All have the same number of micro-batches on all ranks, within
the same budget of tokens; what they level is tokens, megarl's plans cost (matrices and attention). No model is made.

Prompts are GSM8K's: with --gsm8k FILE --tokenizer FOLDER its questions, else lengths drawn from their quantiles. Responses are
drawn: "gsm8k" is a log-normal of GSM8K's own solutions with a heavier tail, "reasoning" one of thousands of tokens.

    python benchmarks/packing.py --out benchmarks/results/packing.json
"""

import argparse
import heapq
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from facts import announce, write_report

from megarl.costs.flops import model_flops
from megarl.data.balance import (
    MiniBatch,
    aligned_lengths,
    partition_balanced,
    plan_figures,
    plan_mini_batches,
    sequence_costs,
)
from megarl.data.gsm8k import INSTRUCTION
from megarl.models import read_model_config

MODEL = Path(__file__).resolve().parent.parent / "recipes/models/qwen2.5-7b"
DP = (2, 4, 8, 16, 32, 64)
# Tokens of the 7,473 training questions with the instruction, by Qwen2.5's tokenizer, and of its chat template around them.
QUANTILES = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)
QUESTIONS = (27, 41, 48, 51, 59, 71, 85, 104, 116, 143, 182.5, 227)
TEMPLATE = 29


@dataclass(frozen=True)
class Task:
    """Responses' lengths (a log-normal, cut off at `longest`), and the most tokens of a micro-batch."""

    name: str
    median: float
    sigma: float
    longest: int
    max_tokens: int


# GSM8K's solutions have a median of 111 tokens and a sigma of 0.42 (Qwen2.5's tokenizer); policies write more, and some ramble.
TASKS = (Task("gsm8k", 180, 0.6, 1024, 8192), Task("reasoning", 2500, 0.9, 16384, 20480))


@dataclass(frozen=True)
class Measured:
    """A way on a task, mean of all mini-batches: imbalances are max / mean - 1, of cost and of tokens.

    `padding`: part of all packed tokens, with context parallelism of 1 and of 2 (with tensor and sequence parallelism of 2).
    """

    task: str
    way: str
    dp: int
    rank_cost: float
    rank_tokens: float
    micro_cost: float
    micro_tokens: float
    micro_batches: float
    padding: float
    padding_cp2: float
    seconds: float


def in_order(lengths: np.ndarray, num_dp: int, max_tokens: int) -> MiniBatch:
    """Rows as they come: equally many to each rank, micro-batches filled one after the other."""
    shares = []
    for rows in np.array_split(np.arange(len(lengths)), num_dp):
        share, room = [[]], max_tokens
        for row in rows.tolist():
            if lengths[row] > room:
                share.append([])
                room = max_tokens
            share[-1].append(row)
            room -= int(lengths[row])
        shares.append(share)
    count = max(map(len, shares))
    return [share + [[]] * (count - len(share)) for share in shares]  # others run empty ones


def longest_first(lengths: np.ndarray, num_dp: int, max_tokens: int) -> MiniBatch:
    """Each row, the longest first, to the rank with the fewest tokens, and there likewise to a micro-batch."""
    return _ranks_first(lengths, num_dp, max_tokens, _greedy)


def karmarkar_karp(lengths: np.ndarray, num_dp: int, max_tokens: int) -> MiniBatch:
    """By Karmarkar-Karp equally many rows to each rank, and there likewise to micro-batches."""
    return _ranks_first(lengths, num_dp, max_tokens, lambda sizes, k: partition_balanced(sizes, k, False))


def _greedy(sizes: np.ndarray, k: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(k)]
    heap = [(0, part) for part in range(k)]
    for item in np.argsort(-sizes, kind="stable").tolist():
        load, part = heapq.heappop(heap)
        parts[part].append(item)
        heapq.heappush(heap, (load + int(sizes[item]), part))
    return parts


def _ranks_first(
    lengths: np.ndarray, num_dp: int, max_tokens: int, partition: Callable[[np.ndarray, int], list[list[int]]]
) -> MiniBatch:
    if partition is _greedy:
        shares = _greedy(lengths, num_dp)
    else:
        shares = partition_balanced(lengths, num_dp, equal_size=True)
    count = max(-(-int(lengths[rows].sum()) // max_tokens) for rows in shares)
    while True:  # all ranks need equally many
        plan = [[[rows[i] for i in part] for part in partition(lengths[rows], count)] for rows in shares]
        if max(int(lengths[micro].sum()) for share in plan for micro in share) <= max_tokens:
            return plan
        count += 1


def prompt_lengths(options: argparse.Namespace, random: np.random.Generator, num: int) -> np.ndarray:
    """Tokens of `num` prompts, chat template included [num]."""
    if options.gsm8k is None:
        drawn = np.interp(random.uniform(0, 100, num), QUANTILES, QUESTIONS)
        return np.rint(drawn).astype(np.int64) + TEMPLATE
    from megarl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer, False)
    lines = Path(options.gsm8k).read_text(encoding="utf-8").splitlines()
    texts = [f"{json.loads(line)['question']} {INSTRUCTION}" for line in lines]
    sizes = np.array([len(ids) for ids in tokenizer(texts)["input_ids"]])
    return sizes[random.integers(0, len(sizes), num)] + TEMPLATE


def measure(task: Task, batches: np.ndarray, num_dp: int, pair_share: float) -> list[Measured]:
    """All ways on the same mini-batches [mini-batches, rows]."""

    def ours(lengths: np.ndarray, num_dp: int, max_tokens: int) -> MiniBatch:
        costs = sequence_costs(lengths, pair_share)
        (plan,) = plan_mini_batches(
            lengths, num_dp=num_dp, mini_batch_size=len(lengths), max_tokens=max_tokens, costs=costs
        )
        return plan

    ways = {
        "in order": in_order,
        "LPT": longest_first,
        "Karmarkar-Karp": karmarkar_karp,
        "megarl": ours,
    }
    found = []
    for name, way in ways.items():
        rows, seconds = [], 0.0
        for lengths in batches:
            begun = time.process_time()
            plan = way(lengths, num_dp, task.max_tokens)
            seconds += time.process_time() - begun
            by_cost = plan_figures([plan], sequence_costs(lengths, pair_share))
            by_tokens = plan_figures([plan], lengths)
            rows.append(
                (
                    by_cost.rank_imbalance,
                    by_tokens.rank_imbalance,
                    by_cost.micro_imbalance,
                    by_tokens.micro_imbalance,
                    by_cost.num_micro,
                    _padding(plan, lengths, {}),
                    _padding(plan, lengths, {"tp": 2, "cp": 2, "sequence_parallel": True}),
                )
            )
        found.append(
            Measured(task.name, name, num_dp, *np.mean(rows, axis=0).tolist(), seconds / len(batches))
        )
    return found


def _padding(plan: MiniBatch, lengths: np.ndarray, sizes: dict) -> float:
    micro = [lengths[rows] for share in plan for rows in share if rows]
    return 1 - int(lengths.sum()) / sum(int(aligned_lengths(tokens, **sizes).sum()) for tokens in micro)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gsm8k", metavar="FILE", help="GSM8K's training rows as JSON lines")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="a tokenizer, with --gsm8k")
    parser.add_argument("--rows", type=int, default=1024, help="trajectories of a mini-batch")
    parser.add_argument("--batches", type=int, default=10, help="mini-batches")
    parser.add_argument("--dp", type=int, nargs="+", default=list(DP))
    parser.add_argument("--out", metavar="FILE", help="the same as JSON")
    options = parser.parse_args()
    if (options.gsm8k is None) != (options.tokenizer is None):
        parser.error("--gsm8k and --tokenizer are given together, or neither")
    random = np.random.default_rng(0)
    prompts = prompt_lengths(options, random, options.batches * options.rows)
    pair_share = model_flops(read_model_config(str(MODEL))).pair_share
    facts = announce(("numpy",))
    print(
        f"costs of {MODEL.name}; mini-batches: {options.batches} of {options.rows} trajectories; seconds are of the processor\n"
    )
    print("                               ranks          micro-batches")
    print("task       way              dp  cost   tokens   cost   tokens  a rank  seconds")
    results = []
    for task in TASKS:
        drawn = random.lognormal(np.log(task.median), task.sigma, len(prompts))
        responses = np.minimum(np.ceil(drawn), task.longest).astype(np.int64)
        batches = (prompts + responses).reshape(options.batches, options.rows)
        for num_dp in options.dp:
            for found in measure(task, batches, num_dp, pair_share):
                results.append(asdict(found))
                print(
                    f"{found.task:10} {found.way:14} {num_dp:4} {found.rank_cost:7.2%} {found.rank_tokens:7.2%} "
                    f"{found.micro_cost:7.2%} {found.micro_tokens:7.2%} {found.micro_batches:6.1f} {found.seconds:8.4f}",
                    flush=True,
                )
    source = "drawn from quantiles" if options.gsm8k is None else "GSM8K's questions"
    sizes = {"rows": options.rows, "batches": options.batches, "pair_share": pair_share, "prompts": source}
    write_report(options.out, **facts, **sizes, results=results)


if __name__ == "__main__":
    main()
