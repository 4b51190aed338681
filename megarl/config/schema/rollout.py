"""The engines that generate responses: section `rollout`, its sampling, and trajectories of several turns."""

# Every default here is made by dataclasses.field, by `option` and `section`.
# ruff: noqa: RUF009

from dataclasses import dataclass
from typing import Any

from megarl.config.schema import option, section
from megarl.config.schema.models import DTYPES

ENVIRONMENTS = ("calculator", "openenv")
_NO_OTHER_ENGINE = dict.fromkeys(
    ("vllm", "hf", "trtllm", "naive"), "megarl generates with SGLang: write sglang, or leave the key out"
)
TRUNCATE_SIDES = ("left", "right", "middle")
MOST_KEPT = 4096
"""The most tokens that a training rollout draws a token from where some are left out: SGLang returns as many (0.5.21)."""


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig:
    """Trajectories of several turns. All turns together, the environment's too, have data.max_response_length tokens."""

    enable: bool = option("An environment answers the policy, in training, validation and evaluation.", False)
    environment: str | None = option(
        "The environment's name: calculator, openenv (an OpenEnv server), or one that a file of plugins registers.",
        None,
    )
    options: dict[str, Any] | None = option("What each of its objects is made with.", None)
    max_assistant_turns: int | None = option("Most turns of the policy; null: as tokens allow.", None, ge=1)
    max_user_turns: int | None = option("Most turns of the environment; null: as tokens allow.", None, ge=1)
    max_tool_response_length: int = option(
        "Characters of a text of the environment; longer ones are shortened.", 256, ge=1
    )
    tool_response_truncate_side: str = option(
        "What is kept of them: left the beginning, right the end, middle half of each.",
        "middle",
        choices=TRUNCATE_SIDES,
    )
    step_timeout: float = option(
        "Seconds that the environment may take for an answer, less those in which nothing is generated; then its trajectory is given up.",
        60.0,
        gt=0,
    )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """Agents as programs: each request of the run is a task of an agent, which calls the policy by OpenAI's or Anthropic's API (docs/gateway.md)."""

    enable: bool = option("Agents answer the prompts, in training, validation and evaluation.", False)
    command: tuple[str, ...] = option("An agent's program and its arguments, run for each task.", ())
    agent: str | None = option(
        "FILE.py:FUNCTION: an agent as a Python function of the task, called in a process of its own; a number that it returns is the score. "
        "In place of command.",
        None,
    )
    python: str | None = option(
        "The interpreter that calls agent, such as that of a virtual environment of its own; null: the run's.",
        None,
    )
    preload: tuple[str, ...] = option(
        "Modules that agent imports, such as its framework: they are imported once, in a process of which each agent is a copy (fork). They must "
        "start no threads, and read the gateway's address and key only when they are used.",
        (),
    )
    score: str | None = option(
        "FILE.py:FUNCTION: the score of a finished session, as a function of the task and the session; null: what the agent posts, and else the "
        "reward of its last trajectory.",
        None,
    )
    models: tuple[str, ...] = option("The names by which agents may ask for the policy.", ("policy",))
    players: tuple[str, ...] = option(
        "Further such names, each of them a player of a game: its trajectories have a score of their own and are compared with the same player's "
        "(self-play, docs/agents.md).",
        (),
    )
    tool_parser: str | None = option(
        "SGLang's parser of the model's calls of tools; null: requests with tools are refused.", None
    )
    reasoning_parser: str | None = option(
        "SGLang's parser of the model's reasoning; null: it is part of the text.", None
    )
    timeout: float = option(
        "Seconds that an agent may take, less those in which nothing is generated; then it has failed.",
        600.0,
        gt=0,
    )
    concurrency: int = option("Agents of an engine at a time.", 64, ge=1)
    max_requests: int | None = option("Most requests of an agent; null: any number.", None, ge=1)
    requests_per_minute: int | None = option(
        "Most requests of an agent in a minute; more are refused with the seconds to wait, which clients do. null: any number.",
        None,
        ge=1,
    )
    host: str = option(
        "The address that each engine's gateway listens on; cluster: its node's, for agents on other machines.",
        "127.0.0.1",
    )
    environment: dict[str, Any] | None = option("Further environment variables of agents, by name.", None)
    pass_env: tuple[str, ...] = option(
        "Names of variables of the run's own environment that agents have, too, such as keys of their tools.",
        (),
    )
    sandbox: str = option(
        "Where agents run. none: as programs with the network and the rights of the run's user. namespaces, bubblewrap (needs bwrap): they read "
        "the system's folders, Python's and those of readable, write into a folder of their own, and reach no network but the gateway. docker, "
        "podman: in a container of image, which reaches no network but the gateway. FILE.py:NAME: a sandbox of your own (docs/gateway.md).",
        "none",
    )
    image: str | None = option(
        "The image of docker's and podman's containers, with python3 in it; {NAME} in it is extra_info.NAME of the row.",
        None,
    )
    readable: tuple[str, ...] = option(
        "Further folders that agents in a sandbox may read, besides that of the agent's file.", ()
    )
    memory_mb: int | None = option(
        "MiB of memory that an agent's container may have, or of data each process of an agent in another sandbox; null: any.",
        None,
        ge=16,
    )
    keep_logs: bool = option("Keep what agents print, a file each; false: of those that failed alone.", False)


CONTAINERS = ("docker", "podman")
SANDBOXES = ("none", "namespaces", "bubblewrap", *CONTAINERS)  # or FILE.py:NAME


ROLLOUT_ENGINES = ("sglang",)


SYNC_TRANSPORTS = ("auto", "shared_memory", "p2p", "nixl")


LORA_SYNCS = ("adapters", "merged")

MOE_RUNNERS = ("triton", "deep_gemm")
_NO_OTHER_RUNNER = {
    **dict.fromkeys(
        (
            "flashinfer_cutlass",
            "flashinfer_trtllm",
            "flashinfer_trtllm_routed",
            "experimental_sgl_trtllm",
            "flashinfer_cutedsl",
        ),
        "it holds an expert's up projection before its gate, and may permute rows: a sync writes gate before up, in the table's order; write "
        "triton or deep_gemm",
    ),
    **dict.fromkeys(
        (
            "triton_kernel",
            "marlin",
            "experimental_sgl_marlin",
            "cutlass",
            "humming",
            "hpc_ops",
            "flashinfer_mxfp4",
            "megamoe",
            "flashinfer_megamoe",
        ),
        "it transposes or repacks experts' weights when they are loaded, so that no sync could fill them; write triton or deep_gemm",
    ),
    "auto": "SGLang would choose kernels that a sync's order of rows does not fit, by GPU: leave the key out (null), or write triton or deep_gemm",
}


DRAFTING = ("ngram", "mtp", "eagle3")
_NO_OTHER_DRAFTING = {
    **dict.fromkeys(
        ("nextn", "NEXTN", "eagle", "EAGLE"),
        "write mtp, for the model's own layers; eagle3 is for a draft model",
    ),
    **dict.fromkeys(
        ("standalone", "STANDALONE", "dflash", "DFLASH", "dspark", "DSPARK", "uno", "UNO"),
        f"its tokens are checked by other code than that of {', '.join(DRAFTING)}, which draws with a request's own noise; write one of these",
    ),
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: tokens are drafted, and a pass of the model checks several. Responses and log-probs stay the model's."""

    algorithm: str | None = option(
        "ngram: what followed the same tokens earlier in the prompt or in other responses; mtp: the model's own layers for further tokens "
        "(DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5), on GPUs; eagle3: a draft model, on GPUs; null: none.",
        None,
        choices=DRAFTING,
        refused=_NO_OTHER_DRAFTING,
    )
    num_draft_tokens: int = option(
        "Tokens that are drafted, one after the other, and checked in a pass of the model with the one before them.",
        3,
        ge=1,
        le=31,
    )
    draft_path: str | None = option(
        "eagle3: the draft model's Hugging Face folder. Its weights stay as they are.", None, is_path=True
    )
    accept_length: float | None = option(
        "What `megarl plan` assumes: tokens of a response a pass (the metric rollout/accept_length), from 1 to num_draft_tokens + 1; null: 1, no "
        "gain.",
        None,
        ge=1,
    )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How validation and evaluation sample."""

    temperature: float = option("0: greedy.", 0.0, ge=0)
    top_p: float = option("Probability mass that is sampled from; 1: all.", 1.0, gt=0, le=1)
    top_k: int = option("Most probable tokens that are sampled from; -1: all.", -1, ge=-1)
    min_p: float = option(
        "Tokens of less than this part of the most probable one's probability are left out; 0: none.",
        0.0,
        ge=0,
        le=1,
    )
    repetition_penalty: float = option(
        "The logits of tokens that occurred in the response are divided by it (negative ones multiplied); 1: not.",
        1.0,
        gt=0,
        le=2,
    )
    frequency_penalty: float = option(
        "Taken from a token's logit for each time that it occurred in the response.", 0.0, ge=-2, le=2
    )
    presence_penalty: float = option(
        "Taken from a token's logit if it occurred in the response.", 0.0, ge=-2, le=2
    )
    n: int = option(
        "Responses a prompt; over 1: the scores are also given as mean@n, best@n, pass@k and maj@n.", 1, ge=1
    )
    pass_threshold: float = option("Score from which on an answer passes (pass@k).", 1.0)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The engines that generate responses."""

    name: str = option("The engine.", "sglang", choices=ROLLOUT_ENGINES, refused=_NO_OTHER_ENGINE)
    tensor_model_parallel_size: int = option("Devices that share one engine's model.", 1, ge=1)
    expert_parallel_size: int = option(
        "Groups of an engine's devices that share the experts (SGLang's ep_size).", 1, ge=1
    )
    attention_data_parallel_size: int = option(
        "Groups of an engine's devices, of which each computes the attention of requests of its own and holds their keys and values; the "
        "devices of a group cut the heads, and all devices the experts and MLPs (SGLang's dp_size with enable_dp_attention). 1: one group.",
        1,
        ge=1,
    )
    data_parallel_lm_head: bool = option(
        "Each of these groups has the whole output layer (SGLang's enable_dp_lm_head), so that logits are gathered within a group; false: all "
        "devices cut it. Where it is the embedding, each group has it in any case.",
        False,
    )
    nodes_per_engine: int | None = option(
        "Nodes that share an engine's devices evenly, each with a process of its own; null: as few as its devices need.",
        None,
        ge=1,
    )
    num_engines: int | None = option("Engines; null: as many as the pool's devices hold.", None, ge=1)
    allow_unknown_version: bool = option(
        "Start an engine of a version that megarl was not tried with.", False
    )
    n: int = option("Responses a prompt.", 1, ge=1)
    temperature: float = option("Of training rollouts.", 1.0, gt=0)
    top_p: float = option(
        "Probability mass that training rollouts sample from; 1: all. Log-probs, also the trainer's, are then those of the tokens that "
        "were sampled from alone.",
        1.0,
        gt=0,
        le=1,
    )
    top_k: int = option(
        f"Most probable tokens that training rollouts sample from; -1: all, or {MOST_KEPT} with top_p or min_p.",
        -1,
        ge=-1,
        le=MOST_KEPT,
    )
    min_p: float = option(
        "Training rollouts leave out tokens of less than this part of the most probable one's probability; 0: none.",
        0.0,
        ge=0,
        lt=1,
    )
    repetition_penalty: float = option("Of training rollouts: 1 (none) only.", 1.0)
    frequency_penalty: float = option("Of training rollouts: 0 (none) only.", 0.0)
    presence_penalty: float = option("Of training rollouts: 0 (none) only.", 0.0)
    stop_token_ids: tuple[int, ...] = option(
        "Tokens that end a response, and are part of it, besides the model's end tokens.", ()
    )
    dtype: str | None = option(
        "Of the weights; null: bfloat16 on GPUs, float32 on CPUs.", None, choices=DTYPES
    )
    gpu_memory_utilization: float = option(
        "Part of a GPU's memory for weights and KV cache.", 0.5, gt=0, le=1
    )
    free_cache_engine: bool | None = option(
        "Weights and KV cache of the engines leave the devices while models are trained; null: where these share GPUs.",
        None,
    )
    max_num_seqs: int = option("Requests that an engine runs at a time; the others wait.", 256, ge=1)
    max_total_tokens: int | None = option(
        "Tokens in an engine's KV cache; null: from the memory.", None, ge=1
    )
    seed: int = option("Of the sampling.", 1, ge=0)
    deterministic: bool | None = option(
        "A response depends on weights, prompt and seed only, bit by bit, not on what else the engine does at the time "
        "(docs/reproducibility.md); on GPUs SGLang's enable_deterministic_inference. null: on CPUs in float32 that can.",
        None,
    )
    start_timeout: float | None = option(
        "Seconds that the start of an engine may take. null: 300 on CPUs; 1800 on GPUs, where the first start compiles kernels.",
        None,
        gt=0,
    )
    request_timeout: float = option(
        "Seconds within which an engine that has requests must compute the next tokens of any, and answer any other call. Long "
        "responses may take longer.",
        600.0,
        gt=0,
    )
    max_restarts: int = option(
        "How many engines that died or hang are started anew in a run; they get the current weights, and their "
        "unfinished trajectories are asked for again. 0: the run ends with the first.",
        3,
        ge=0,
    )
    val_kwargs: SamplingConfig = section("How validation samples.", SamplingConfig)
    multi_turn: MultiTurnConfig = section(
        "Trajectories of several turns, with an environment that answers the policy.", MultiTurnConfig
    )
    gateway: GatewayConfig = section("Agents as programs, which call the policy by an API.", GatewayConfig)
    speculative: SpeculativeConfig = section(
        "Speculative decoding: several tokens a pass of the model.", SpeculativeConfig
    )
    quantization: str | None = option(
        "fp8: the engines hold linear layers and experts in float8, quantised before they are sent; null: in dtype.",
        None,
        choices=("fp8",),
    )
    quantization_block_size: tuple[int, int] = option(
        "fp8: rows and columns of a block of weights that share a scale.", (128, 128), ge=1
    )
    sync_bucket_mb: int = option("MiB that a rank sends or receives of a weight sync at a time.", 256, ge=1)
    sync_transport: str = option(
        "How weights travel; auto: in shared memory within a machine (on GPUs: within a GPU), else over NCCL or gloo; p2p: over these "
        "between all devices; nixl: the same by NIXL (package nixl), over RDMA or TCP.",
        "auto",
        choices=SYNC_TRANSPORTS,
    )
    sync_skip_unchanged: bool = option("Send no weights that the engine holds already.", False)
    lora_sync: str | None = option(
        "Of a policy with adapters: adapters: the engines serve them beside the weights, which are sent once; merged: weights "
        "are sent with adapters in them; null: adapters where SGLang has them for the model, the weights stay in the engines, "
        "and none of the keys above need merged weights.",
        None,
        choices=LORA_SYNCS,
    )
    kv_cache_dtype: str | None = option(
        "GPUs: keys and values in the cache in float8 without scales, which holds twice as many tokens; null: in dtype. Log-probs then differ "
        "more from the trainer's (algorithm.rollout_correction).",
        None,
        choices=("fp8_e4m3", "fp8_e5m2"),
    )
    moe_runner_backend: str | None = option(
        "GPUs: the kernels of experts. deep_gemm: DeepGEMM's, on Hopper with quantization=fp8, or with moe_a2a_backend=deepep; null: deep_gemm "
        "with deepep, else triton. Others move an expert's rows, so that a sync would write into the wrong ones.",
        None,
        choices=MOE_RUNNERS,
        refused=_NO_OTHER_RUNNER,
    )
    moe_a2a_backend: str | None = option(
        "GPUs: how tokens reach the experts of other ranks. deepep: by DeepEP's kernels (package deep_ep), with expert_parallel_size = "
        "tensor_model_parallel_size; each rank then has the shared experts as a whole. null: all ranks have all tokens.",
        None,
        choices=("deepep",),
    )
    engine_kwargs: dict[str, Any] | None = option(
        "Further arguments of SGLang's server, by its own names (chunked_prefill_size: 8192); which may be set, and which are refused and why, "
        "is listed at the end of this page. Names and types are checked against the SGLang that is installed.",
        None,
    )
    resource_pool: str | None = option("Where the engines live; null: with the actor.", None)


@dataclass(frozen=True, kw_only=True)
class TeacherEngineConfig:
    """Engines that judge texts: SGLang loads the model of the section's folder, computes prompts alone, and its weights stay as they are."""

    tensor_model_parallel_size: int = option("Devices that share one engine's model.", 1, ge=1)
    expert_parallel_size: int = option("Groups of an engine's devices that share the experts.", 1, ge=1)
    nodes_per_engine: int | None = option(
        "Nodes that share an engine's devices evenly; null: as few as its devices need.", None, ge=1
    )
    num_engines: int | None = option("Engines; null: as many as the pool's devices hold.", None, ge=1)
    allow_unknown_version: bool = option(
        "Start an engine of a version that megarl was not tried with.", False
    )
    dtype: str | None = option(
        "Of the weights; null: bfloat16 on GPUs, float32 on CPUs.", None, choices=DTYPES
    )
    gpu_memory_utilization: float = option(
        "Part of a GPU's memory for weights and KV cache; logits of texts come out of the rest.",
        0.8,
        gt=0,
        le=1,
    )
    max_num_seqs: int = option("Texts that an engine computes at a time; the others wait.", 256, ge=1)
    max_total_tokens: int | None = option(
        "Tokens in an engine's KV cache; null: from the memory.", None, ge=1
    )
    deterministic: bool | None = option(
        "A text's log-probs do not depend on the texts beside it, as rollout.deterministic; null: on CPUs in float32 that can.",
        None,
    )
    start_timeout: float | None = option(
        "Seconds that the start of an engine may take; null: 300 on CPUs, 1800 on GPUs.", None, gt=0
    )
    request_timeout: float = option(
        "Seconds within which an engine that has texts must compute the next tokens of any.", 600.0, gt=0
    )
    max_restarts: int = option(
        "How many engines that died or hang are started anew in a run; they load the folder again, and judge their texts again. 0: the run "
        "ends with the first.",
        3,
        ge=0,
    )
    engine_kwargs: dict[str, Any] | None = option(
        "Further arguments of SGLang's server, as rollout.engine_kwargs.", None
    )
