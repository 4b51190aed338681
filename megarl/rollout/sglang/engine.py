"""SGLang as a rollout engine: one class for CPU and GPU.

Guarantees, each asserted by a test:

- nothing is served before a complete, verified version is held, nor after one that failed;
- each generation carries the version of its weights that SGLang itself reports;
- with adapters, every request is answered by weights and adapters together;
- an end token is part of its response, with its log-prob;
- requests of which SGLang would die (empty prompt, unknown token id) are refused here;
- the noise of a response depends on (seed, uid) only, so a resumed run repeats it, with drafted tokens, too;
- requests that run when the weights change or their memory is released are interrupted, and continue afterwards after their last
  token, with the new weights; each token's log-prob is that of the weights that chose it;
- with `deterministic` the bits of its tokens and log-probs do not depend on other requests, on the cache or on time;
- SGLang's processes end when this one does, however it ends;
- this process ends, with an error in its log, within a second of one of SGLang's.

The process that calls `start` is SGLang's parent; since it ends with SGLang, give each engine a process of its
own, with the environment of `sglang_environment` (before_import.py). All calls come from one thread that lives as long as the
engine, best the main one: only there can SGLang's signal that a start failed be caught and the start be
repeated.
"""

import asyncio
import json
import multiprocessing
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megarl.data.routing import RoutingShape
from megarl.models import read_model_config
from megarl.models.layers import is_mixture
from megarl.rollout.completions import Flight, Gate, NothingCompleted, as_completed
from megarl.rollout.engine import (
    AdapterConfig,
    EngineCapacity,
    EngineConfig,
    EngineCounts,
    EngineError,
    EngineHungError,
    Generation,
    NoValidWeightsError,
    SamplingParams,
    SyncReport,
    WeightSyncError,
)
from megarl.rollout.sglang import memory as engine_memory
from megarl.rollout.sglang.data_parallel import RequestGroups, flush_caches
from megarl.rollout.sglang.requests import CapturedRouting, Response, ask, check_prompt
from megarl.rollout.sglang.start import read_model, start_owned
from megarl.weight_sync import served_model
from megarl.weight_sync.receiver import LOADER, request_bytes, results_path

Answer = TypeVar("Answer")
FLUSH_RETRY_SECONDS = 0.02
MODEL = "target"  # SGLang's name of the model that checks a draft's tokens; its receiver reaches the draft
# The command to abort all requests is repeated, since it misses requests that had not reached SGLang's scheduler.
ABORT_RETRY_SECONDS = 0.5


def captured_routing(model_path: str) -> CapturedRouting:
    """How SGLang's answers name the experts of a model.

    Raises:
        ValueError: the model has no experts.
    """
    model = read_model_config(model_path)
    if model.moe is None:
        raise ValueError(f"{model_path}: the model has no experts, so an engine cannot return them")
    layers = tuple(layer for layer in range(model.num_layers) if is_mixture(model, layer))
    shape = RoutingShape(len(layers), model.moe.top_k, model.moe.num_experts)
    return CapturedRouting(model.num_layers, layers, shape)


class SGLangPart:
    """Owns the TP ranks of an engine on one of its nodes.

    Requests come to the first node's process (`SGLangEngine`) and from there, over the ranks' own group, to all TP ranks.
    So on another node there is nothing to call: this process starts its node's ranks, is their parent, and ends with them, like the
    first node's. If a rank is lost, the ranks of all nodes end, since they wait for each other.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Check the model. ValueError: it cannot be served; the message says which values would be right."""
        assert 0 <= config.node < config.nodes, config
        self.config, self._model = config, read_model(config)
        self._engine: Any = None
        self._closing = threading.Event()

    def start(self) -> None:
        """Start the node's processes; returns when the processes of all nodes are up.

        Raises:
            ValueError: the model or the configuration cannot be served; says which values would be right.
            EngineError: the processes did not come up.
        """
        self._engine = start_owned(self.config, self._model, self._closing)

    def pids(self) -> list[int]:
        """The process ids of the node's ranks, without the calling process."""
        return list(self._engine.get_all_child_pids())

    def shutdown(self) -> None:
        """End all of the node's processes; returns when they are gone, and their memory is free.

        SGLang waits for the first thread of a process to end. The process's other threads may still hold memory then, also a GPU's: all
        41 GiB of an engine on an H100 (0.5.21, `_still_holding_resources`).
        """
        self._closing.set()
        if self._engine is not None:
            pids = self.pids()
            children = [child for child in multiprocessing.active_children() if child.pid in pids]
            self._engine.shutdown()
            self._engine = None
            for child in children:
                child.join()


class SGLangEngine(SGLangPart):
    """One copy of the policy, in a layout of its own, that answers prompts.

    It takes new weights in versions: `begin_update`, `receive_weights`, `finish_update`. Between the first and the last of these calls
    it holds no valid weights, and `generate` refuses, as it does before the first version and after a version that failed.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.node == 0, "the other nodes have a SGLangPart each"
        super().__init__(config)
        self._version: int | None = None
        self._released: set[str] = set()
        self._update: _Update | None = None
        self._inboxes: list[Path] = []
        self._session = self._session_held = ""
        self._last_answer = 0.0
        self._gate = Gate()  # holds a request while SGLang works on it
        self._groups = RequestGroups(config.attention_data_parallel_size)
        self._routing = captured_routing(config.model_path) if config.return_routed_experts else None
        self._ends: frozenset[int] = frozenset()
        self._counts = EngineCounts()

    @property
    def weight_version(self) -> int | None:
        """The version that is served; None: none is, and `generate` refuses."""
        return self._version

    @property
    def routing(self) -> RoutingShape | None:
        """The shape of the experts that generations have; None: they have none."""
        return None if self._routing is None else self._routing.shape

    @property
    def keeps(self) -> bool:
        """Whether generations may have the tokens that their tokens were drawn from."""
        return self.config.most_kept is not None

    @property
    def last_sign(self) -> float:
        """When the engine last computed tokens, or answered a request or a piece of one, by `time.monotonic`."""
        return max(self._last_answer, self._engine.heartbeat.last())

    @property
    def waiting(self) -> int:
        """Requests that SGLang has been sent and does not decode yet, by its last step: they wait for a place, or their prompts are computed."""
        return max(0, self._gate.inside - self._engine.heartbeat.running())

    @property
    def num_requests(self) -> int:
        """Requests that SGLang has been sent and has not answered."""
        return self._gate.inside

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its response."""
        return self.config.context_length or self._engine.tokenizer_manager.context_len

    @property
    def longest_input(self) -> int:
        """Most tokens of an input: SGLang (0.5.21) refuses inputs that reach the last tokens of its context or cache."""
        return self._engine.tokenizer_manager.max_req_input_len - 1

    def capacity(self) -> EngineCapacity:
        """How much it computes at a time."""
        groups = self.config.attention_data_parallel_size
        return EngineCapacity(self.config.max_num_seqs, groups * self._engine.cache_tokens)

    def start(self) -> None:
        super().start()
        # On a CPU each flush of the cache collects garbage: half a second over all imported objects, unless they are
        # left out for good (0.5.21).
        self._call(self._engine.tokenizer_manager.freeze_gc(), "freeze_gc")
        ends = self._engine.tokenizer_manager.model_config.hf_eos_token_id or ()
        self._ends = frozenset([*ends, *self.config.stop_token_ids])
        if self.config.adapters is not None:
            self._load_adapter(self.config.adapters)
        if self.config.load_format == "auto":
            self._version = 0
            self._set_version(0)

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], uids: Sequence[str], sampling: SamplingParams
    ) -> list[Generation]:
        """One response for each prompt, in the prompts' order; an end token is part of its response.

        Raises:
            NoValidWeightsError: no verified version is held.
            ValueError: an empty prompt, one that leaves no room in the context, an unknown token id.
            EngineError: the engine gave no sign of life (`last_sign`) for `request_timeout`.
        """
        self._require_version()
        if len(prompt_ids) != len(uids) or len(set(uids)) != len(uids):
            raise ValueError(f"{len(prompt_ids)} prompts need as many different uids, got {len(set(uids))}")
        requests = list(zip(uids, prompt_ids, strict=True))
        for uid, ids in requests:
            self.check_request(uid, ids, sampling)
        answers = self.as_completed([self.answer(uid, ids, sampling) for uid, ids in requests])
        by_uid = {generation.uid: generation for part in answers for generation in part}
        return [by_uid[uid] for uid in uids]

    def check_request(self, uid: str, ids: Sequence[int], sampling: SamplingParams) -> None:
        """Check one request; raises the exceptions of `generate`."""
        self._require_version()
        check_prompt(uid, ids, sampling.max_new_tokens, self.context_length, self._model["vocab_size"])
        if sampling.has_penalties and self.config.speculation is not None:
            raise ValueError(f"{uid}: penalties and drafted tokens: SGLang computes penalties once a pass")
        if sampling.return_kept and self.config.speculation is not None:
            raise ValueError(f"{uid}: return_kept and drafted tokens: SGLang returns no kept tokens of these")

    async def answer(
        self,
        uid: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        experts_from: int = 0,
        heard: Callable[[Sequence[int]], None] | None = None,
    ) -> Generation:
        """One response, for coroutines that `as_completed`, a `flight` or `run` runs. A request whose coroutine is cancelled is aborted.

        Args:
            experts_from: the first token of the prompt whose experts the generation has, if the engine returns them.
            heard: called with tokens of the response as they come. Not called where an interrupted response may begin anew: with penalties,
                or where the engine returns experts or kept tokens.
        """
        routing = self._routing if sampling.return_experts else None
        if sampling.has_penalties or sampling.return_kept or routing is not None:
            heard = None
        await self._gate.opened()
        self.check_request(uid, prompt_ids, sampling)
        room = self.longest_input - len(prompt_ids)
        response = Response(uid, sampling, self._ends, room, routing=routing, experts_start=experts_from)
        with self._groups.joined(uid, prompt_ids) as group:
            while True:
                async with self._gate.passed():
                    answer = await ask(
                        self._engine.tokenizer_manager,
                        [*prompt_ids, *response.ids],
                        response.rest,
                        uid,
                        self.config.stop_token_ids,
                        served_model.ADAPTER_NAME if self.config.adapters is not None else None,
                        response.experts_from,
                        group,
                        heard,
                    )
                    self._last_answer = time.monotonic()
                    self._counts.count(answer)
                    generation = response.add(answer, self._version, interrupted=not self._gate.is_open)
                if generation is not None:
                    return generation

    def take_counts(self) -> EngineCounts:
        """The counts of requests since the last call."""
        taken, self._counts = self._counts, EngineCounts()
        return taken

    def run(self, coroutine: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine, which may call `answer`, to its end."""
        return self._engine.loop.run_until_complete(coroutine)

    def flight(self) -> Flight:
        """A `Flight` for coroutines that call `answer` and continue from call to call. While the weights change, or memory is released,
        no request runs; afterwards requests continue by themselves.
        """
        return Flight(self._engine.loop)

    def interrupt(self) -> None:
        """Interrupt all requests; they keep their tokens and continue after the next `finish_update` or `resume_memory`.

        Raises:
            EngineHungError: it was not done within `request_timeout`.
        """
        self._gate.close()
        deadline = time.monotonic() + self.config.request_timeout
        while self._gate.inside:
            self._engine.tokenizer_manager.abort_request(abort_all=True)
            if (
                not self._call(self._gate.left(ABORT_RETRY_SECONDS), "abort_request")
                and time.monotonic() > deadline
            ):
                self._version = None
                raise EngineHungError(
                    f"SGLang did not abort {self._gate.inside} requests within {self.config.request_timeout} s"
                )

    def go_on(self) -> None:
        """Let requests that `interrupt` interrupted continue, if there are weights and a cache."""
        if self._version is not None and "kv_cache" not in self._released:
            self._gate.open()

    def as_completed(self, coroutines: Sequence[Coroutine[Any, Any, Answer]]) -> Iterator[list[Answer]]:
        """Run coroutines together on the engine's loop; yields, each time, the results of the coroutines that ended since the last.

        Raises:
            EngineHungError: none ended, and the engine gave no sign of life (`last_sign`), for `request_timeout`.
        """
        timeout = self.config.request_timeout
        try:
            # A long answer, or a trajectory of several turns, may take longer than the timeout: each sign of life restarts it.
            yield from as_completed(self._engine.loop, coroutines, timeout, lambda: self.last_sign)
        except NothingCompleted:
            self._version = None
            raise EngineHungError(
                f"SGLang has neither computed a step nor answered a request within request_timeout={timeout} s"
            ) from None

    def begin_update(self, version: int) -> int | None:
        """Announce a version; from here on the engine holds no valid weights.

        Returns: the version that it held; None: it holds none, or serves adapters and the version came over another
            connection.
        """
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if "weights" in self._released:
            raise EngineError(
                f"version {version} came while the weights' memory was released: resume it first"
            )
        if self._update is not None:
            raise EngineError(f"version {version} came before version {self._update.version} was finished")
        self.interrupt()
        held = self._version
        if self.config.adapters is not None and self._session_held != self._session:
            held = None  # over a new connection the first version has all weights
        self._version, self._update = None, _Update(version, held)
        self._control("begin_weight_update", BeginWeightUpdateReqInput(selector=MODEL))
        return held

    def connect(self, inboxes: Sequence[Path]) -> None:
        """Set the source of weights: one `InboxFile` for each TP rank, on the node of that rank. Ends an earlier connection."""
        assert len(inboxes) == self.config.tensor_parallel_size, (len(inboxes), self.config)
        if self._update is not None:  # a version that ended with the connection before, on the trainer's side
            self._close_update()
        self._inboxes, self._session = list(inboxes), secrets.token_hex(8)

    def receive_weights(self, complete: bool = True) -> None:
        """Receive the version, which the trainer ranks send at the same time; returns when it is in place.

        Args:
            complete: false: the weights that training does not change are not sent, and stay as they are.

        Raises:
            WeightSyncError: a slice did not arrive as it was sent, a trainer rank is gone, or none was ever connected.
                The update is over.
        """
        update = self._require_update()
        if not self._inboxes:
            self._close_update()  # as after any version that did not arrive: the next one may begin
            raise WeightSyncError(f"version {update.version}: no trainer is connected, call connect first")
        if not complete and update.held is None:
            self._close_update()
            raise WeightSyncError(
                f"version {update.version} came without the weights that training leaves alone, and the engine holds none"
            )
        path = results_path(self._inboxes[0])
        path.unlink(missing_ok=True)
        self._load(update.version, complete)
        results = json.loads(path.read_text())
        errors = [result["error"] for result in results if not result["ok"]]
        if errors:
            self._close_update()
            raise WeightSyncError(f"weights of version {update.version} refused: " + "; ".join(errors))
        update.results = results

    def finish_update(self) -> SyncReport:
        """Drop the cache of the old weights, and serve the version.

        Raises:
            WeightSyncError: the version did not arrive.
        """
        update = self._require_update()
        self._close_update()
        if not update.results:
            raise WeightSyncError(f"version {update.version} did not come")
        self.flush_cache()  # its keys and values come from the old weights
        self._set_version(update.version)
        self._version, self._session_held = update.version, self._session
        self.go_on()
        return update.report()

    def release_memory(self, parts: Sequence[str]) -> None:
        """Free the device memory of "weights", "kv_cache"; released weights have to be synced again.

        Raises:
            EngineError: it was started without `enable_memory_saver`; or the GPU's free memory did not grow by as much as was
                released.
        """
        if not self.config.enable_memory_saver:
            raise EngineError("memory can be released in an engine that was started with enable_memory_saver")
        # SGLang dies of a part that is released twice, and of a release while it counts a request as running.
        assert set(parts) <= {"weights", "kv_cache"} - self._released, (parts, self._released)
        self.interrupt()
        if "weights" in parts:
            self._version = None
        self.flush_cache()
        before = self.memory() if self.config.device == "cuda" else []
        self._released |= set(parts)
        self._memory("release", parts)
        if before:
            problem = engine_memory.unreleased(before, self.memory(), parts)
            if problem is not None:
                raise EngineError(problem)
        self.go_on()

    def resume_memory(self, parts: Sequence[str]) -> None:
        """Take the memory back, in this order: the weights' memory, a sync of the weights, the KV cache's memory.

        Raises:
            EngineError: the KV cache is asked for before a verified version of the weights is held.
        """
        assert set(parts) <= self._released, (parts, self._released)
        if "kv_cache" in parts and self._version is None:
            raise EngineError("the KV cache comes after the weights: sync a version first")
        self._memory("resume", parts)
        self._released -= set(parts)
        self.go_on()

    def memory(self) -> list[dict[str, int]]:
        """By TP rank, the device bytes of "weights", "kv_cache" and "sync_buffers" by their tensors; on a GPU also "device_used", used by
        all processes, and "process_used", used by the rank's process, where the driver tells.
        """
        states = self._call(self._engine.tokenizer_manager.get_internal_state(), "get_internal_state")
        return states[0][engine_memory.KEY]

    def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        # SGLang answers a request a moment before it counts it as done, so the flush is repeated until no request counts as running.
        # Its own waiting (timeout_s) goes on only when its idle sleep of a second ends (0.5.21).
        deadline = time.monotonic() + self.config.request_timeout
        while True:
            answers = self._call(flush_caches(self._engine.tokenizer_manager), "flush_cache")
            if all(answer.success for answer in answers):
                self._groups.forget()
                return
            if time.monotonic() > deadline:
                raise EngineHungError(
                    f"SGLang did not flush its cache: {[answer.message for answer in answers]}"
                )
            time.sleep(FLUSH_RETRY_SECONDS)

    def shutdown(self) -> None:
        self._version = None
        super().shutdown()

    def _require_version(self) -> int:
        if self._version is None:
            raise NoValidWeightsError(
                "the engine holds no complete, verified version of the weights: it serves nothing before a sync"
            )
        if "kv_cache" in self._released:
            raise EngineError("the KV cache's memory is released: resume it first")
        return self._version

    def _require_update(self) -> "_Update":
        if self._update is None:
            raise EngineError("no update was begun, or it has failed: call begin_update first")
        return self._update

    def _load_adapter(self, served: AdapterConfig) -> None:
        """Give SGLang the adapter without values, whose slot the syncs write into."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        nothing = [MultiprocessingSerializer.serialize({}) for _ in range(self.config.tensor_parallel_size)]
        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=served_model.ADAPTER_NAME,
            config_dict=served_model.empty_adapter(served),
            serialized_named_tensors=nothing,
        )
        loading = self._engine.tokenizer_manager.load_lora_adapter_from_tensors(request, None)
        answer = self._call(loading, "load_lora_adapter_from_tensors")
        if not answer.success:
            raise EngineError(f"SGLang refused the adapter: {answer.error_message}")

    def _load(self, version: int, complete: bool) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        to_rank = request_bytes(version, self._session, self._inboxes, complete)
        loading = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[to_rank] * len(self._inboxes),
            load_format=LOADER,
            flush_cache=False,
            selector=MODEL,
        )
        self._control("update_weights_from_tensor", loading)

    def _close_update(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._update = None
        self._control("end_weight_update", EndWeightUpdateReqInput())

    def _set_version(self, version: int) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=str(version), abort_all_requests=False)
        self._call(self._engine.tokenizer_manager.update_weight_version(request), "update_weight_version")

    def _control(self, method: str, request: object) -> None:
        success, message = self._call(getattr(self._engine.tokenizer_manager, method)(request, None), method)
        if not success:
            raise EngineError(f"SGLang refused {method}: {message}")

    def _memory(self, action: str, tags: Sequence[str]) -> None:
        from sglang.srt.managers import io_struct

        request = getattr(io_struct, f"{action.title()}MemoryOccupationReqInput")(tags=list(tags))
        method = getattr(self._engine.tokenizer_manager, f"{action}_memory_occupation")
        self._call(method(request, None), f"{action}_memory_occupation")

    def _call(self, awaitable: Awaitable[Answer], what: str) -> Answer:
        """Wait for SGLang's answer.

        Raises:
            EngineHungError: none came within `request_timeout`.
        """
        timeout = self.config.request_timeout
        try:
            return self._engine.loop.run_until_complete(asyncio.wait_for(awaitable, timeout))
        except TimeoutError:
            self._version = None
            raise EngineHungError(
                f"SGLang did not answer {what} within request_timeout={timeout} s"
            ) from None


class _Update:
    """An update in progress: its version, and the receivers' answers by TP rank."""

    def __init__(self, version: int, held: int | None) -> None:
        self.version, self.held = version, held
        self.results: list[dict] = []
        self._begun = time.perf_counter()

    def report(self) -> SyncReport:
        def by_rank(name: str) -> tuple[int, ...]:
            return tuple(result[name] for result in self.results)

        phases = [result["seconds"] for result in self.results]
        return SyncReport(
            self.version,
            bytes_written=by_rank("bytes_written"),
            bytes_kept=by_rank("bytes_kept"),
            bytes_draft=by_rank("bytes_draft"),
            buffer_bytes=by_rank("buffer_bytes"),
            phase_seconds={name: tuple(rank[name] for rank in phases) for name in phases[0]},
            seconds=time.perf_counter() - self._begun,
        )
