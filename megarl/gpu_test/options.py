"""Steps `options`, `engines`, `families`, `layouts`, `experts` and `deepep`: short training runs of tiny models, each with options, or of a
family, whose code only a GPU runs in full.

A run has to end, with finite losses and gradients; the norm of its first gradient is recorded with that of the model's first run, and not
judged: engines with different options may draw other responses. The difference of the log-probs of engine and trainer, two implementations of
the same model, is recorded, too, and judged for families.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megarl.gpu_test.runner import LOG, Check, tail
from megarl.gpu_test.several import ACTOR, ROLLOUT, SHORT, TINY, command, read_metrics
from megarl.util.packages import example

NUM_STEPS = 2
NORM = "actor/grad_norm"
DIFFERENCE = "training/rollout_log_prob_diff_mean"
# Nats, in bfloat16. The random models' logits have a deviation of about 0.3: log-probs of another model would differ by as much.
CLOSE = 0.05
COMMON = (
    *SHORT,
    f"{ACTOR}.tensor_model_parallel_size=1",
    f"{ROLLOUT}.gpu_memory_utilization=0.2",  # enough for tiny models, and several runs may share a card
    f"trainer.total_training_steps={NUM_STEPS}",
)
ONE = (*COMMON, f"{ROLLOUT}.num_engines=1", "trainer.n_gpus_per_node=1")
TWO = (*COMMON, f"{ROLLOUT}.num_engines=2", "trainer.n_gpus_per_node=2")
# Of a tiny model's family, beyond `TINY`: layers of each kind, and the widths for which engines have kernels.
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
MORE: dict[str, dict[str, Any]] = {
    "glm4_moe": {"fields": {"num_nextn_predict_layers": 1}},
    "qwen3_next": {"num_layers": 4},
    "qwen3_5": {"num_layers": 4},
    "deepseek_v3": {"fields": _LATENT},
}


@dataclass(frozen=True)
class Case:
    """A run: its name, its keys, the family of its model, and other sizes than the family's (the same in all runs of a step)."""

    name: str
    keys: tuple[str, ...] = ()
    family: str = "qwen3_moe"
    more: dict[str, Any] = field(default_factory=dict)


# On one GPU: options with which a mixture of experts is trained.
OPTIONS = (
    Case("as it is"),
    Case(
        "parts computed again, routing replayed in the updates",
        (
            f"{ACTOR}.recompute_granularity=selective",
            f"{ACTOR}.recompute_modules=[layernorm,moe]",
            "actor_rollout_ref.actor.router_replay=trainer",
        ),
    ),
    Case(
        "an engine's routing replayed, its cache in float8, its experts by Triton",
        (
            "actor_rollout_ref.actor.router_replay=rollout",
            "algorithm.rollout_correction.rollout_is=token",
            f"{ROLLOUT}.kv_cache_dtype=fp8_e4m3",
            f"{ROLLOUT}.moe_runner_backend=triton",
        ),
    ),
)
# On one GPU: options of engines.
ENGINES = (
    Case(
        "prompts in pieces, graphs of few requests",
        (
            f"{ROLLOUT}.engine_kwargs.chunked_prefill_size=64",
            f"{ROLLOUT}.engine_kwargs.cuda_graph_max_bs_decode=8",
        ),
        "qwen2",
    ),
    Case("tokens drafted by n-grams", (f"{ROLLOUT}.speculative.algorithm=ngram",), "qwen2"),
    Case("the tokens that top-p keeps", (f"{ROLLOUT}.top_p=0.9",), "qwen2"),
    Case(
        "tokens drafted by the model's own layer, which is trained",
        ("actor_rollout_ref.model.mtp=train", f"{ROLLOUT}.speculative.algorithm=mtp"),
        "glm4_moe",
    ),
    Case("training and engines in float8", (f"{ACTOR}.fp8=e4m3", f"{ROLLOUT}.quantization=fp8")),
)
# On one GPU: families whose layers have kernels of their own.
FAMILIES = tuple(
    Case(family, family=family)
    for family in ("qwen3_next", "qwen3_5", "gpt_oss", "minimax_m2", "deepseek_v3")
)
# On two GPUs: layouts of a dense model.
LAYOUTS = (
    Case("as it is", family="qwen2"),
    Case(
        "without overlapped gradients and weights",
        (f"{ACTOR}.overlap_grad_reduce=false", f"{ACTOR}.overlap_param_gather=false"),
        "qwen2",
    ),
    Case(
        "Megatron-FSDP, actor and critic",
        (f"{ACTOR}.fsdp=optim_grads", "critic.megatron.fsdp=optim_grads_params"),
        "qwen2",
    ),
    Case(
        "a pipeline's layout by its own notation",
        (f"{ACTOR}.pipeline_model_parallel_size=2", f"{ACTOR}.pipeline_model_parallel_layout=Et|tL"),
        "qwen2",
    ),
)
_SHARED = (
    f"{ACTOR}.expert_model_parallel_size=2",
    f"{ROLLOUT}.num_engines=1",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.expert_parallel_size=2",
)
# On two GPUs, which share a mixture's experts.
EXPERTS = (
    Case("experts of two ranks", _SHARED),
    Case("data parallel attention", (*_SHARED, f"{ROLLOUT}.attention_data_parallel_size=2")),
)
DEEPEP = (
    Case(
        "tokens to experts by DeepEP, in training and in engines",
        (
            *_SHARED,
            f"{ACTOR}.override_transformer_config.moe_token_dispatcher_type=flex",
            f"{ROLLOUT}.moe_a2a_backend=deepep",
        ),
        # SGLang (0.5.21) takes DeepEP's low-latency kernels for decode steps, which are there for a few widths: 2048 is the smallest
        # (DeepEP 1.2.1, csrc/kernels/launch.cuh).
        more={"hidden_size": 2048, "num_attention_heads": 32},
    ),
)


def run_all(
    folder: Path, settings: tuple[str, ...], cases: Sequence[Case], close: float | None = None
) -> Iterator[Check]:
    """A run for each case; `close`: the largest mean difference of log-probs (nats) that is right, None: it is only recorded."""
    arithmetic = example("arithmetic")
    arithmetic.write_arithmetic(folder / "data", 16, 64, 16, seed=3)
    for family, case in {case.family: case for case in cases}.items():
        example("tiny_model").make_tiny_model(
            folder / family, arithmetic.arithmetic_texts(), family=family, **sizes(case)
        )
    firsts: dict[str, float] = {}
    for number, case in enumerate(cases):
        run = folder / f"run{number}"
        done = subprocess.run([*command(folder, case.family, run), *settings, *case.keys], check=False)
        rows = read_metrics(run / "metrics.jsonl")
        # Kept with the check, since the step's record has only the end of its output, which is the last run's.
        log = tail(folder / LOG) if done.returncode else ""
        yield judged(case.name, done.returncode, rows, log)
        if rows and NORM in rows[0]:
            first = firsts.setdefault(case.family, rows[0][NORM])
            yield Check(
                f"{case.name}: the first gradient's norm",
                None,
                f"{rows[0][NORM]:.4g}, of the model's first run {first:.4g}",
                {"norm": rows[0][NORM]},
            )
        if rows and DIFFERENCE in rows[0]:
            found = rows[0][DIFFERENCE]
            yield Check(
                f"{case.name}: log-probs of engine and trainer",
                None if close is None else found <= close,
                f"{found:.2g} nats apart in the mean"
                + (f" (at most {close:g})" if close is not None else ""),
                {"difference": found},
            )


run_options = partial(run_all, settings=ONE, cases=OPTIONS)
run_engines = partial(run_all, settings=ONE, cases=ENGINES)
run_families = partial(run_all, settings=ONE, cases=FAMILIES, close=CLOSE)
run_layouts = partial(run_all, settings=TWO, cases=LAYOUTS)
run_experts = partial(run_all, settings=TWO, cases=EXPERTS)
run_deepep = partial(run_all, settings=TWO, cases=DEEPEP)


def sizes(case: Case) -> dict[str, Any]:
    """The sizes of a run's tiny model."""
    return {**TINY, **MORE.get(case.family, {}), **case.more}


def judged(name: str, code: int, rows: list[dict[str, float]], log: str = "") -> Check:
    """Whether a run ended well, with all steps and finite numbers; `log`: the end of its output, if it did not."""
    steps = [int(row["step"]) for row in rows]
    wrong = sorted(key for row in rows for key, value in row.items() if not math.isfinite(value))
    right = code == 0 and steps[-1:] == [NUM_STEPS] and not wrong
    text = f"exit code {code}, steps {steps}" + (f", not finite: {', '.join(wrong)}" if wrong else "")
    return Check(name, right, f"{text}\n{log}" if log else text)
