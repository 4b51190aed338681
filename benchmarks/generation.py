"""Tokens per second of an engine on a CPU, with rollout.deterministic and without, compared with Hugging Face's `generate`.

Three processes with the same tiny model stand side by side and answer the same prompts in turn, one at a time and with one thread each,
so that whatever else the machine does meets all. Every response has as many tokens as it may, drawn at temperature 1.

    python benchmarks/generation.py --batch-sizes 1 8 64 --rounds 7 --out generation.json
    python benchmarks/generation.py --batch-sizes 64 --prompt-tokens 256 --samples 8    # which share their prompt's prefill
"""

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from facts import announce, write_report
from transformers import AutoModelForCausalLM

from megarl.rollout.engine import EngineConfig, SamplingParams
from megarl.rollout.sglang.before_import import sglang_environment
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.util.packages import example

START_SECONDS = 300
USUAL, DETERMINISTIC, HUGGING_FACE = "sglang", "sglang, deterministic", "transformers"


def serve(config: EngineConfig, connection: Connection) -> None:
    """An engine's process: (prompts, sampling) -> seconds, until the connection closes."""
    engine = SGLangEngine(config)
    engine.start()

    def answer(prompts: list[list[int]], sampling: SamplingParams) -> int:
        answers = engine.generate(prompts, [f"p/{row}" for row in range(len(prompts))], sampling)
        return sum(len(one.response_ids) for one in answers)

    answer_all(connection, answer, engine.flush_cache)
    engine.shutdown()


def serve_by_transformers(config: EngineConfig, connection: Connection) -> None:
    """The same by Hugging Face's `generate`, with its own cache, for the whole batch at once."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(config.model_path, dtype=torch.float32).eval()

    def answer(prompts: list[list[int]], sampling: SamplingParams) -> int:
        ids = torch.tensor(prompts)
        length = {"max_new_tokens": sampling.max_new_tokens, "min_new_tokens": sampling.max_new_tokens}
        mask = torch.ones_like(ids)
        found = model.generate(
            ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0, **length
        )
        return found[:, ids.shape[1] :].numel()

    answer_all(connection, answer, lambda: None)


def answer_all(
    connection: Connection,
    answer: Callable[[list[list[int]], SamplingParams], int],
    before: Callable[[], object],
) -> None:
    """Say how long each answer took; returns when the connection closes."""
    connection.send("started")
    while True:
        try:
            prompts, sampling = connection.recv()
        except EOFError:
            return
        before()
        begun = time.perf_counter()
        tokens = answer(prompts, sampling)
        connection.send(time.perf_counter() - begun)
        assert tokens == len(prompts) * sampling.max_new_tokens, tokens


def start(target: Callable[[EngineConfig, Connection], None], config: EngineConfig) -> Connection:
    """The connection to a new process of one that answers."""
    os.environ |= sglang_environment(config.device, config.tensor_parallel_size)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=target, args=(config, there)).start()
    there.close()
    if not here.poll(START_SECONDS):
        raise TimeoutError(f"{target.__name__} did not start within {START_SECONDS} s")
    here.recv()
    return here


def measure(engines: dict[str, Connection], args: argparse.Namespace) -> list[dict[str, Any]]:
    """For each batch size and name, tokens per second: median, least and most of the rounds."""
    sampling = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)
    draw = random.Random(0)
    rows = []
    for size in args.batch_sizes:
        drawn = [[draw.randrange(10, 300) for _ in range(args.prompt_tokens)] for _ in range(size)]
        prompts = [drawn[row // args.samples] for row in range(size)]
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(1 + args.rounds):
            for name, engine in engines.items():
                engine.send((prompts, sampling))
                taken = engine.recv()
                if number:  # the first is warm-up
                    seconds[name].append(taken)
        for name, values in seconds.items():
            rates = sorted(size * args.new_tokens / value for value in values)
            found = [statistics.median(rates), rates[0], rates[-1]]
            rows.append({"batch_size": size, "by": name, "tokens_per_s": found})
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
    facts = announce(("torch", "sglang", "transformers"))
    with tempfile.TemporaryDirectory() as folder:
        model = example("tiny_model").make_tiny_model(
            Path(folder, "model"), example("arithmetic").arithmetic_texts(), hidden_size=args.hidden_size,
            ffn_hidden_size=4 * args.hidden_size, num_layers=args.num_layers,
        )  # fmt: skip
        # Three engines serve the same model, each in a process of its own, and take turns.
        context = args.prompt_tokens + args.new_tokens + 8
        config = EngineConfig(
            str(model),
            load_format="auto",
            context_length=context,
            max_num_seqs=max(args.batch_sizes),
            deterministic=False,
        )
        engines = {
            USUAL: start(serve, config),
            DETERMINISTIC: start(serve, replace(config, deterministic=True)),
            HUGGING_FACE: start(serve_by_transformers, config),
        }
        rows = measure(engines, args)
        for engine in engines.values():
            engine.close()
    print(
        f"{args.num_layers} layers, hidden {args.hidden_size}, {args.prompt_tokens} + {args.new_tokens} tokens, "
        f"{args.samples} samples of a prompt"
    )
    for row in rows:
        median, least, most = row["tokens_per_s"]
        step = 1e3 * row["batch_size"] / median
        print(
            f"batch {row['batch_size']:4d} {row['by']:>22} {median:8.0f} tokens/s ({least:.0f} to {most:.0f}), "
            f"{step:.1f} ms for a token of all"
        )
    write_report(args.out, **facts, sizes=vars(args) | {"out": None}, rows=rows)


if __name__ == "__main__":
    main()
