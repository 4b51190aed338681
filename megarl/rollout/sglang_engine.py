"""SGLang as a rollout engine: one class for CPU and GPU.

Guarantees, each asserted by a test:

- nothing is served before a whole, verified version is held, nor after one that failed;
- each generation carries the version that SGLang itself says it was served by;
- an end token is part of its response, with its log-prob;
- requests that SGLang answers by dying (empty prompt, unknown token id) are refused here;
- the noise of a response depends on (seed, uid) only, so a resumed run repeats it;
- SGLang's processes end when this one does, however it ends.

- this process ends, with an error in its log, within a second of one of SGLang's.

The process that calls `start` is SGLang's parent; since it ends with SGLang, give each engine a process of its
own, with the environment of `sglang_environment`. All calls come from one thread that lives as long as the
engine, best the main one: only there can SGLang's signal that a start failed be caught and the start be
repeated.
"""

import asyncio
import atexit
import hashlib
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megarl.rollout.engine import (
    EngineConfig,
    EngineError,
    Generation,
    NoValidWeightsError,
    SamplingParams,
    SyncReport,
    WeightSyncError,
)
from megarl.rollout.receiver import LOADER, request_tensor, result_path

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
CPU_CACHE_TOKENS = 65536
DUMMY, AUTO = "dummy", "auto"


def sglang_environment(device: str, tensor_parallel_size: int, threads: int = 1) -> dict[str, str]:
    """Environment variables that an engine's process must be started with, before it imports torch.

    Args:
        threads: CPU threads of each TP rank.
    """
    if device != "cpu":
        return {}
    groups = "|".join(str(rank) for rank in range(tensor_parallel_size))
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": groups,  # one group a rank; only SGLang's compiled kernels would bind
        "OMP_NUM_THREADS": str(threads),
        "TORCH_COMPILE_DISABLE": "1",  # no compiler needed, and no minutes of compiling
        "GLOO_SOCKET_IFNAME": "lo",
    }


def request_seed(seed: int, uid: str) -> int:
    """The seed of one response: 63 bits of (seed, uid)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{uid}".encode()).digest()[:8]) >> 1


class SGLangEngine:
    """See `RolloutEngine`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._model = _read_model(config)
        self._engine: Any = None
        self._closing = threading.Event()
        self._version: int | None = None
        self._update: _Update | None = None

    @property
    def weight_version(self) -> int | None:
        return self._version

    def start(self) -> None:
        arguments = _server_arguments(self.config, self._model)
        for attempt in (1, 2):
            try:
                self._engine = _start(arguments, self.config.start_timeout)
                break
            except EngineError as error:
                if attempt == 2:
                    raise
                logger.error("%s; starting it once more", error)  # SGLang hides lower levels
        _end_with_children(self._engine.get_all_child_pids(), self._closing)
        if self.config.load_format == AUTO:
            self._version = 0
            self._set_version(0)

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], uids: Sequence[str], sampling: SamplingParams
    ) -> list[Generation]:
        self._require_version()
        if len(prompt_ids) != len(uids) or len(set(uids)) != len(uids):
            raise ValueError(f"{len(prompt_ids)} prompts need as many different uids, got {len(set(uids))}")
        if not uids:
            return []
        for uid, ids in zip(uids, prompt_ids, strict=True):
            self._check_prompt(uid, ids, sampling)
        answers = self._call(
            self._engine.async_generate(
                input_ids=[list(ids) for ids in prompt_ids],
                sampling_params=[_sglang_sampling(sampling, uid) for uid in uids],
                return_logprob=True,
            ),
            f"{len(uids)} requests",
        )
        return [self._generation(uid, answer) for uid, answer in zip(uids, answers, strict=True)]

    def begin_update(self, version: int) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        if self._update is not None:
            raise EngineError(f"version {version} came before version {self._update.version} was finished")
        self._version = None
        self._update = _Update(version)
        self._control("begin_weight_update", BeginWeightUpdateReqInput())

    def receive_bucket(self, manifests: Sequence[Path]) -> None:
        update = self._require_update()
        assert len(manifests) == self.config.tensor_parallel_size, (len(manifests), self.config)
        for manifest in manifests:
            result_path(manifest).unlink(missing_ok=True)
        self._load(manifests)
        results = [json.loads(result_path(manifest).read_text()) for manifest in manifests]
        update.results.append(results)
        errors = [result["error"] for result in results if not result["ok"]]
        if errors:
            self._close_update()
            raise WeightSyncError(f"weights of version {update.version} refused: " + "; ".join(errors))
        update.complete = bool(json.loads(manifests[0].read_text())["last"])

    def finish_update(self) -> SyncReport:
        update = self._require_update()
        self._close_update()
        if not update.complete:
            raise WeightSyncError(
                f"version {update.version} is incomplete: {len(update.results)} buckets came, the last did not"
            )
        self.flush_cache()  # what it holds was computed by the old weights
        self._set_version(update.version)
        self._version = update.version
        return update.report()

    def release_memory(self, tags: Sequence[str]) -> None:
        """As `RolloutEngine.release_memory`; on a CPU SGLang frees nothing (0.5.21)."""
        if "weights" in tags:
            self._version = None
        self.flush_cache()  # SGLang dies of a release while it counts a request as running
        self._memory("release", tags)

    def resume_memory(self, tags: Sequence[str]) -> None:
        self._memory("resume", tags)

    def flush_cache(self) -> None:
        # SGLang answers a request a moment before it counts it as done, so it is given time to come to rest.
        wait = self.config.request_timeout / 2
        answer = self._call(self._engine.tokenizer_manager.flush_cache(timeout_s=wait), "flush_cache")
        if not answer.success:
            raise EngineError(f"SGLang did not flush its cache: {answer.message}")

    def pids(self) -> list[int]:
        return list(self._engine.get_all_child_pids())

    def shutdown(self) -> None:
        self._version = None
        self._closing.set()
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _require_version(self) -> int:
        if self._version is None:
            raise NoValidWeightsError(
                "the engine holds no complete, verified version of the weights: it serves nothing before a sync"
            )
        return self._version

    def _require_update(self) -> "_Update":
        if self._update is None:
            raise EngineError("no update was begun, or it has failed: call begin_update first")
        return self._update

    def _check_prompt(self, uid: str, ids: Sequence[int], sampling: SamplingParams) -> None:
        limit = self._engine.tokenizer_manager.context_len
        if len(ids) == 0:
            raise ValueError(f"{uid}: the prompt is empty")
        if len(ids) + sampling.max_new_tokens > limit:
            raise ValueError(
                f"{uid}: {len(ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} "
                f"do not fit the context of {limit} tokens"
            )
        if min(ids) < 0 or max(ids) >= self._model["vocab_size"]:
            raise ValueError(
                f"{uid}: token ids {min(ids)} to {max(ids)}, the vocabulary has {self._model['vocab_size']}"
            )

    def _generation(self, uid: str, answer: dict) -> Generation:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        versions = {int(span["version"]) for span in meta["weight_versions"]}
        if reason not in ("stop", "length") or versions != {self._version}:
            raise EngineError(f"{uid}: finished by {meta['finish_reason']}, served by versions {versions}")
        log_probs = [log_prob for log_prob, _, _ in meta["output_token_logprobs"]]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
        return Generation(uid, answer["output_ids"], log_probs, reason, self._version)

    def _load(self, manifests: Sequence[Path]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        named = [("manifests", request_tensor(manifests))]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(named) for _ in manifests],
            load_format=LOADER,
            flush_cache=False,
        )
        self._control("update_weights_from_tensor", request)

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

    def _memory(self, what: str, tags: Sequence[str]) -> None:
        from sglang.srt.managers import io_struct

        request = getattr(io_struct, f"{what.title()}MemoryOccupationReqInput")(tags=list(tags))
        method = getattr(self._engine.tokenizer_manager, f"{what}_memory_occupation")
        self._call(method(request, None), f"{what}_memory_occupation")

    def _call(self, awaitable: Awaitable[Answer], what: str) -> Answer:
        """Wait for SGLang's answer.

        Raises:
            EngineError: none came within `request_timeout`; the engine is of no further use.
        """
        timeout = self.config.request_timeout
        try:
            return self._engine.loop.run_until_complete(asyncio.wait_for(awaitable, timeout))
        except TimeoutError:
            self._version = None
            raise EngineError(f"SGLang did not answer {what} within request_timeout={timeout} s") from None


class _Update:
    """A version on its way: what the receivers answered so far, by bucket and TP rank."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.results: list[list[dict]] = []
        self.complete = False
        self._begun = time.perf_counter()

    def report(self) -> SyncReport:
        by_rank = list(zip(*self.results, strict=True))
        return SyncReport(
            self.version,
            len(self.results),
            tuple(sum(result["bytes_written"] for result in results) for results in by_rank),
            tuple(sum(result["seconds"] for result in results) for results in by_rank),
            time.perf_counter() - self._begun,
        )


def _sglang_sampling(sampling: SamplingParams, uid: str) -> dict[str, object]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": request_seed(sampling.seed, uid),
    }


def _read_model(config: EngineConfig) -> dict[str, Any]:
    """The model's config.json, checked against the engine's layout.

    Raises:
        ValueError: no such file; or sizes that `tensor_parallel_size` does not divide.
    """
    path = Path(config.model_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"model_path: {path} does not exist; give a Hugging Face model folder")
    model = json.loads(path.read_text())
    tp = config.tensor_parallel_size
    heads = model["num_attention_heads"]
    groups = model.get("num_key_value_heads") or heads
    for name, size in (("num_attention_heads", heads), ("intermediate_size", model["intermediate_size"])):
        if size % tp:
            raise ValueError(f"tensor_parallel_size={tp} does not divide {name}={size} of {path}")
    if groups % tp and tp % groups:
        raise ValueError(
            f"tensor_parallel_size={tp} and num_key_value_heads={groups} of {path}: one must divide the other"
        )
    return model


def _server_arguments(config: EngineConfig, model: dict[str, Any]) -> dict[str, Any]:
    """The arguments of SGLang's engine."""
    context = config.context_length or model["max_position_embeddings"]
    return {
        "model_path": config.model_path,
        "load_format": config.load_format,
        "tp_size": config.tensor_parallel_size,
        "dtype": config.dtype,
        "context_length": config.context_length,
        "max_running_requests": config.max_num_seqs,
        "random_seed": config.seed,
        "skip_tokenizer_init": True,
        "custom_weight_loader": [LOADER],
        "sampling_backend": "pytorch",  # the one that takes a seed for each request
        "sleep_on_idle": True,  # else an idle scheduler polls, and takes a core from the trainer
        "host": "127.0.0.1",
        "log_level": "error",
        "custom_sigquit_handler": _note_failed_start,
        **_device_arguments(config, context),
    }


def _device_arguments(config: EngineConfig, context: int) -> dict[str, Any]:
    """What differs between a CPU and a GPU."""
    if config.device == "cuda":
        return {
            "device": "cuda",
            "mem_fraction_static": config.gpu_memory_utilization,
            "max_total_tokens": config.max_total_tokens,
            "base_gpu_id": config.first_device,
            "enable_memory_saver": True,
        }
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise ValueError("a CPU engine needs a process that was started with sglang_environment('cpu', ...)")
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "mem_fraction_static": 0.1,  # of no effect beside max_total_tokens, but checked
        "max_total_tokens": config.max_total_tokens or min(config.max_num_seqs * context, CPU_CACHE_TOKENS),
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
    }


def _note_failed_start(signum: int, frame: object) -> None:
    """SGLang's scheduler sends SIGQUIT when it fails; SGLang's own handler would end this process.

    The failed start is noticed as such, since the scheduler's pipe closes. After the start SGLang replaces
    this handler by its own.
    """


def _start(arguments: dict[str, Any], timeout: float) -> Any:
    """Start SGLang's processes.

    Raises:
        ValueError: SGLang refuses the model or the arguments.
        EngineError: they did not come up within `timeout` seconds, or one of them failed. None is left.
    """
    from megarl.rollout.sglang_process import TokenEngine, close_sockets

    over, late = threading.Event(), threading.Event()

    def watch() -> None:
        # SGLang waits for its schedulers without a limit, but notices when they die. It may start another
        # while one is killed.
        over.wait(timeout)
        while not over.is_set():
            late.set()
            _kill_children()
            over.wait(0.2)

    watcher = threading.Thread(target=watch, name="sglang-start", daemon=True)
    watcher.start()
    try:
        return TokenEngine(**arguments)
    except ValueError as error:
        raise ValueError(f"SGLang refuses {arguments['model_path']}: {error}") from error
    except Exception as error:
        _kill_children()
        close_sockets()
        cause = f"it took longer than start_timeout={timeout} s" if late.is_set() else repr(error)
        raise EngineError(f"SGLang did not start: {cause}") from error
    finally:
        over.set()
        watcher.join()


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def _end_with_children(pids: Sequence[int], closing: threading.Event) -> None:
    """End this process as soon as one of the schedulers `pids` (by TP rank) does, unless `closing` is set.

    SGLang does so too, but only while its event loop runs, that is during a call: an engine that idles while
    the trainer works would be found dead a step later (0.5.21).
    """
    sentinels = {child.sentinel: child for child in multiprocessing.active_children() if child.pid in pids}

    # An exit without `shutdown` is one, too: SGLang's own exit handler, which runs after this, ends them.
    atexit.register(closing.set)

    def watch() -> None:
        ended = sentinels[multiprocessing.connection.wait(list(sentinels))[0]]
        if not closing.is_set():
            ended.join()
            logger.error(
                "SGLang's scheduler of TP rank %d (pid %d) ended with exit code %s: the engine ends",
                pids.index(ended.pid), ended.pid, ended.exitcode,
            )  # fmt: skip
            os._exit(1)

    threading.Thread(target=watch, name="sglang-watch", daemon=True).start()
