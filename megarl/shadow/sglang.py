"""One rank of a recipe's SGLang engine as a shadow: SGLang's own runner on its CUDA branch, up to its pool of keys and values.

Its model is built, its weights are processed as after loading and again as after a sync, and its pool is sized and made. The pieces of a sync
are bound to its parameters as the receiver of a sync does it.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megarl.config import TrainConfig
from megarl.layout.boxes import Box
from megarl.models import ModelConfig, logical_tensors, sglang_keeps_float32, sglang_padding
from megarl.rollout.engine import EngineConfig
from megarl.rollout.sglang.start import read_model, server_arguments
from megarl.shadow import collectives
from megarl.shadow.mode import FakeMode, Shadow
from megarl.trainer.roles.engines import gpu_engine
from megarl.weight_sync.layouts import EngineLayout, sglang_layout
from megarl.weight_sync.packets import Slice
from megarl.weight_sync.quantize import dtype_in_fp8, with_scales
from megarl.weight_sync.served_model import (
    RefusedError,
    check_complete,
    draft_weights,
    named_weights,
    place,
    set_draft_runner,
    weights_of,
)

ROLE = "rollout"
MAX_PROBLEMS = 20
ADDRESS = "127.0.0.1:1"  # of the other nodes, which do not exist


@dataclass(frozen=True)
class EngineReport:
    """The report of a shadow rank of an engine.

    Attributes:
        model: SGLang's class.
        num_parameters: that a sync fills.
        problems: reasons to refuse a sync, and tensors that SGLang's processing after it changes; none: it fits.
        weights: bytes before the pool. kv_cache: of the pool. kv_tokens: that it holds.
        seconds: of a processor. host_peak: bytes of this process.
        assumed: unknown values, and how often they were needed.
    """

    role: str
    rank: int
    world_size: int
    model: str
    num_parameters: int
    problems: list[str]
    weights: int
    kv_cache: int
    kv_tokens: int
    assumed: dict[str, int]
    num_operations: int
    seconds: float
    host_peak: int


def run(config: TrainConfig, facts: ModelConfig, rank: int, tell: Callable[[Shadow], None]) -> EngineReport:
    """Run a rank of an engine; returns its report.

    Args:
        config: resolved. facts: of its model.
        rank: of an engine; a process has one, as SGLang has.
        tell: given the shadow before it runs.
    """
    begun = time.process_time()
    engine = gpu_engine(config, facts)
    nodes = config.actor_rollout_ref.rollout.nodes_per_engine
    engine = replace(engine, nodes=nodes, address=ADDRESS if nodes > 1 else None)
    arguments = server_arguments(engine, read_model(engine))
    shadow = Shadow()
    tell(shadow)
    collectives.leave_no_other_backend(lambda: shadow)
    collectives.join(rank, engine.tensor_parallel_size)
    dist.monitored_barrier = lambda *args, **kwargs: None
    with FakeMode(), shadow, torch.no_grad():
        runner = _runner(arguments, rank)
        draft = _draft_runner(runner) if _has_draft(engine) else None
        gc.collect()  # a draft's class makes layers and replaces them, in cycles of references
        num_parameters = len(_filled(engine, runner.model))
        weights = shadow.tracker.current
        problems = [*_misfits(engine, facts, rank, runner.model), *_changed(runner.model)]
        runner.alloc_memory_pool()
        if draft is not None:
            draft.req_to_token_pool = runner.req_to_token_pool
            draft.token_to_kv_pool_allocator = runner.token_to_kv_pool_allocator
            draft.alloc_memory_pool(runner.memory_pool_config)
    return EngineReport(
        role=ROLE,
        rank=rank,
        world_size=engine.tensor_parallel_size,
        model=type(runner.model).__name__,
        num_parameters=num_parameters,
        problems=problems[:MAX_PROBLEMS],
        weights=weights,
        kv_cache=shadow.tracker.current - weights,
        kv_tokens=runner.max_total_num_tokens,
        assumed=dict(shadow.assumed),
        num_operations=shadow.num_operations,
        seconds=time.process_time() - begun,
        host_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    )


def _runner(arguments: dict, rank: int):
    """SGLang's runner of a model, made as its scheduler makes it (sglang 0.5.21, managers/scheduler.py and tp_worker.py)."""
    from sglang.srt.configs.model_config import ModelConfig as SGLangConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.distributed.device_communicators import shm_broadcast
    from sglang.srt.managers import scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish
    from sglang.srt.server_args import ServerArgs

    # Between processes of a node, not devices.
    shm_broadcast.MessageQueue.create_from_process_group = staticmethod(lambda *args, **kwargs: None)
    # Unknown values; numbers that SGLang then reads of them (scales of the cache) keep their first values.
    loader.initialize_dummy_weights = lambda model: None
    arguments = {key: value for key, value in arguments.items() if key != "custom_sigquit_handler"}
    if "speculative_draft_load_format" in arguments:
        arguments["speculative_draft_load_format"] = "dummy"  # no file is read
    told = ServerArgs(**arguments)
    group = rank * told.dp_size // told.tp_size if told.dp_size > 1 else None
    publish(told, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=group, gpu_id=0))
    model_config = SGLangConfig.from_server_args(told)
    bootstrap.init_parallel_runtime(server_args=told, device="cuda", dist_port=1)
    bootstrap.init_layer_runtime(model_config=model_config)
    scheduler.initialize_moe_config()
    scheduler.initialize_fp8_gemm_config()
    scheduler.initialize_fp4_gemm_config()
    scheduler.initialize_bf16_gemm_config()
    return ModelRunner(
        model_config=model_config,
        mem_fraction_static=get_schedule().mem_fraction_static,
        gpu_id=0,
        nccl_port=1,
        server_args=told,
    )


def _has_draft(engine: EngineConfig) -> bool:
    """Whether a second model drafts tokens: the model's own layer for further tokens, or one of another folder."""
    return engine.speculation is not None and engine.speculation.algorithm != "ngram"


def _fills_draft(engine: EngineConfig) -> bool:
    """Whether the draft is the model's own layer, which a sync can fill; the weights of one of another folder stay as they are."""
    return engine.speculation is not None and engine.speculation.algorithm == "mtp"


def _filled(engine: EngineConfig, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that a sync fills, all of them."""
    return weights_of(model) | (draft_weights(model) if _fills_draft(engine) else {})


def _draft_runner(runner):
    """SGLang's runner of a draft, made as its draft worker makes it, for the runner of the model (sglang 0.5.21,
    speculative/eagle_worker_v2.py)."""
    from sglang.srt.configs.model_config import ModelConfig as SGLangConfig
    from sglang.srt.layers.moe.utils import (
        draft_model_build_scope,
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import get_schedule, get_spec
    from sglang.srt.speculative.spec_utils import draft_pp_context

    model_config = SGLangConfig.from_server_args(
        runner.server_args,
        model_path=get_spec().speculative_draft_model_path,
        model_revision=get_spec().speculative_draft_model_revision,
        is_draft_model=True,
        context_length=runner.model_config.context_len,
    )
    with (
        draft_pp_context(),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
        draft_model_build_scope(),
    ):
        draft = ModelRunner(
            model_config=model_config,
            mem_fraction_static=get_schedule().mem_fraction_static,
            gpu_id=0,
            nccl_port=1,
            server_args=runner.server_args,
            is_draft_worker=True,
        )
    embedding, head = runner.model.get_embed_and_head()
    if getattr(draft.model, "load_lm_head_from_target", True):
        draft.model.set_embed_and_head(embedding, head)
    else:  # an EAGLE3 draft with a head of its own, of fewer tokens
        draft.model.set_embed(embedding)
    set_draft_runner(runner.model, draft)
    return draft


def _layout(engine: EngineConfig) -> EngineLayout:
    return EngineLayout(
        engine.tensor_parallel_size,
        engine.expert_parallel_size,
        dp=engine.attention_data_parallel_size,
        dp_head=engine.data_parallel_lm_head,
        whole_shared=engine.moe_a2a_backend is not None,
        draft=_fills_draft(engine),
    )


def slices(engine: EngineConfig, facts: ModelConfig, rank: int) -> Iterator[Slice]:
    """The slices that a sync writes into a rank of an engine: every piece of the table of weights, with the type in which it travels."""
    layout = sglang_layout(facts, _layout(engine))
    dtype = getattr(torch, engine.dtype)
    if engine.fp8_block is not None:
        layout = with_scales(layout, logical_tensors(facts, mtp=_fills_draft(engine)), engine.fp8_block)
    for piece in layout.pieces(rank):
        kind = dtype if engine.fp8_block is None else dtype_in_fp8(piece.tensor, dtype)
        kind = torch.float32 if sglang_keeps_float32(facts, piece.tensor) else kind
        yield Slice(piece.tensor, piece.local, piece.local_box, str(kind).removeprefix("torch."))


def _misfits(engine: EngineConfig, facts: ModelConfig, rank: int, model: torch.nn.Module) -> Iterator[str]:
    """Why the receiver of a sync would refuse: no such parameter or place, another type, parts that are not filled."""
    filled = _filled(engine, model)
    targets = {**dict(model.named_buffers()), **named_weights(model), **filled}
    written: dict[str, list[Box]] = {}
    for item in slices(engine, facts, rank):
        written.setdefault(item.local, []).append(item.box)
        try:
            place(item, targets)
        except RefusedError as error:
            yield str(error)
    try:
        check_complete(filled, written, sglang_padding(facts, _layout(engine).place(rank)))
    except RefusedError as error:
        yield str(error)


def _changed(model: torch.nn.Module) -> Iterator[str]:
    """Tensors that SGLang's processing at the end of a sync puts in another place, shape or type."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    def held() -> dict[str, tuple]:
        return {
            name: (value.untyped_storage()._cdata, tuple(value.shape), value.dtype)
            for name, value in weights_of(model).items()
        }

    before = held()
    DefaultModelLoader.postprocess_weights(model, torch.device("cuda"))
    after = held()
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name} is another tensor after SGLang's end_weight_update: {before.get(name)}, {after.get(name)}"
