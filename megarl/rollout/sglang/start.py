"""Starts SGLang's processes, and ends this one when they end.

The model's config.json is checked against the engine's layout and completed for SGLang. `_device_arguments` and the environment
(before_import.py) are the only places that tell a CPU from a GPU. This module imports SGLang only when it starts it.
"""

import atexit
import json
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import threading
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megarl.config import RolloutConfig
from megarl.config.engine_options import TABLE, engine_option_problems
from megarl.config.model_fit import check_rollout_model
from megarl.config.options import unknown_options
from megarl.config.problems import raise_if_any
from megarl.config.resolve import drafted_room, served_context
from megarl.models import read_model_config
from megarl.models.config import CONTEXT_FIELDS, ENGINE_STATES
from megarl.rollout.engine import EngineConfig, EngineError
from megarl.rollout.sglang.before_import import prepare_schedulers
from megarl.rollout.sglang.scheduler_hooks import TEMPERATURE
from megarl.util.memory import without_collection
from megarl.util.packages import KNOWN
from megarl.weight_sync import served_model
from megarl.weight_sync.receiver import LOADER

logger = logging.getLogger(__name__)
CPU_CACHE_TOKENS = 65536
# SGLang keeps the tokens that followed a token, 18 deep, in a tree that it allocates at the start: 200 bytes a node, 10 million nodes by
# default.
CPU_NGRAM_NODES = 100_000
_DRAFTING = {"ngram": "NGRAM", "mtp": "EAGLE", "eagle3": "EAGLE3"}
_SHARED_NAMES = ("sgl_shm_", "sglang_loads_")
_LATENT = ("deepseek_v3", "kimi_k2")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
# By model type: fields that SGLang 0.5.21 reads and transformers 5 does not write, since its code has no other values.
_IMPLIED = {
    model_type: {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    for model_type in (*_LATENT, *SPARSE)
}


def check_version(allow_unknown: bool) -> None:
    """Check that the installed SGLang is of a version that megarl was tried with.

    megarl reads and writes SGLang's own parameters and replaces some of its functions, which any version may rename.

    Raises:
        ValueError: the version is another one, and `allow_unknown` is not set.
    """
    found = version("sglang")
    if found in KNOWN["sglang"]:
        return
    known = ", ".join(KNOWN["sglang"])
    if not allow_unknown:
        raise ValueError(
            f"sglang {found} is installed; megarl is known to work with {known}. Install one of these, or set "
            "rollout.allow_unknown_version=true to try it nonetheless"
        )
    logger.warning("sglang %s is installed; megarl is known to work with %s", found, known)


def server_arguments(config: EngineConfig, model: dict[str, Any]) -> dict[str, Any]:
    """The arguments of SGLang's engine."""
    context = sglang_context(config, model)
    node: dict[str, Any] = {}
    _check_arguments(config)
    if config.nodes > 1:
        assert config.tensor_parallel_size % config.nodes == 0 and config.address is not None, config
        node = {"nnodes": config.nodes, "node_rank": config.node, "dist_init_addr": config.address}
    told = {
        "model_path": config.model_path,
        "load_format": config.load_format,
        "tp_size": config.tensor_parallel_size,
        "ep_size": config.expert_parallel_size,
        **_group_arguments(config, model),
        **node,
        "json_model_override_args": json.dumps(config_overrides(config, model)),
        "disable_shared_experts_fusion": True,  # else their place in memory would depend on the device
        "dtype": config.dtype,
        "context_length": None if config.context_length is None else context,
        "max_running_requests": config.max_num_seqs,
        "random_seed": config.seed,
        "skip_tokenizer_init": True,
        "custom_weight_loader": [LOADER],
        "enable_memory_saver": config.enable_memory_saver,
        "sampling_backend": "pytorch",  # the one that takes a seed for each request
        "enable_deterministic_inference": config.deterministic,  # on a CPU: sglang_cpu/batch_invariant.py
        "enable_return_routed_experts": config.return_routed_experts,
        **({} if config.most_kept is None else {"sampling_mask_max_tokens": config.most_kept}),
        "sleep_on_idle": True,  # else an idle scheduler polls, and takes a core from the trainer
        "host": "127.0.0.1",
        # A start on a GPU may compile kernels for minutes, which SGLang reports as a warning.
        "log_level": "warning" if config.device == "cuda" else "error",
        "custom_sigquit_handler": _note_failed_start,
        **_device_arguments(config, context),
        **_state_arguments(config, model),
        **_sink_arguments(config, model),
        **_sparse_arguments(config, model),
        **_deterministic_arguments(config, model),
        **_speculative_arguments(config),
        **(served_model.adapter_arguments(config.adapters, config.device) if config.adapters else {}),
    }
    if twice := sorted(told.keys() & config.arguments.keys()):
        raise ValueError(
            f"rollout.engine_kwargs: megarl itself sets {', '.join(twice)} on a {config.device} device; leave it out"
        )
    return {**told, **config.arguments}


def sglang_context(config: EngineConfig, model: dict[str, Any]) -> int:
    """SGLang's limit of tokens: `served_context`, or the model's own where the engine has none."""
    most = next(int(model[name]) for name in CONTEXT_FIELDS if model.get(name) is not None)
    if config.context_length is None:
        return most
    drafting = config.speculation
    drafted = 0 if drafting is None else drafted_room(drafting.algorithm, drafting.num_draft_tokens)
    return served_context(config.context_length, most, drafted)


def _group_arguments(config: EngineConfig, model: dict[str, Any]) -> dict[str, Any]:
    """The arguments of data parallel attention.

    An output layer that is the embedding is cut as the embedding is: without `enable_dp_lm_head` SGLang (0.5.21) would gather logits over
    all ranks, and take copies of the first rows for the others.
    """
    if config.attention_data_parallel_size == 1:
        return {}
    return {
        "dp_size": config.attention_data_parallel_size,
        "enable_dp_attention": True,
        "enable_dp_lm_head": config.data_parallel_lm_head or bool(model.get("tie_word_embeddings")),
    }


def _state_arguments(config: EngineConfig, model: dict[str, Any]) -> dict[str, Any]:
    """The argument that says how many states of gated delta nets an engine has; without it SGLang (0.5.21) gives the states half of the
    cache's memory, and runs only as many requests as have states there."""
    if "linear_num_key_heads" not in model:
        return {}
    return {"max_mamba_cache_size": ENGINE_STATES[config.device] * config.max_num_seqs}


def _sparse_arguments(config: EngineConfig, model: dict[str, Any]) -> dict[str, Any]:
    """The arguments of sparse attention on a GPU: a cache in bfloat16, for which SGLang (0.5.21) takes float8 on Blackwell by default.

    Raises:
        ValueError: an engine on a GPU in another type than bfloat16 (SGLang has parts of indexers in bfloat16, whatever the engine's type), or
            a deterministic one; an engine on a CPU that drafts tokens and whose context is longer than `index_topk`.
    """
    if model.get("model_type") not in SPARSE:
        return {}
    if config.device != "cuda":
        context = config.context_length or model["max_position_embeddings"]
        if context > model["index_topk"] and config.speculation is not None:
            raise ValueError(
                f"rollout.speculative: {context} tokens are more than index_topk={model['index_topk']} of {config.model_path}, and engines on CPUs do not "
                "check drafted tokens of sparse attention; leave it out"
            )
        return {}
    if config.dtype != "bfloat16":
        raise ValueError(
            f"rollout.dtype={config.dtype}: SGLang has indexers of sparse attention in bfloat16; the engine must be, too"
        )
    if config.deterministic:
        raise ValueError(
            "rollout.deterministic=true: SGLang (0.5.21) has no deterministic kernels of sparse attention; set it to false"
        )
    return {"kv_cache_dtype": "bfloat16"}


def _deterministic_arguments(config: EngineConfig, model: dict[str, Any]) -> dict[str, Any]:
    """The argument of a deterministic engine of DeepSeek-V3's family on Blackwell: Triton's attention.

    SGLang (0.5.21) would take it there, too, but has chosen trtllm_mla for this family by then (arg_groups/model_overrides/deepseek_v2.py),
    and refuses that as if it had been asked for.
    """
    given = any(name.endswith("attention_backend") for name in config.arguments)
    if not config.deterministic or config.device != "cuda" or given or model.get("model_type") not in _LATENT:
        return {}
    import torch

    return {"attention_backend": "triton"} if torch.cuda.get_device_capability()[0] >= 10 else {}


def _sink_arguments(config: EngineConfig, model: dict[str, Any]) -> dict[str, Any]:
    """The arguments of gpt-oss: one cache for all layers, so that it has as many tokens as are planned.

    SGLang (0.5.21) would have a second cache for layers with windows, with a share of the tokens that it sets itself. It holds sinks in
    bfloat16, but in float32 with trtllm_mha, its own choice of kernels on Blackwell.

    Raises:
        ValueError: an engine on a GPU in another type than bfloat16, or with these kernels; an engine that would load MXFP4 by itself, or
            experts from files for several expert parallel ranks, which SGLang would copy to all of them.
    """
    if model.get("model_type") != "gpt_oss":
        return {}
    if config.load_format != "dummy" and "quantization_config" in model:
        raise ValueError(
            f"{config.model_path}: an engine that loads this folder by itself would serve it in MXFP4, by kernels that nobody has tried here; "
            "megarl convert writes it in bfloat16"
        )
    if config.load_format != "dummy" and config.expert_parallel_size > 1:
        raise ValueError(
            f"rollout.expert_parallel_size={config.expert_parallel_size}: SGLang (0.5.21) cannot load gpt-oss's files for ranks that share its "
            "experts; set it to 1 (weights that a trainer syncs have no such limit)"
        )
    told: dict[str, Any] = {"disable_hybrid_swa_memory": True}
    if config.device != "cuda":
        # SGLang refuses torch_native by name for this model, but takes it itself where it finds no AMX; megarl's stand-in has sinks.
        return {**told, "attention_backend": "intel_amx"}
    if config.dtype != "bfloat16":
        raise ValueError(
            f"rollout.dtype={config.dtype}: SGLang has gpt-oss's sinks in bfloat16; the engine must be, too"
        )
    given = [value for name, value in config.arguments.items() if name.endswith("attention_backend")]
    if "trtllm_mha" in given:
        raise ValueError(
            "rollout.engine_kwargs: trtllm_mha has gpt-oss's sinks in float32, which no sync fills; take triton"
        )
    import torch

    if not given and torch.cuda.get_device_capability()[0] >= 10:
        told["attention_backend"] = "triton"
    return told


def _cache_tokens(config: EngineConfig, tokens: int | None) -> int | None:
    """SGLang's argument for an engine's cache of `tokens`: the tokens of each data parallel group."""
    return None if tokens is None else max(1, tokens // config.attention_data_parallel_size)


def _check_arguments(config: EngineConfig) -> None:
    """Refuse arguments that do not fit the SGLang and the device of this machine, which a configuration's checks cannot know."""
    raise_if_any(
        "arguments of the engine", list(engine_option_problems("rollout.engine_kwargs", config.arguments))
    )
    if unknown := unknown_options(config.arguments, TABLE):
        logger.warning(
            "rollout.engine_kwargs: %s: passed on to SGLang; their effect on megarl's guarantees is not known",
            ", ".join(unknown),
        )
    of_gpus = ("kv_cache_dtype", "moe_runner_backend", "moe_a2a_backend")
    given = [
        f"rollout.{name}={getattr(config, name)}" for name in of_gpus if getattr(config, name) is not None
    ]
    drafting = config.speculation
    if drafting is not None and drafting.algorithm != "ngram":
        given.append(f"rollout.speculative.algorithm={drafting.algorithm}")
    if given and config.device != "cuda":
        raise ValueError(f"{', '.join(given)}: for engines on GPUs, and there are none here; leave it out")
    if drafting is not None and drafting.algorithm == "ngram":
        missing = [name for name in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(name) is None]
        if missing:
            raise ValueError(
                f"rollout.speculative.algorithm=ngram: SGLang compiles its tree of n-grams, and there is no {' and no '.join(missing)} "
                "here; install it, or draft otherwise"
            )
    if drafting is not None and drafting.draft_path is not None:
        draft = Path(drafting.draft_path) / "config.json"
        if not draft.is_file():
            raise ValueError(
                f"rollout.speculative.draft_path: {draft} does not exist; give a Hugging Face model folder"
            )


def _device_arguments(config: EngineConfig, context: int) -> dict[str, Any]:
    """The arguments that differ between a CPU and a GPU."""
    if config.device == "cuda":
        return {
            "device": "cuda",
            "mem_fraction_static": config.gpu_memory_utilization,
            "max_total_tokens": _cache_tokens(config, config.max_total_tokens),
            "moe_runner_backend": _moe_runner(config),
            **({} if config.moe_a2a_backend is None else {"moe_a2a_backend": config.moe_a2a_backend}),
            **({} if config.kv_cache_dtype is None else {"kv_cache_dtype": config.kv_cache_dtype}),
            **(_float8_arguments(config) if config.fp8_block is not None else {}),
            # An engine that judges texts never decodes.
            **({} if config.judging_temperature is None else {"disable_cuda_graph": True}),
        }
    drafted = 0 if config.speculation is None else config.speculation.num_draft_tokens + 1
    most = context + 2 * drafted  # tokens of a request: SGLang keeps room for two passes
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        raise ValueError("a CPU engine needs a process that was started with sglang_environment('cpu', ...)")
    tokens = config.max_total_tokens or min(config.max_num_seqs * most, CPU_CACHE_TOKENS)
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "mem_fraction_static": 0.1,  # without effect, since max_total_tokens is given, but checked
        "max_total_tokens": _cache_tokens(config, tokens),
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
    }


def _speculative_arguments(config: EngineConfig) -> dict[str, Any]:
    """The arguments of drafting, in chains: trees of drafted tokens need attention kernels that take trees, and pages of one token."""
    drafting = config.speculation
    if drafting is None:
        return {}
    told: dict[str, Any] = {
        "speculative_algorithm": _DRAFTING[drafting.algorithm],
        "speculative_num_draft_tokens": drafting.num_draft_tokens
        + 1,  # with the newest token, which is not drafted
    }
    if drafting.algorithm == "ngram":
        told |= {"speculative_ngram_min_bfs_breadth": 1, "speculative_ngram_max_bfs_breadth": 1}
        capacity = "speculative_ngram_capacity"
        if config.device == "cpu" and capacity not in config.arguments:
            told[capacity] = CPU_NGRAM_NODES
        return told
    return {
        **told,
        "speculative_num_steps": drafting.num_draft_tokens,
        "speculative_eagle_topk": 1,
        # The model's own layer is in its folder; SGLang (0.5.21) knows that for some families only, and sizes the cache of the others
        # without the layer's part.
        "speculative_draft_model_path": drafting.draft_path or config.model_path,
        # A draft's weights come from a folder and stay as they are, while the model's come by sync. Released memory would lose
        # them.
        "speculative_draft_load_format": "auto",
        "enable_draft_weights_cpu_backup": config.enable_memory_saver,
    }


def _moe_runner(config: EngineConfig) -> str:
    """The kernels of experts: SGLang's kernels other than these two swap an expert's up and gate projections, or permute rows."""
    return config.moe_runner_backend or ("triton" if config.moe_a2a_backend is None else "deep_gemm")


def _float8_arguments(config: EngineConfig) -> dict[str, Any]:
    """The arguments of an engine in float8: Triton's kernels on Blackwell.

    SGLang's choice there, DeepGEMM, packs scales into integers of another shape as soon as weights are loaded, which no sync could
    fill (layers/quantization/fp8_utils.py, requant_weight_ue8m0). Triton's kernels keep scales in float32.

    Raises:
        ValueError: DeepGEMM is asked for on Blackwell.
    """
    import torch

    major, _ = torch.cuda.get_device_capability()
    if major < 10:
        return {}
    if _moe_runner(config) == "deep_gemm":
        raise ValueError(
            "rollout.moe_runner_backend=deep_gemm (which moe_a2a_backend=deepep takes) with rollout.quantization=fp8: on Blackwell DeepGEMM packs "
            "the scales of experts into integers (UE8M0) when they are loaded, and no sync could fill or verify them; leave both keys out, or "
            "the quantization"
        )
    return {"fp8_gemm_runner_backend": "triton"}


def _note_failed_start(signum: int, frame: object) -> None:
    """SGLang's scheduler sends SIGQUIT when it fails; SGLang's own handler would end this process.

    The failed start is noticed all the same, since the scheduler's pipe closes. After the start SGLang replaces
    this handler by its own.
    """


def start_sglang(arguments: dict[str, Any], timeout: float) -> Any:
    """Start SGLang's processes.

    Raises:
        ValueError: SGLang refuses the model or the arguments.
        EngineError: they did not come up within `timeout` seconds, or one of them failed. No process is left.
    """
    with without_collection():
        from megarl.rollout.sglang.process import TokenEngine, close_sockets

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


def start_owned(config: EngineConfig, model: dict[str, Any], closing: threading.Event) -> Any:
    """Start SGLang's processes on this node, a second time if that fails. From then on this process ends when they do, unless `closing`
    is set.

    Args:
        model: the model's config (`read_model`).

    Raises:
        ValueError, EngineError: as `start_sglang` and `check_version`.
    """
    check_version(config.allow_unknown_version)
    if config.device == "cuda":
        spec = find_spec("torch")
        assert spec is not None and spec.origin is not None
        prepare_schedulers(os.environ, Path(spec.origin).parents[1], config.dtype)
    arguments = server_arguments(config, model)
    try:
        engine = start_sglang(arguments, config.start_timeout)
    except EngineError as error:
        logger.error("%s; starting it once more", error)  # SGLang hides lower levels
        engine = start_sglang(arguments, config.start_timeout)
    pids = list(engine.get_all_child_pids())
    unlink_shared_memory([os.getpid(), *pids])
    end_with_children(pids, closing, first_rank=config.node * config.ranks_per_node)
    return engine


def unlink_shared_memory(pids: Sequence[int]) -> None:
    """Remove the names of SGLang's shared memory, once all processes (`pids`) have opened them.

    Memory without a name is freed when the last process that maps it ends, however it ends. SGLang leaves names
    behind whenever a scheduler is killed, and that is how its schedulers end (0.5.21).
    """
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, folder, name = line.partition("/dev/shm/")
            if name.startswith(_SHARED_NAMES):
                Path(folder, name).unlink(missing_ok=True)


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def end_with_children(pids: Sequence[int], closing: threading.Event, first_rank: int = 0) -> None:
    """End this process as soon as one of the schedulers `pids` (by TP rank, from `first_rank` on) does, unless `closing` is
    set.

    SGLang does so too, but only while its event loop runs, that is during a call: an engine that idles while
    the trainer works would be found dead a step later (0.5.21).
    """
    sentinels = {child.sentinel: child for child in multiprocessing.active_children() if child.pid in pids}

    # At an exit without `shutdown`, too: SGLang's own exit handler, which runs after this one, ends the schedulers.
    atexit.register(closing.set)

    def watch() -> None:
        ended = sentinels[multiprocessing.connection.wait(list(sentinels))[0]]
        if not closing.is_set():
            ended.join()
            logger.error(
                "SGLang's scheduler of TP rank %d (pid %d) ended with exit code %s: the engine ends",
                first_rank + pids.index(ended.pid), ended.pid, ended.exitcode,
            )  # fmt: skip
            os._exit(1)

    threading.Thread(target=watch, name="sglang-watch", daemon=True).start()


def read_model(config: EngineConfig) -> dict[str, Any]:
    """The model's config.json, checked against the engine's layout; for a model with a vision tower, with the language model's fields put in.

    Raises:
        ValueError: no such file, a model that megarl does not support, or sizes that the parallel sizes do not divide.
    """
    path = Path(config.model_path) / "config.json"
    if not path.is_file():
        raise ValueError(f"model_path: {path} does not exist; give a Hugging Face model folder")
    sizes = RolloutConfig(
        tensor_model_parallel_size=config.tensor_parallel_size,
        expert_parallel_size=config.expert_parallel_size,
        attention_data_parallel_size=config.attention_data_parallel_size,
        moe_a2a_backend=config.moe_a2a_backend,
    )
    # `fp8_block` comes in place of the folder's blocks, and was checked with the configuration.
    loads = config.load_format != "dummy" and config.fp8_block is None
    check_rollout_model(sizes, read_model_config(config.model_path), "rollout", loads=loads)
    found = json.loads(path.read_text())
    return {**found, **found.get("text_config", {}), "model_type": found["model_type"]}


def config_overrides(config: EngineConfig, model: dict[str, Any]) -> dict[str, Any]:
    """Fields of the model's config that SGLang gets in addition to config.json, or in place of its fields."""
    implied = _IMPLIED.get(model.get("model_type", ""), {})
    overrides = {name: value for name, value in implied.items() if name not in model}
    if config.fp8_block is not None:
        overrides["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(config.fp8_block),
        }
    elif config.load_format == "dummy" and "quantization_config" in model:
        overrides["quantization_config"] = None  # synced weights have another type than the folder's
    if model.get("model_type", "").startswith("qwen3_5"):
        overrides |= _text_overrides(model)
    if model.get("model_type") in SPARSE and config.device != "cuda":
        # Of megarl.rollout.sglang.models.sparse_attention.
        overrides["architectures"] = ["DeepseekV2ForCausalLM"]
    if config.judging_temperature not in (None, 1.0):
        overrides[TEMPERATURE] = config.judging_temperature
    if model.get("model_type") == "gpt_oss":
        overrides["dtype"] = (
            None  # else SGLang makes some layers in the type that the folder names, not in the engine's
        )
    return overrides


def _text_overrides(model: dict[str, Any]) -> dict[str, Any]:
    """Qwen3.5's fields for text alone: no sections of M-RoPE, which are parts of one rotation there, and no vision tower (models/qwen3_5.py).

    SGLang (0.5.21) has no default for the layers of attention, and transformers may not write them.
    """
    own: dict[str, Any] = {"full_attention_interval": model.get("full_attention_interval") or 4}
    rope = model.get("rope_parameters") or {}
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    if rope:
        own |= {"rope_parameters": rope, "rope_scaling": rope}
    if "text_config" not in model:
        return own
    architecture = "Qwen3_5MoeForCausalLM" if "moe" in model["model_type"] else "Qwen3_5ForCausalLM"
    return {"architectures": [architecture], "language_model_only": True, "text_config": own}
