"""The interface of rollout engines, whatever serves the tokens.

An engine holds a copy of the policy in its own layout. It answers prompts with trajectories, and takes new
weights in versions: `begin_update`, `receive_weights`, `finish_update`. Between the first
and the last of these calls it holds no valid weights, and `generate` refuses; so it does before the first version
and after a version that failed.
"""

from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megarl.data.trajectories import Generation
from megarl.rollout.completions import Flight

__all__ = [
    "AdapterConfig",
    "EngineConfig",
    "EngineError",
    "Generation",
    "NoValidWeightsError",
    "RolloutEngine",
    "SamplingParams",
    "SyncReport",
    "WeightSyncError",
]
Result = TypeVar("Result")


class EngineError(RuntimeError):
    """The engine did not start, did not answer in time, or refused a call."""


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
        layers: the last parts of Hugging Face's names of the layers that may have one ("q_proj").
    """

    rank: int
    scaling: float
    layers: tuple[str, ...]


@dataclass(frozen=True)
class EngineConfig:
    """How one engine is started.

    Attributes:
        model_path: Hugging Face folder; with load_format "dummy" only its configs are read.
        expert_parallel_size: parts that the experts of a mixture are dealt to; it divides `tensor_parallel_size`,
            and the ranks of a part cut each of its experts.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16" or "float16"; log-probs equal the trainer's to rounding in float32 only.
        fp8_block: rows and columns of a block of weights that share a scale, of an engine that holds its linear layers
            and experts in float8; None: it holds them in `dtype` (with load_format "auto": as the folder has them).
        load_format: "dummy": weights come by sync, nothing is served before; "auto": the folder's weights
            are served as version 0.
        context_length: most tokens of prompt + response; None: the model's own limit.
        max_num_seqs: most requests that run at once; the others wait.
        max_total_tokens: tokens in the KV cache; None: on a GPU from `gpu_memory_utilization`, on a CPU enough
            for `max_num_seqs` requests of the full context, at most 65536.
        enable_memory_saver: whether the memory of weights and KV cache can be released.
        gpu_memory_utilization: part of the GPU's memory for weights and KV cache.
        first_device: index of the first visible GPU to use.
        nodes: processes that own the engine, each on a node, with equally many TP ranks; they start at the same time.
        node: which of them this is; the first answers for the engine.
        address: "host:port" of the first one's node, at which all TP ranks meet; needed with several nodes.
        start_timeout: seconds for one start; a start that fails or takes longer is repeated once.
        allow_unknown_version: start an SGLang of a version that megarl was not tried with.
        stop_token_ids: tokens that end a response, and are part of it, besides the model's end tokens.
        adapters: adapters that it serves on top of unmerged weights; None: none.
        deterministic: the bits of a response depend on weights, prompt and seed only, neither on other requests nor on the contents of
            the cache. On a CPU in float32 only.
        request_timeout: seconds within which an engine with requests must compute its next tokens, and calls end.
    """

    model_path: str
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    fp8_block: tuple[int, int] | None = None
    load_format: str = "dummy"
    context_length: int | None = None
    max_num_seqs: int = 256
    max_total_tokens: int | None = None
    enable_memory_saver: bool = False
    gpu_memory_utilization: float = 0.5
    first_device: int = 0
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

    @property
    def ranks_per_node(self) -> int:
        """TP ranks of each of its processes."""
        return self.tensor_parallel_size // self.nodes


@dataclass(frozen=True)
class SamplingParams:
    """How responses are sampled.

    The noise of a response depends on (seed, uid) and the token's position only. A caller that asks for the
    same uid again, in a later epoch say, gives another seed for new noise.

    Attributes:
        temperature: 0 is greedy.
        top_k: -1: all tokens.
        min_p: tokens of less than this part of the most probable one's probability are left out.
        repetition_penalty: divides the logits (multiplies negative ones) of tokens that occurred in the response (in SGLang not those of
            the prompt).
        frequency_penalty, presence_penalty: subtracted from a token's logit for each of its occurrences in the response, and once if
            there are any.
        max_new_tokens: most tokens of a response, its end token included.

    A generation's log-probs are those of the distribution after temperature and penalties, and before top_p, top_k
    and min_p cut it (temperature 0: at temperature 1).
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

    @property
    def has_penalties(self) -> bool:
        """Whether a token's probability depends on earlier tokens of the response."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class SyncReport:
    """The figures of one weight update.

    Attributes:
        bytes_written: by TP rank, bytes written into the engine's parameters.
        bytes_kept: by TP rank, bytes that had not changed since the last version and were not sent.
        buffer_bytes: by TP rank, the receiver's memory for packets.
        phase_seconds: by phase ("wait" for packets, "write", "verify"), by TP rank, seconds in the receiver.
        seconds: from `begin_update` to `finish_update`, in the engine's process.
    """

    version: int
    bytes_written: tuple[int, ...]
    bytes_kept: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    phase_seconds: dict[str, tuple[float, ...]]
    seconds: float


class RolloutEngine(Protocol):
    """One copy of the policy that answers prompts."""

    @property
    def weight_version(self) -> int | None:
        """The version that is served; None: none is, and `generate` refuses."""

    @property
    def last_sign(self) -> float:
        """When the engine last computed tokens, or answered a request or a piece of one, by `time.monotonic`."""

    def start(self) -> None:
        """Start the engine's processes.

        Raises:
            ValueError: the model or the configuration cannot be served; says which values would be right.
            EngineError: the processes did not come up.
        """

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], uids: Sequence[str], sampling: SamplingParams
    ) -> list[Generation]:
        """One response for each prompt, in the prompts' order; an end token is part of its response.

        Raises:
            NoValidWeightsError: no verified version is held.
            ValueError: an empty prompt, one that leaves no room in the context, an unknown token id.
            EngineError: the engine gave no sign of life (`last_sign`) for `request_timeout`.
        """

    def generate_stream(
        self,
        prompt_ids: Sequence[Sequence[int]],
        uids: Sequence[str],
        sampling: SamplingParams,
        apart: float = 0.0,
    ) -> Iterator[list[Generation]]:
        """As `generate`, but yields responses as they finish: each time all that finished since the last time, at least one. `apart` as in
        `as_completed`.

        All requests are in flight at once; those that are when the iterator is closed are aborted.
        """

    def check_request(self, uid: str, ids: Sequence[int], sampling: SamplingParams) -> None:
        """Check one request; raises the exceptions of `generate`."""

    async def answer(self, uid: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """One response, for coroutines that `as_completed` runs."""

    def as_completed(
        self, coroutines: Sequence[Coroutine[Any, Any, Result]], apart: float = 0.0
    ) -> Iterator[list[Result]]:
        """Run coroutines together on the engine's loop; yields each time the results of all that ended since the last time.

        Args:
            apart: least seconds between two lists; the last list comes as soon as all have ended.

        Raises:
            EngineError: none ended, and the engine gave no sign of life (`last_sign`), for `request_timeout`.
        """

    def flight(self) -> Flight:
        """A `Flight` for coroutines that call `answer` and continue from call to call. While the weights change, or memory is released,
        no request runs; afterwards requests continue by themselves.
        """

    def interrupt(self) -> None:
        """Interrupt all requests; they keep their tokens and continue after the next `finish_update` or `resume_memory`.

        Raises:
            EngineError: it was not done within `request_timeout`; the engine is of no further use.
        """

    def connect(self, inboxes: Sequence[Path]) -> None:
        """Set the source of weights: one `InboxFile` for each TP rank, on the node of that rank. Ends an earlier connection."""

    def begin_update(self, version: int) -> int | None:
        """Announce a version; from here on the engine holds no valid weights.

        Returns: the version that it held; None: it holds none, or serves adapters and the version came over another
            connection.
        """

    def receive_weights(self, complete: bool = True) -> None:
        """Receive the version, which the trainer ranks send at the same time; returns when it is in place.

        Args:
            complete: false: the weights that training does not change are not sent, and stay as they are.

        Raises:
            WeightSyncError: a slice did not arrive as it was sent, a trainer rank is gone, or none was ever connected.
                The update is over.
        """

    def finish_update(self) -> SyncReport:
        """Drop the cache of the old weights, and serve the version.

        Raises:
            WeightSyncError: the version did not arrive.
        """

    def release_memory(self, tags: Sequence[str]) -> None:
        """Free the device memory of "weights", "kv_cache"; released weights have to be synced again.

        Raises:
            EngineError: it was started without `enable_memory_saver`; or the GPU's free memory did not grow by what was
                released.
        """

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Take the memory back: that of the weights, then their sync, then that of the KV cache.

        Raises:
            EngineError: the KV cache is asked for before a verified version of the weights is held.
        """

    def memory(self) -> list[dict[str, int]]:
        """By TP rank, the device bytes of "weights", "kv_cache" and "sync_buffers" by their tensors; on a GPU also "device_used", used by
        all processes, and "process_used", used by the rank's process, where the driver tells.
        """

    def flush_cache(self) -> None:
        """Forget all cached prefixes."""

    def pids(self) -> list[int]:
        """The engine's processes, the calling one not among them."""

    def shutdown(self) -> None:
        """End all of the engine's processes; returns when they are gone."""
