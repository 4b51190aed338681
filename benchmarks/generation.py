"""Tokens per second of an engine on a CPU, with rollout.deterministic and without.

Two engines with the same tiny model stand side by side and answer the same prompts in turn, one at a time, so that whatever
else the machine does meets both. Every response has as many tokens as it may.

    python benchmarks/generation.py --batch-sizes 1 8 64 --rounds 7 --out generation.json
    python benchmarks/generation.py --batch-sizes 64 --prompt-tokens 256 --samples 8    # which share their prompt's prefill
"""

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from facts import environment

from megarl.data.arithmetic import arithmetic_texts
from megarl.models.tiny import make_tiny_model
from megarl.rollout.engine import EngineConfig, SamplingParams
from megarl.rollout.environment import sglang_environment
from megarl.rollout.sglang_engine import SGLangEngine

START_SECONDS = 300


def serve(config: EngineConfig, connection: Connection) -> None:
    """An engine's process: (prompts, sampling) -> seconds, until the connection closes."""
    engine = SGLangEngine(config)
    engine.start()
    connection.send("started")
    while True:
        try:
            prompts, sampling = connection.recv()
        except EOFError:
            return engine.shutdown()
        engine.flush_cache()
        begun = time.perf_counter()
        engine.generate(prompts, [f"p/{row}" for row in range(len(prompts))], sampling)
        connection.send(time.perf_counter() - begun)


def start(config: EngineConfig) -> Connection:
    """The connection to a new engine's process."""
    os.environ |= sglang_environment(config.device, config.tensor_parallel_size)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=serve, args=(config, there)).start()
    there.close()
    if not here.poll(START_SECONDS):
        raise TimeoutError(f"the engine did not start within {START_SECONDS} s")
    here.recv()
    return here


def measure(engines: dict[bool, Connection], args: argparse.Namespace) -> list[dict[str, Any]]:
    """For each batch size and engine, tokens per second: median, least and most of the rounds."""
    sampling = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    draw = random.Random(0)
    rows = []
    for size in args.batch_sizes:
        drawn = [[draw.randrange(10, 300) for _ in range(args.prompt_tokens)] for _ in range(size)]
        prompts = [drawn[row // args.samples] for row in range(size)]
        seconds: dict[bool, list[float]] = {deterministic: [] for deterministic in engines}
        for number in range(1 + args.rounds):
            for deterministic, engine in engines.items():
                engine.send((prompts, sampling))
                taken = engine.recv()
                if number:  # the first is warm-up
                    seconds[deterministic].append(taken)
        for deterministic, values in seconds.items():
            rates = sorted(size * args.new_tokens / value for value in values)
            rows.append(
                {
                    "batch_size": size,
                    "deterministic": deterministic,
                    "tokens_per_s": [statistics.median(rates), rates[0], rates[-1]],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--samples", type=int, default=1, help="responses to each prompt of a batch")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts = environment(("torch", "sglang"))
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(
            Path(folder, "model"), arithmetic_texts(), hidden_size=args.hidden_size,
            ffn_hidden_size=4 * args.hidden_size, num_layers=args.num_layers,
        )  # fmt: skip
        context = args.prompt_tokens + args.new_tokens + 8
        engines = {
            deterministic: start(
                EngineConfig(
                    str(model),
                    load_format="auto",
                    context_length=context,
                    max_num_seqs=max(args.batch_sizes),
                    deterministic=deterministic,
                )
            )
            for deterministic in (False, True)
        }
        rows = measure(engines, args)
        for engine in engines.values():
            engine.close()
    print(json.dumps(facts))
    print(
        f"{args.num_layers} layers, hidden {args.hidden_size}, {args.prompt_tokens} + {args.new_tokens} tokens, "
        f"{args.samples} samples of a prompt"
    )
    for row in rows:
        median, least, most = row["tokens_per_s"]
        name = "deterministic" if row["deterministic"] else "not"
        print(f"batch {row['batch_size']:4d} {name:>14} {median:8.0f} tokens/s ({least:.0f} to {most:.0f})")
    if args.out is not None:
        args.out.write_text(
            json.dumps({**facts, "sizes": vars(args) | {"out": None}, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
