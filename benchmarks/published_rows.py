"""Runs that others measured on real GPUs and published, as the planner can be asked for them.

Besides its measurement a row has facts of the run: layout, batch, mean lengths, precision, and how its framework works (whether
its engines replay CUDA graphs, whether it gathers whole tensors for a weight sync, whether its trainer has fused kernels).
No row has a constant of its own. Sources are the projects' pages of 2025 and 2026; no run was repeated here.
"""

from dataclasses import dataclass

NEMO = "NeMo-RL v0.6, docs/about/performance-summary.md and examples/configs/recipes/llm/performance"
VERL = "verl, docs/perf/dpsk.md and examples/grpo_trainer"
ASYNC = "verl, docs/advance/fully_async.md, ablation without the checkpoint engine; recipe/fully_async_policy"
PRIME = "prime-rl, benchmarks/baselines of 2026-01"
RESHARD, RESHARD_FINAL = "NeMo-RL, pull request 2808", "NeMo-RL, pull request 2971"

_QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
MODELS: dict[str, dict[str, object]] = {
    "qwen3-0.6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28},
    "qwen3-4b": _QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_hidden_layers": 36},
    "qwen3-32b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "tie_word_embeddings": False,
    },
}
"""config.json of models that no recipe has: the fields that are read, as their makers published them."""


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        measures: "step" (seconds), "rollout" (seconds of generation), "update" (seconds of the optimizer steps), "mfu" (part of the
            peak, of the optimizer steps), "sync" (seconds of the weight sync).
        low, high: the measured values; the same where one number was published.
        model: a folder of recipes/models, or one of MODELS. keys: over recipes/bases/math_grpo.yaml.
        prompt, response: mean tokens; None where they were not published: the planner's own assumption.
        eager: engines launch each kernel from Python. gathers: every rank gets every whole tensor in a weight sync; singly: and the engine
            loads each by a call of its own.
        fused: whether norms, rotations and gated units are one kernel each in the trainer (by torch.compile or hand).
        pageable: what leaves the GPUs goes to memory that is not page-locked (`.to("cpu")`).
        balanced: whether rows of each mini-batch, not only those of the step, are levelled over ranks.
    """

    name: str
    source: str
    gpu: str
    measures: str
    low: float
    high: float
    model: str
    keys: tuple[str, ...]
    prompt: float | None = None
    response: float | None = None
    eager: bool = False
    gathers: bool = False
    singly: bool = False
    fused: bool = True
    pageable: bool = False
    balanced: bool = True

    @property
    def measured(self) -> float:
        return (self.low * self.high) ** 0.5


@dataclass(frozen=True)
class NotExpressed:
    """A published measurement that the planner has no words for, and why."""

    name: str
    why: str


_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MEGATRON = f"{_ACTOR}.megatron"


def layout(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, first: int = 0, last: int = 0) -> list[str]:
    """Keys of a trainer's layout; `first`, `last`: layers of these stages where they differ."""
    sizes = {"tensor": tp, "pipeline": pp, "context": cp, "expert": ep}
    names = {
        "tensor": "tensor_model_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "context": "context_parallel_size",
        "expert": "expert_model_parallel_size",
    }
    keys = [f"{_MEGATRON}.{names[name]}={size}" for name, size in sizes.items()]
    if first:
        keys.append(f"{_MEGATRON}.num_layers_in_first_pipeline_stage={first}")
    if last:
        keys.append(f"{_MEGATRON}.num_layers_in_last_pipeline_stage={last}")
    return keys


def batch(prompts: int, samples: int, mini: int, longest: int, response: int, tokens: int) -> list[str]:
    """Keys of a step's batch: prompts and their samples, prompts of a mini-batch, most tokens of a prompt, of a response, of a
    micro-batch."""
    return [
        f"data.train_batch_size={prompts}",
        f"{_ROLLOUT}.n={samples}",
        f"{_ACTOR}.ppo_mini_batch_size={mini}",
        f"data.max_prompt_length={longest}",
        f"data.max_response_length={response}",
        f"{_ACTOR}.ppo_max_token_len_per_gpu={tokens}",
    ]


def engines(tp: int, memory: float, seqs: int = 256) -> list[str]:
    """Keys of the engines."""
    return [
        f"{_ROLLOUT}.tensor_model_parallel_size={tp}",
        f"{_ROLLOUT}.gpu_memory_utilization={memory}",
        f"{_ROLLOUT}.max_num_seqs={seqs}",
    ]


def apart(train: int, serve: int) -> list[str]:
    """Keys of nodes of eight GPUs for the trainer, and others for the engines, each at work on another step's batch."""
    return [
        f"trainer.nnodes={train + serve}",
        f"resource_pools={{train: {{nnodes: {train}, n_gpus_per_node: 8}}, serve: {{nnodes: {serve}, n_gpus_per_node: 8}}}}",
        f"{_ACTOR}.resource_pool=train",
        f"{_ROLLOUT}.resource_pool=serve",
        "trainer.mode=one_step_off",
        "algorithm.rollout_correction.rollout_is=token",
    ]


PLAIN, FULL = f"{_MEGATRON}.recompute_granularity=null", f"{_MEGATRON}.recompute_granularity=full"
REFERENCE = f"{_ACTOR}.use_kl_loss=true"  # NeMo-RL's recipes have a KL to the first policy in the loss
DEEPSEEK = {"first": 3, "last": 2}  # of 61 layers

# OpenMathInstruct-2: problems of some 120 tokens with the instruction; a sequence has at most so many tokens in all.
PROMPT = 128


def nemo(name, gpus, measured, model, keys, mean, **how) -> Row:
    return Row(
        f"NeMo-RL {name}, {gpus} H100",
        how.pop("source", NEMO),
        "H100",
        "step",
        measured,
        measured,
        model,
        (*keys, REFERENCE),
        PROMPT,
        mean - PROMPT,
        gathers=True,
        pageable=True,
        **how,
    )


BATCH_30B = batch(64, 32, 16, 2 * PROMPT, 4096 - PROMPT, 4224)
BATCH_235B = batch(16, 32, 16, 2 * PROMPT, 8192 - PROMPT, 8320)
BATCH_DEEPSEEK = batch(32, 16, 32, 2 * PROMPT, 1536 - PROMPT, 1664)

ROWS: list[Row] = [
    nemo(
        "30B-A3B",
        32,
        192,
        "qwen3-30b-a3b",
        ["trainer.nnodes=4", *BATCH_30B, *layout(ep=8), *engines(2, 0.6), PLAIN],
        3203,
    ),
    nemo(
        "30B-A3B one step off",
        32,
        152,
        "qwen3-30b-a3b",
        [*apart(2, 2), *BATCH_30B, *layout(pp=2, ep=8), *engines(2, 0.8), PLAIN],
        3201,
    ),
    nemo(
        "235B-A22B",
        128,
        395,
        "qwen3-235b-a22b",
        [
            "trainer.nnodes=16",
            *BATCH_235B,
            *layout(tp=2, cp=2, ep=16, pp=8, first=11, last=11),
            *engines(16, 0.6),
            FULL,
        ],
        5698,
    ),
    nemo(
        "DeepSeek-V3",
        256,
        134,
        "deepseek-v3",
        ["trainer.nnodes=32", *BATCH_DEEPSEEK, *layout(ep=16, pp=16, **DEEPSEEK), *engines(32, 0.6), FULL],
        701,
    ),
    nemo(
        "DeepSeek-V3 one step off",
        512,
        64.1,
        "deepseek-v3",
        [*apart(32, 32), *BATCH_DEEPSEEK, *layout(ep=16, pp=16, **DEEPSEEK), *engines(32, 0.8), FULL],
        710,
    ),
]

_VERL_671B = (
    "trainer.nnodes=12",
    *batch(96, 8, 32, 2048, 9632, 11680),
    *layout(tp=8, pp=12, ep=8, last=6),
    *engines(32, 0.6),
    FULL,
    REFERENCE,
    f"{_ACTOR}.optim.optimizer_cpu_offload=true",
)


def _verl(name: str, measures: str, measured: float, model: str, keys: tuple[str, ...], **how) -> Row:
    return Row(
        f"verl {name}",
        VERL,
        how.pop("gpu", "H20"),
        measures,
        measured,
        measured,
        model,
        keys,
        gathers=True,
        pageable=True,
        balanced=False,
        **how,
    )


for _measures, _value in (("rollout", 1050), ("step", 1700), ("mfu", 0.19)):
    ROWS.append(
        _verl(
            "DeepSeek-V3, 96 H20",
            _measures,
            _value,
            "deepseek-v3",
            _VERL_671B,
            prompt=200,
            response=1960,
            eager=True,
        )
    )
for _nodes, _value in ((1, 0.40), (2, 0.37), (4, 0.31)):
    ROWS.append(
        _verl(
            f"30B-A3B, {8 * _nodes} H20",
            "mfu",
            _value,
            "qwen3-30b-a3b",
            (
                f"trainer.nnodes={_nodes}",
                *batch(512, 16, 128, 2048, 8192, 10240),
                *layout(ep=8),
                *engines(4, 0.7),
                PLAIN,
                f"{_ACTOR}.optim.optimizer_cpu_offload=true",
            ),
            eager=True,
        )
    )

_GSM8K = Row(
    "verl PPO of Qwen2.5-0.5B, one H800",
    "a public article on verl, step 42: 13.3 s, 1,702 tokens/s; so 354 tokens a text",
    "H100",  # an H800 has its peaks, and narrower links
    "step",
    13.3,
    13.3,
    "recipe:qwen2.5_0.5b_ppo_single_gpu",
    ("data.max_prompt_length=512",),
    105,
    249,
    fused=False,
    pageable=True,
)


def prime(name: str, measured: float, tokens: int, gpus: int = 1, model: str = "qwen3-0.6b", **how) -> Row:
    """Two micro-batches of one text each for every GPU, and an optimizer step. The same files' tokens/s count what is between two steps,
    too: of RL 0.75 s, in which the loop writes the weights out for its engines."""
    gpu = how.pop("gpu", "H100")
    return Row(
        f"prime-rl {name}, {tokens:,} tokens, {gpus} {gpu}",
        PRIME,
        gpu,
        "update",
        measured,
        measured,
        model,
        (
            "trainer.nnodes=1",
            f"trainer.n_gpus_per_node={gpus}",
            *batch(2 * gpus, 1, 2 * gpus, 1, tokens - 1, tokens),
            *engines(1, 0.5),
            f"{_ROLLOUT}.num_engines={gpus}",
            FULL,
        ),
        1,
        tokens - 1,
        **how,
    )


ROWS += [
    _GSM8K,
    prime("RL of Qwen3-0.6B", 1.99, 16384),
    prime("RL of Qwen3-0.6B", 12.18, 65536),
    prime("SFT of Qwen3-0.6B", 1.28, 16384),
]


def sync(name: str, source: str, low: float, high: float, model: str, keys: list[str], **how) -> Row:
    gpu = how.pop("gpu", "H100")
    return Row(f"sync of {name}", source, gpu, "sync", low, high, model, tuple(keys), 100, 1000, **how)


_TWO, _SMALL = apart(2, 2), batch(128, 8, 32, 256, 3840, 4096)
ROWS += [
    sync("30B-A3B, TP2 PP2 EP4 to TP4", RESHARD, 0.48, 0.52, "qwen3-30b-a3b", [*_TWO, *_SMALL, *layout(tp=2, pp=2, ep=4), *engines(4, 0.7)]),
    sync("30B-A3B, PP2 EP8 to TP8", RESHARD_FINAL, 0.74, 1.00, "qwen3-30b-a3b", [*_TWO, *_SMALL, *layout(pp=2, ep=8), *engines(8, 0.7)]),
    sync("30B-A3B, PP2 EP8 to TP2", RESHARD_FINAL, 1.21, 1.52, "qwen3-30b-a3b", [*_TWO, *_SMALL, *layout(pp=2, ep=8), *engines(2, 0.9)]),
    sync(
        "235B-A22B, TP4 PP8 EP16 to TP8",
        RESHARD,
        4.56,
        4.85,
        "qwen3-235b-a22b",
        [*apart(16, 16), *_SMALL, *layout(tp=4, pp=8, ep=16, first=11, last=11), *engines(8, 0.9)],
    ),
    sync(
        "DeepSeek-V3, PP16 EP16 to TP32",
        RESHARD,
        7.65,
        9.94,
        "deepseek-v3",
        [*apart(32, 32), *_SMALL, *layout(pp=16, ep=16, **DEEPSEEK), *engines(32, 0.9)],
    ),
    # The trainer's layouts are not on the page; a sync in which every rank gets every tensor does not depend on them.
    sync("30B-A3B, 16 + 16 H20 (verl)", ASYNC, 15.76, 15.76, "qwen3-30b-a3b", [*_TWO, *_SMALL, *layout(ep=8), *engines(4, 0.7)], gpu="H20", gathers=True, singly=True),
    sync(
        "235B-A22B, 64 + 64 H20 (verl)",
        ASYNC,
        58.57,
        58.57,
        "qwen3-235b-a22b",
        [*apart(8, 8), *_SMALL, *layout(tp=4, pp=8, ep=8, first=11, last=11), *engines(8, 0.9)],
        gpu="H20",
        gathers=True,
        singly=True,
    ),
]  # fmt: skip

NOT_EXPRESSED = (
    NotExpressed("tokens/s and MFU of the prime-rl rows", "they count the weights that the loop writes to disk between two steps, which megarl sends; the rows are the steps that the same files time"),
    NotExpressed("30B-A3B eight steps off on 192 H100 (NeMo-RL), fully_async and one_step_off (verl)", "another schedule, or no mean length on the page"),
    NotExpressed("DeepSeek-V3 and Llama-3.1-8B in FP8 (NeMo-RL)", "matrices of the trainer in float8"),
    NotExpressed("30B-A3B of prime-rl", "FSDP gathers all experts on every GPU; ranks here keep theirs"),
    NotExpressed("sync of Qwen2.5-Math-7B, 0.12 s, and with the checkpoint engine 0.02 s (verl)", "its seconds are not waited for: 15.2 GB in 0.02 s are 760 GB/s, above the floor of 450 GB/s of a GPU's NVLink"),
    NotExpressed("sync of 30B-A3B, 4.38 s, and of 235B-A22B, 23.7 s, with verl's checkpoint engine", "weights pass through the host's memory in buckets, from a copy that the trainer made before"),
    NotExpressed("sync of 30B-A3B, 2.16 s (miles)", "its layouts are not on the page"),
    NotExpressed("sync of 235B-A22B, 3.16 s (miles), 3.2 to 3.3 s (8 + 8 H100)", "no layouts; and 235B in bfloat16 takes 470 of 8 x 80 GB with no room for its trainer on 8"),
    NotExpressed("sync of DeepSeek-V3, 9.25 s (NIXL, 256 + 32)", "the trainer's layout is not on the page"),
    NotExpressed("sync of GLM-5.2 744B, 2.84 s (prime-rl)", "a family without tables here; FSDP, H200"),
    NotExpressed("sync of Kimi-K2, 1.3 s (Perplexity)", "layouts are not on the page; bfloat16 is quantised on the way"),
    NotExpressed("colocated sync of 235B-A22B, 30.4 s (NeMo-RL 3294)", "B200 in MXFP8, most of it moves to and from the host"),
    NotExpressed("colocated sync of 355B, 48 s (slime)", "a family without tables here"),
)  # fmt: skip
