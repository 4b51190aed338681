"""SGLang's processes as megarl runs them: which processes there are, and how each begins.

Only engines that megarl starts are affected: SGLang lets a subclass of its `Engine` name the functions that
its processes run (sglang 0.5.21).

- The scheduler of each TP rank ends with its owner, from its first line on (before_import.py), and ignores the signals of a job's end.
- Requests are sampled with their own seed: a response's noise does not depend on other requests. On a GPU two kernels draw the tokens
  of requests that are sampled from all tokens (sampling.py).
- Drafted tokens are checked with the request's own noise (speculation.py).
- The samples of a prompt share its prefill, and the first rank's scheduler reports when it last computed (scheduler_hooks.py).
- An engine that judges texts has logits at its temperature (scheduler_hooks.py).
- On a CPU sequences are attended together, and decode steps have fewer operations (`cpu_engine_function`).
- The TP ranks of an engine on one node meet through a file; the ranks of an engine on several nodes meet through a TCP store at the
  given address. SGLang's own store would take a port that another engine may have taken a moment ago, and listen on every
  interface of the machine.
- The weights of a version are verified again when SGLang has ended an update (megarl/weight_sync/receiver.py).
- The ranks report how much memory they hold (memory.py), and where their adapters are (megarl/weight_sync/served_model.py).
- With data parallel attention there is no process between the owner and the schedulers (data_parallel.py).
- There is no detokenizer process: requests and answers are token ids (`skip_tokenizer_init`), so it would idle,
  for 3 s of start-up CPU time and 400 MB.
"""

import gc
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import zmq
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.managers.tokenizer_manager import SignalHandler
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from megarl.rollout.sglang import data_parallel, sampling, scheduler_hooks, speculation
from megarl.rollout.sglang import memory as engine_memory
from megarl.rollout.sglang.before_import import (
    SchedulerMain,
    cpu_engine_function,
    forked,
    without_main,
)
from megarl.rollout.sglang.requests import BatchingSocket, kept_as_arrays
from megarl.util.rendezvous import open_store
from megarl.util.signals import outlive_job_signals
from megarl.weight_sync import receiver, served_model

NAMES = ".shared-memory"  # as in cluster/guard.py: suffix of files that name shared memory
SCHEME = "megarl"  # of addresses at which TP ranks of several nodes meet


def run_scheduler(server_args, port_args, gpu_id: int, tp_rank: int, pp_rank: int, dp_rank, *args) -> None:
    """The scheduler's main function, which `SchedulerMain` calls with the arguments of `run_scheduler_process`."""
    name_shared_memory(port_args)
    outlive_job_signals()
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = meeting_place(server_args, port_args)
    chosen = hooks(server_args.device, server_args.dp_size, server_args.speculative_algorithm)
    for target, (kind, hook) in chosen.items():
        HookRegistry.register(target, hook, kind)
    temperature = json.loads(server_args.json_model_override_args).get(scheduler_hooks.TEMPERATURE)
    if temperature is not None:
        HookRegistry.register(scheduler_hooks.LOGITS, scheduler_hooks.divided_by(temperature), HookType.AFTER)
    if tp_rank == 0:
        beat = scheduler_hooks.Heartbeat.make(heartbeat_file(port_args)).beat_after
        HookRegistry.register(_END_OF_STEP, beat, HookType.AFTER)
    if server_args.device == "cpu":
        cpu_engine_function("on_scheduler_start")()
    load_plugins()
    HookRegistry.apply_hooks()  # in a copy of the owner `load_plugins` does nothing: the owner has called it
    if server_args.dp_size == 1:
        run_scheduler_process(server_args, port_args, gpu_id, tp_rank, pp_rank, dp_rank, *args)
        return
    with data_parallel.in_group(server_args, port_args, tp_rank) as (port_args, dp_rank):
        run_scheduler_process(server_args, port_args, gpu_id, tp_rank, pp_rank, dp_rank, *args)


def meeting_place(server_args, port_args) -> str:
    """Where the TP ranks of this engine meet, as a URL for torch."""
    if server_args.nnodes == 1:
        return f"file://{rendezvous_file(port_args)}"
    from torch.distributed import register_rendezvous_handler

    register_rendezvous_handler(SCHEME, _meet)
    return f"{SCHEME}://{server_args.dist_init_addr}"


def _meet(url: str, timeout: timedelta, **kwargs) -> Iterator[tuple]:
    """A rendezvous handler in torch's protocol: yields (store, rank, world size)."""
    place = urlparse(url)
    query = {name: int(value) for name, (value,) in parse_qs(place.query).items()}
    rank, world_size = query["rank"], query["world_size"]
    yield open_store(place.hostname, place.port, rank, world_size, timeout), rank, world_size


def rendezvous_file(port_args) -> str:
    """The rendezvous file of an engine on one node, next to a socket that SGLang made for this engine alone."""
    return f"{_socket_files(port_args)[0]}.store"


def heartbeat_file(port_args) -> Path:
    """The file into which the first rank's scheduler writes the time of its last step."""
    return Path(f"{_socket_files(port_args)[0]}.heartbeat")


def name_shared_memory(port_args) -> None:
    """Write the names of this process's files in /dev/shm to the temporary folder, before the files exist.

    Until all processes have opened them and their names are removed (`unlink_shared_memory`), some seconds later, an engine that is
    killed leaves them behind. The guard that removes the temporary folder then removes the named files, too (cluster/guard.py).
    """
    names = [shm_path_for(port_args.instance_id), f"/dev/shm/sgl_shm_*_{os.getpid()}_*"]
    Path(f"{_socket_files(port_args)[0]}.{os.getpid()}{NAMES}").write_text("\n".join(names) + "\n")


def remove_files(port_args) -> None:
    """Remove the sockets, the rendezvous, the heartbeat and the names of shared memory that an engine leaves in the temporary folder."""
    socket = Path(_socket_files(port_args)[0])
    named = socket.parent.glob(f"{socket.name}.*{NAMES}")
    made = (rendezvous_file(port_args), heartbeat_file(port_args), data_parallel.answers_file(port_args))
    for path in (*_socket_files(port_args), *made, *named):
        Path(path).unlink(missing_ok=True)


def _socket_files(port_args) -> list[str]:
    names = (
        port_args.scheduler_input_ipc_name,
        port_args.tokenizer_ipc_name,
        port_args.detokenizer_ipc_name,
        port_args.rpc_ipc_name,
        port_args.metrics_ipc_name,
        port_args.load_collector_ipc_name,
    )
    return [name.removeprefix("ipc://") for name in names if name]


def close_sockets() -> None:
    """Close the sockets that a failed start of SGLang left in this process.

    They hold messages to a scheduler that is dead. Left to the garbage collector, they would be
    closed at any later time, and their close waits for those messages to be read: forever (pyzmq 27).
    """
    for context in [thing for thing in gc.get_objects() if isinstance(thing, zmq.Context)]:
        context.destroy(linger=0)


def _with_request_seeds(result, cls, batch, *args, **kwargs):
    """Give the sampler the requests' seeds.

    SGLang passes them on only with --enable-deterministic-inference, which also demands
    batch-invariant GPU kernels. Without it, one generator serves all requests of a rank, and a response
    depends on every request that was ever sampled before it.
    """
    import torch

    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if all(seed is not None for seed in seeds):
        result.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(result.device, non_blocking=True)
    return result


def cut_by_min_p(
    original, probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **kwargs
):
    """Sample from probabilities [batch, vocabulary] also with both min_p and seeds.

    SGLang asserts that only one of them is given, since the probabilities are not normalised after the cut (0.5.21). Its sampling by
    seed adds Gumbel noise to their logarithms and takes the largest, for which normalisation makes no difference. top_k and top_p
    leave the same tokens whether they come before or after the cut: they count from the most probable token on.
    """
    import torch

    if need_min_p_sampling and sampling_seed is not None:
        least = probs.amax(-1, keepdim=True) * min_ps.view(-1, 1)
        probs, need_min_p_sampling = torch.where(probs < least, 0.0, probs), False
    return original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, **kwargs)


# By function of SGLang's, the hook after, around or in place of it in each scheduler (sglang 0.5.21).
HOOKS = {
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch": (
        HookType.AFTER,
        _with_request_seeds,
    ),
    "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch": (HookType.AROUND, cut_by_min_p),
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state": (HookType.AFTER, engine_memory.add_memory),
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req": (
        HookType.AROUND,
        scheduler_hooks.one_goes_first,
    ),
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._maybe_collect_routed_experts": (
        HookType.AFTER,
        scheduler_hooks.experts_as_bytes,
    ),
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.end_weight_update": (
        HookType.AFTER,
        receiver.verify_after_update,
    ),
    "sglang.srt.lora.lora_manager.LoRAManager.init_memory_pool": (
        HookType.AFTER,
        served_model.remember_manager,
    ),
}
# The same in the owner, the process that answers come to.
OWNER_HOOKS = {
    "sglang.srt.sampling.sampling_mask.SamplingMaskChunk.to_lists": (HookType.AROUND, kept_as_arrays)
}
# On GPUs alone: on a CPU sampling has other noise (megarl/sglang_cpu/lean_decode.py).
GPU_HOOKS = {"sglang.srt.layers.sampler.Sampler.forward": (HookType.AROUND, sampling.sample)}
_END_OF_STEP = "sglang.srt.managers.scheduler.Scheduler.process_batch_result"


# Where attention is data parallel.
GROUP_HOOKS = {
    "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks": (
        HookType.AROUND,
        data_parallel.share_requests,
    ),
    "sglang.srt.managers.scheduler.Scheduler.init_ipc_channels": (HookType.BEFORE, data_parallel.find_owner),
    "sglang.srt.managers.scheduler.Scheduler.init_idle_sleeper": (
        HookType.AFTER,
        data_parallel.sleeps_with_rank_0,
    ),
}


def hooks(device: str, num_groups: int, drafting: str | None = None) -> dict[str, tuple]:
    """The hooks of a scheduler on a device, in an engine with `num_groups` data parallel groups of attention.

    Args:
        drafting: SGLang's name for the way tokens are drafted; None: they are not.
    """
    found = HOOKS | (GPU_HOOKS if device == "cuda" else {}) | (GROUP_HOOKS if num_groups > 1 else {})
    found |= speculation.HOOKS if drafting else {}
    return found | (speculation.DRAFT_HOOKS if drafting in ("EAGLE", "EAGLE3") else {})


class _NoDraining(SignalHandler):
    """At SIGTERM SGLang would answer its requests and end; the engine's owner decides about its end instead."""

    def sigterm_handler(self, signum=None, frame=None) -> None:
        pass


def _tokenizer_manager(server_args, port_args) -> tuple:
    """SGLang's own tokenizer manager; it also takes answers of other nodes where these have data parallel groups."""
    made = Engine.init_tokenizer_manager_func(server_args, port_args)
    if server_args.dp_size > 1 and server_args.nnodes > 1:
        data_parallel.listen_for_answers(server_args, port_args, made[0].recv_from_detokenizer)
    return made


class TokenEngine(Engine):
    """SGLang's engine for token ids."""

    run_scheduler_process_func = SchedulerMain()
    init_tokenizer_manager_func = staticmethod(_tokenizer_manager)

    def __init__(self, **kwargs) -> None:
        for target, (kind, hook) in OWNER_HOOKS.items():
            HookRegistry.register(target, hook, kind)
        HookRegistry.apply_hooks()  # once, however many engines this process starts
        super().__init__(**kwargs)
        if self.tokenizer_manager is not None:  # of the first node alone
            self.tokenizer_manager.signal_handler_class = _NoDraining
            socket = self.tokenizer_manager.send_to_scheduler
            self.tokenizer_manager.send_to_scheduler = BatchingSocket(socket, self.loop)
            self.heartbeat = scheduler_hooks.Heartbeat(heartbeat_file(self.port_args))

    @property
    def cache_tokens(self) -> int:
        """The tokens that the KV cache of a rank has room for, as the first scheduler said at its start (sglang 0.5.21)."""
        return self._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]

    @classmethod
    def _launch_subprocesses(cls, server_args, *args, **kwargs):
        if server_args.dp_size > 1:
            kwargs["port_args"] = data_parallel.local_ports(server_args)
        return super()._launch_subprocesses(server_args, *args, **kwargs)

    @classmethod
    def _launch_scheduler_processes(cls, server_args, *args, **kwargs):
        with (
            forked() if server_args.device == "cpu" else without_main(),
            data_parallel.without_controller() if server_args.dp_size > 1 else nullcontext(),
        ):
            return super()._launch_scheduler_processes(server_args, *args, **kwargs)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, server_args, port_args, run_detokenizer_process_func):
        return [], []

    def shutdown(self) -> None:
        super().shutdown()
        if hasattr(self, "port_args"):  # not after a start that failed
            remove_files(self.port_args)
