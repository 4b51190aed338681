"""Rows that were looked for after the planner's terms and assumptions were fixed; nothing was changed for them since.

They are the other rows of the same pages that the planner can be asked for, and an older version of one. Two weight syncs of verl were
among them until a term was made for what they showed (`singly`); they are rows that were seen since.
"""

from published_rows import (
    BATCH_30B,
    BATCH_235B,
    BATCH_DEEPSEEK,
    DEEPSEEK,
    FULL,
    PLAIN,
    Row,
    apart,
    engines,
    layout,
    nemo,
    prime,
)

OLDER = "NeMo-RL v0.5, the same page and recipes of 2026-02"

HELD_OUT: list[Row] = [
    nemo(
        "DeepSeek-V3",
        512,
        111,
        "deepseek-v3",
        ["trainer.nnodes=64", *BATCH_DEEPSEEK, *layout(ep=16, pp=16, **DEEPSEEK), *engines(32, 0.6), FULL],
        697,
    ),
    nemo(
        "235B-A22B",
        256,
        312,
        "qwen3-235b-a22b",
        ["trainer.nnodes=32", *BATCH_235B, *layout(tp=2, cp=2, ep=16, pp=8, first=11, last=11), *engines(16, 0.6), FULL],
        5713,
    ),
    nemo(
        "235B-A22B one step off",
        256,
        231,
        "qwen3-235b-a22b",
        [*apart(16, 16), *BATCH_235B, *layout(tp=4, ep=16, pp=8, first=11, last=11), *engines(8, 0.88), FULL],
        5721,
    ),
    nemo(
        "Llama-3.1-8B (v0.5)",
        16,
        92.8,
        "llama-3-8b",
        ["trainer.nnodes=2", *BATCH_30B, *layout(pp=2), *engines(1, 0.6), FULL],
        1019,
        source=OLDER,
    ),
    nemo(
        "Llama-3.1-8B one step off (v0.5)",
        16,
        64.8,
        "llama-3-8b",
        [*apart(1, 1), *BATCH_30B, *layout(), *engines(1, 0.8), FULL],
        1123,
        source=OLDER,
    ),
    nemo(
        "Qwen3-32B (v0.5)",
        32,
        376,
        "qwen3-32b",
        ["trainer.nnodes=4", *BATCH_30B, *layout(tp=4, pp=4), *engines(4, 0.6), PLAIN],
        3251,
        source=OLDER,
    ),
    nemo(
        "Qwen3-32B one step off (v0.5)",
        64,
        200,
        "qwen3-32b",
        [*apart(4, 4), *BATCH_30B, *layout(tp=4, pp=4), *engines(4, 0.8), PLAIN],
        3252,
        source=OLDER,
    ),
    prime("SFT of Qwen3-0.6B", 0.62, 8192),
    prime("RL of Qwen3-4B", 4.69, 16384, 8, "qwen3-4b"),
    prime("RL of Qwen3-4B", 30.29, 65536, 8, "qwen3-4b"),
    prime("RL of Qwen3-4B", 4.42, 16384, 8, "qwen3-4b", gpu="H200"),
    prime("RL of Qwen3-4B", 29.89, 65536, 8, "qwen3-4b", gpu="H200"),
]  # fmt: skip
