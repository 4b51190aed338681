"""Step `engine`: an engine alone. It answers, releases its memory, takes it back with weights that a trainer rank sends, answers again.

The bytes that the engine reports as released are compared with the free memory that CUDA reports.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.hf.load import load_hf_weights
from megarl.data.trajectories import Generation
from megarl.gpu_test.runner import Check
from megarl.gpu_test.sync import SECONDS, shapes, single_rank_plan, told_by
from megarl.rollout.engine import EngineConfig, SamplingParams
from megarl.util.packages import example
from megarl.weight_sync.receiver import InboxFile
from megarl.weight_sync.sender import Outbox
from megarl.weight_sync.sync_plan import SyncPlan

MIB, GIB = 1 << 20, 1 << 30
# Qwen2.5-0.5B's shape.
QWEN_HALF: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 896, "num_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "ffn_hidden_size": 4864, "max_position_embeddings": 32768, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
TAGS = ("kv_cache", "weights")
PART_FREED = 0.95  # of the bytes that the engine reports as released
CLOSE = 0.1  # largest difference of two log-probs of a token that was chosen twice, in bfloat16


def run(folder: Path) -> Iterator[Check]:
    torch.cuda.init()
    example("tiny_model").make_tiny_model(
        folder / "model", example("arithmetic").arithmetic_texts(), **QWEN_HALF
    )
    config = EngineConfig(
        str(folder / "model"), device="cuda", dtype="bfloat16", load_format="auto", context_length=2048,
        enable_memory_saver=True, gpu_memory_utilization=0.5, start_timeout=300.0,
    )  # fmt: skip
    yield from use(config, folder, lambda: torch.cuda.mem_get_info()[0], prompts=256, tokens=256)


def use(
    config: EngineConfig, folder: Path, free: Callable[[], int] | None, *, prompts: int, tokens: int
) -> Iterator[Check]:
    """Check everything that an engine does in a step.

    Args:
        free: bytes of the device's memory that are free; None: they cannot be told.
    """
    from megarl.rollout.sglang.engine import SGLangEngine

    before = free() if free is not None else 0
    engine = SGLangEngine(config)
    begun = time.perf_counter()
    engine.start()
    try:
        seconds = time.perf_counter() - begun
        yield Check("it starts", True, f"in {seconds:.1f} s", {"seconds": seconds})
        first = yield from _generate(engine, "first answers", prompts, tokens)
        # Again, with kernels compiled and warm.
        yield from _generate(engine, "answers", prompts, tokens)
        started = free() if free is not None else 0
        (held,) = engine.memory()
        engine.release_memory(TAGS)
        yield Check("memory that it held", all(held[tag] > 0 for tag in TAGS), _sizes(held), held)
        (left,) = engine.memory()
        yield Check(
            "memory that it reports after release", all(left[tag] == 0 for tag in TAGS), _sizes(left), left
        )
        if free is not None:
            yield from _freed(sum(held[tag] for tag in TAGS), before, started, free())
        engine.resume_memory(["weights"])
        yield from _send_weights(engine, config, folder)
        engine.resume_memory(["kv_cache"])
        again = yield from _generate(engine, "answers with weights that were sent", prompts, tokens)
        yield _same(first, again)
        if free is not None:
            lost = started - free()
            yield Check(
                "memory after resume",
                lost < 256 * MIB,
                f"{lost / MIB:,.0f} MiB more in use than before",
                {"more": lost},
            )
    finally:
        engine.shutdown()
    if free is not None:
        lost = before - free()
        yield Check("memory after its end", lost < 256 * MIB, f"{lost / MIB:,.0f} MiB stay", {"stays": lost})


def _generate(engine: Any, name: str, prompts: int, tokens: int) -> Iterator[Check]:
    ids = [[(7 * number + place) % 200 + 20 for place in range(32)] for number in range(prompts)]
    begun = time.perf_counter()
    answers = engine.generate(
        ids,
        [str(number) for number in range(prompts)],
        SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True),
    )
    seconds = time.perf_counter() - begun
    whole = all(len(answer.response_ids) == tokens for answer in answers)
    finite = all(math.isfinite(value) for answer in answers for value in answer.log_probs)
    rate = prompts * tokens / seconds
    yield Check(
        name,
        whole and finite,
        f"{prompts} of {tokens} tokens in {seconds:.2f} s: {rate:,.0f} tokens/s"
        + ("" if whole else "; not all are complete")
        + ("" if finite else "; log-probs are not finite"),
        {"seconds": seconds, "tokens_per_s": rate},
    )
    return answers


def _same(first: Sequence[Generation], again: Sequence[Generation]) -> Check:
    """Whether answers equal the ones that the same weights gave before: compared up to where two first differ, since the choice of
    kernels may depend on concurrent requests, and of two tokens that are about equally probable either may come first."""
    different, tokens, largest = 0, 0, 0.0
    for one, other in zip(first, again, strict=True):
        pairs = zip(one.response_ids, other.response_ids, strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        different += same < len(one.response_ids)
        tokens += same
        for a, b in zip(one.log_probs[:same], other.log_probs[:same], strict=True):
            largest = max(largest, abs(float(a) - float(b)))
    return Check(
        "the same answers",
        tokens > 0 and largest < CLOSE,
        f"{different} of {len(first)} differ somewhere; before that the largest difference of log-probs is {largest:.2g}",
        {"different": different, "largest": largest},
    )


def _freed(held: int, before: int, started: int, released: int) -> Iterator[Check]:
    freed = released - started
    yield Check(
        "free memory after release, by CUDA",
        freed >= PART_FREED * held,
        f"{freed / GIB:.2f} GiB more than before; the engine released {held / GIB:.2f} GiB",
        {"freed": freed, "held": held},
    )
    stays = before - released
    yield Check(
        "memory that stays during training",
        None,
        f"{stays / GIB:.2f} GiB: context, graphs, workspaces",
        {"bytes": stays},
    )


def _send_weights(engine: Any, config: EngineConfig, folder: Path) -> Iterator[Check]:
    """Version 1 from a trainer rank in a process of its own, on the same device."""
    context = torch.multiprocessing.get_context("spawn")
    address = context.Queue()
    process = context.Process(target=_send, args=(config, str(folder), address))
    process.start()
    try:
        _, (share,) = _plan(config).shares()
        inbox = folder / "inbox"
        InboxFile(share, {0: told_by(process, address)}, None, SECONDS).write(inbox)
        engine.connect([inbox])
        engine.begin_update(1)
        engine.receive_weights()
        report = engine.finish_update()
        process.join(SECONDS)
        yield Check(
            "weights are sent",
            process.exitcode == 0,
            f"{report.bytes_written[0] / 1e9:.2f} GB in {report.seconds:.2f} s",
            {"seconds": report.seconds, "bytes": report.bytes_written[0]},
        )
    finally:
        process.kill()


def _plan(config: EngineConfig) -> SyncPlan:
    return single_rank_plan(config.model_path, _dtype(config), config.device)


def _dtype(config: EngineConfig) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.dtype]


def _send(config: EngineConfig, folder: str, address: Any) -> None:
    plan = _plan(config)
    (share,), _ = plan.shares()
    parameters = {
        name: torch.empty(shape, dtype=_dtype(config), device=config.device)
        for name, shape in shapes(plan.plan.source).items()
    }
    load_hf_weights(config.model_path, plan.config, plan.parallel, 0, parameters)
    outbox = Outbox(share, folder, "127.0.0.1", config.device, SECONDS)
    address.put(outbox.address)
    outbox.send(1, parameters)


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in sizes.items())
