"""A rollout engine from outside: its configuration, its sampling, the figures of its weight updates, its errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.data.trajectories import Generation as Generation  # the result of a request


class EngineError(RuntimeError):
    """The engine did not start, did not answer in time, or refused a call."""


class EngineHungError(EngineError):
    """The engine did not answer in time, and is of no further use."""


class NoValidWeightsError(EngineError):
    """A request came while the engine held no complete, verified version of the weights."""


class WeightSyncError(EngineError):
    """Weights did not arrive as they were sent. Names the tensor and the engine's TP rank."""


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters that an engine serves on top of the weights.

    Attributes:
        rank: rank of each adapter.
        scaling: factor of their outputs.
        layers: last parts of the Hugging Face names of the layers that may have an adapter ("q_proj").
    """

    rank: int
    scaling: float
    layers: tuple[str, ...]


@dataclass(frozen=True)
class SpeculationConfig:
    """How tokens are drafted; the model then checks several of them at a time.

    Attributes:
        algorithm: "ngram": from what followed the same tokens earlier; "mtp": by the model's own layers for further tokens; "eagle3": by
            a draft model.
        num_draft_tokens: drafted tokens of a request in a pass, one after the other.
        draft_path: Hugging Face folder of the draft model; None: there is none.
    """

    algorithm: str
    num_draft_tokens: int
    draft_path: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """How one engine is started.

    Attributes:
        model_path: Hugging Face folder; with load_format "dummy" only its configs are read.
        expert_parallel_size: groups of ranks that share out a mixture's experts; it divides `tensor_parallel_size`,
            and the ranks of a group cut each of its experts.
        attention_data_parallel_size: groups of ranks that each compute the attention of requests of their own, and have the keys and
            values of these; it divides `tensor_parallel_size`, and the ranks of a group cut the heads.
        data_parallel_lm_head: whether each group has the whole output layer; if not, all ranks cut it.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16" or "float16"; log-probs equal the trainer's to rounding in float32 only.
        fp8_block: rows and columns of a block of weights that share a scale, of an engine that holds its linear layers
            and experts in float8; None: it holds them in `dtype` (with load_format "auto": as the folder has them).
        load_format: "dummy": weights come by sync, nothing is served before; "auto": the folder's weights
            are served as version 0.
        context_length: most tokens of prompt + response; None: the model's own limit.
        max_num_seqs: most requests that run at once; the others wait.
        max_total_tokens: tokens in the KV cache; None: on a GPU from `gpu_memory_utilization`, on a CPU enough
            for `max_num_seqs` requests of the full context, at most 65536. Data parallel groups have equal parts of them.
        enable_memory_saver: whether the memory of weights and KV cache can be released.
        gpu_memory_utilization: part of the GPU's memory for weights and KV cache.
        nodes: processes that own the engine, each on a node, with equally many TP ranks; they start at the same time.
        node: this process's number among them; the first one answers for the engine.
        address: "host:port" on the first process's node, at which all TP ranks meet; needed with several nodes.
        start_timeout: seconds for one start; a start that fails or takes longer is repeated once.
        allow_unknown_version: start an SGLang of a version that megarl was not tried with.
        stop_token_ids: tokens that end a response, and are part of it, besides the model's end tokens.
        adapters: adapters that it serves on top of unmerged weights; None: none.
        deterministic: the bits of a response depend on weights, prompt and seed only, neither on other requests nor on the contents of
            the cache. On a CPU: in float32 only.
        request_timeout: seconds within which an engine with requests must compute its next tokens, and calls end.
        return_routed_experts: whether answers have the experts that each token was routed to (`Generation.routed_experts`).
        most_kept: the most tokens that a request with `SamplingParams.return_kept` draws from; None: there are no such requests.
        kv_cache_dtype: type of keys and values on a GPU: "fp8_e4m3" or "fp8_e5m2"; None: `dtype`.
        moe_runner_backend: kernels of experts on a GPU: "triton" or "deep_gemm"; None: deep_gemm with DeepEP, else triton.
        moe_a2a_backend: how tokens reach experts of other ranks on a GPU: "deepep"; None: every rank has all tokens.
        speculation: how tokens are drafted; None: each token takes a pass of the model.
        judging_temperature: temperature of the log-probs of texts that the engine judges (`sglang.judging`); None: it generates.
        arguments: further arguments of SGLang's server: those in `rollout.engine_kwargs`, which `engine_option_problems` does not refuse.
    """

    model_path: str
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    data_parallel_lm_head: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    fp8_block: tuple[int, int] | None = None
    load_format: str = "dummy"
    context_length: int | None = None
    max_num_seqs: int = 256
    max_total_tokens: int | None = None
    enable_memory_saver: bool = False
    gpu_memory_utilization: float = 0.5
    nodes: int = 1
    node: int = 0
    address: str | None = None
    seed: int = 1
    start_timeout: float = 300.0
    allow_unknown_version: bool = False
    request_timeout: float = 600.0
    stop_token_ids: tuple[int, ...] = ()
    adapters: AdapterConfig | None = None
    deterministic: bool = False
    return_routed_experts: bool = False
    most_kept: int | None = None
    kv_cache_dtype: str | None = None
    moe_runner_backend: str | None = None
    moe_a2a_backend: str | None = None
    speculation: SpeculationConfig | None = None
    judging_temperature: float | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks_per_node(self) -> int:
        """TP ranks of each of the engine's processes."""
        return self.tensor_parallel_size // self.nodes


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled.

    The noise of a response depends on (seed, uid) and the token's position only. A caller that asks for the
    same uid again, in a later epoch say, gives another seed for new noise.

    Attributes:
        temperature: 0 is greedy.
        top_k: -1: all tokens.
        min_p: tokens whose probability is less than this part of the most probable token's are left out.
        repetition_penalty: divides the logits (multiplies negative ones) of tokens that occurred in the response (in SGLang the prompt's
            tokens do not count).
        frequency_penalty, presence_penalty: subtracted from a token's logit for each of its occurrences in the response, and once if
            there are any.
        max_new_tokens: most tokens of a response, its end token included.
        return_kept: whether the generation has the tokens that each token was drawn from (`Generation.kept`). They are MOST_KEPT at most,
            the most probable ones.
        return_experts: whether the generation has its tokens' experts, if the engine returns them (`EngineConfig.return_routed_experts`).

    A generation's log-probs are those of the distribution after temperature and penalties, and before top_p, top_k
    and min_p cut it (temperature 0: at temperature 1); with `return_kept`, after these cuts, among the kept tokens alone.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    max_new_tokens: int = 128
    seed: int = 1
    ignore_eos: bool = False
    return_kept: bool = False
    return_experts: bool = True

    @property
    def has_penalties(self) -> bool:
        """Whether a token's probability depends on earlier tokens of the response."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


@dataclass
class EngineCounts:
    """Token counts of an engine's requests: of prompts, of the cache, and of drafting.

    Attributes:
        prompt_tokens, cached_tokens: tokens of all prompts, and how many were found in the cache; a turn's prompt is everything before the turn.
        passes: passes of the model that checked a request's drafted tokens, over all requests.
        tokens: tokens that these passes gave: the accepted drafted tokens, and one after them in each pass.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    passes: int = 0
    tokens: int = 0

    def count(self, answer: Mapping[str, Any]) -> None:
        """Count an answer of SGLang's. The first token of each comes from the prompt's pass."""
        told = answer["meta_info"]
        # SGLang reports neither number for a request that was aborted before it had a place.
        self.prompt_tokens += told.get("prompt_tokens", 0)
        self.cached_tokens += told.get("cached_tokens", 0)
        passes = told.get("spec_verify_ct", 0)
        if passes:
            self.passes += passes
            self.tokens += len(answer["output_ids"]) - 1

    def __add__(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.passes + other.passes,
            self.tokens + other.tokens,
        )

    def metrics(self) -> dict[str, float]:
        """perf/prefix_hits: the part of prompt tokens that was found in the cache; rollout/accept_length: tokens a pass. A figure is left
        out where there is nothing to divide by."""
        found = {}
        if self.prompt_tokens:
            found["perf/prefix_hits"] = self.cached_tokens / self.prompt_tokens
        if self.passes:
            found["rollout/accept_length"] = self.tokens / self.passes
        return found


@dataclass(frozen=True)
class EngineCapacity:
    """How much an engine computes at a time: `requests`, and prompt and response `tokens` in its KV cache."""

    requests: int
    tokens: int


@dataclass(frozen=True)
class SyncReport:
    """The figures of one weight update.

    Attributes:
        bytes_written: by TP rank, bytes written into the engine's parameters.
        bytes_kept: by TP rank, bytes that had not changed since the last version and were not sent.
        bytes_draft: by TP rank, bytes of a draft that are not sent and are still as they were loaded; 0: there is none.
        buffer_bytes: by TP rank, the receiver's memory for packets.
        phase_seconds: by phase ("wait" for packets, "write", "verify"), by TP rank, seconds in the receiver.
        seconds: from `begin_update` to `finish_update`, in the engine's process.
    """

    version: int
    bytes_written: tuple[int, ...]
    bytes_kept: tuple[int, ...]
    bytes_draft: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    phase_seconds: dict[str, tuple[float, ...]]
    seconds: float
