"""`megarl doctor`: problems of a job that can be found before it is paid for or waits in a queue.

It reads the configuration, the models' files and the data as the run would, checks every machine, and has all devices communicate
once, over the same process groups as the run's. It leaves no files or processes. Without a recipe it checks this machine alone.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path

import ray
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megarl.cluster import WorkerGroup
from megarl.cluster.hosts import on_node
from megarl.config import LoraConfig, TrainConfig, resolve, resolve_batches
from megarl.config.loading.hub import fetch_models
from megarl.doctor.nodes import (
    FAILURE,
    GIB,
    OK,
    WARNING,
    Finding,
    NodeFacts,
    check_node,
    check_nodes,
    node_facts,
)
from megarl.doctor.preflight import preflight
from megarl.doctor.probe import bus_bandwidth
from megarl.models import logical_tensors, read_model_config
from megarl.models.lora import logical_adapters
from megarl.rewards.processes.scorer import make_scorer
from megarl.trainer.roles.roles import open_pools
from megarl.trainer.run.cluster_setup import check_devices
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import open_engine_run
from megarl.trainer.stages.inputs import load_model_inputs, load_train_inputs
from megarl.trainer.stages.saved_trajectories import count_steps
from megarl.util.packages import PURPOSES

SAME_MESSAGE = "megarl train would end with the same message"
PROBE = "megarl.doctor.probe:ProbeWorker"
PROBE_BYTES = 32 << 20
PROBE_FILE, PROBE_FILE_BYTES = "written", 1 << 20
PROBE_ROUNDS = 3
PROBE_TIMEOUT = 120.0
NODE_SECONDS = 60.0
STYLES = {OK: "green", WARNING: "yellow", FAILURE: "bold red"}
# Measured on a CPU: a Megatron rank is 0.4 GB, an engine's process 1.2 GB; the same programs run on GPUs.
RANK_BYTES, ENGINE_BYTES = 400 << 20, 1200 << 20
# Weights, their float32 copies and both of Adam's states; an exported model in bfloat16.
CHECKPOINT_BYTES_PER_PARAMETER, EXPORTED_BYTES_PER_PARAMETER = 16, 2


def examine_here() -> list[Finding]:
    """Findings about this machine without a recipe: packages, GPUs, and free memory and disk."""
    node = node_facts(".", PROBE_FILE)
    return check_node(node, len(node.gpus) or None, {})


def examine(config: TrainConfig) -> list[Finding]:
    """All findings, in the order of the checks; `config` is unresolved."""
    found = [finding for finding in examine_here() if finding.what in PURPOSES and finding.level == FAILURE]
    found += _inputs(config)
    if any(finding.level == FAILURE for finding in found):
        return found  # nothing is started for a job that cannot begin
    config = fetch_models(resolve(config), weights=False)  # they are in the cache by now
    folder = Path(config.trainer.default_local_dir)
    try:
        with _folder_within(folder) as own:
            (own / PROBE_FILE).write_bytes(bytes(PROBE_FILE_BYTES))
            return found + _machines(config, own)
    except OSError as error:
        # The folder cannot be made or written; a full disk shows in both.
        what = f"{error.filename or folder}: {error.strerror or error}"
        advice = "give another trainer.default_local_dir, or make room"
        return [*found, Finding(FAILURE, "run folder", what, advice)]


@contextmanager
def _folder_within(folder: Path) -> Iterator[Path]:
    """A new folder in the run folder for all files of the check; removed at the end, with the run folder if that is new."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    own = folder / f".doctor-{secrets.token_hex(4)}"
    try:
        own.mkdir(parents=True)
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        for path in new:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def _machines(config: TrainConfig, folder: Path) -> list[Finding]:
    """Findings about the machines of the job, and the links between its devices."""
    try:
        check_devices(config)
    except ValueError as error:
        return [Finding(FAILURE, "devices", str(error), SAME_MESSAGE)]
    devices = resolve_batches(config).devices
    with open_engine_run(config.trainer.ray_address, devices, folder) as run:
        try:
            open_pools(run, config.resource_pools)
        except ValueError as error:
            advice = "see resource_pools, trainer.nnodes, n_gpus_per_node"
            return [Finding(FAILURE, "devices", str(error), advice)]
        on_gpus = any(pool.use_gpu for pool in run.pools.values())
        nodes = _nodes(run, folder)
        taken = Counter(device.node_id for pool in run.pools.values() for device in pool.devices)
        gpus = [taken[node] if on_gpus or not taken[node] else None for node in nodes]
        found = check_nodes(list(nodes.values()), gpus, _needs(config))
        return found + [_bandwidth(run, name) for name in run.pools]


def _inputs(config: TrainConfig) -> Iterator[Finding]:
    """Findings about the configuration, the models and the data, read as the run reads them."""
    try:
        preflight(config)
        config = fetch_models(resolve(config))
        yield Finding(OK, "configuration", "every key is read, and they fit each other")
        found, warnings = _data(config)
        yield Finding(OK, "models and data", found)
        for warning in warnings:
            yield Finding(WARNING, "lengths", warning, "lower the length, or take another model")
    except (ValueError, OSError) as error:
        yield Finding(FAILURE, "configuration, models, data", str(error), SAME_MESSAGE)


def _data(config: TrainConfig) -> tuple[str, tuple[str, ...]]:
    """A summary of the run's inputs, and warnings; raises as the run would."""
    if config.trainer.train_only is not None:
        models = load_model_inputs(config)
        steps = count_steps(Path(config.trainer.train_only), config.trainer.total_training_steps)
        return f"trajectories of {steps} steps", models.warnings
    with make_scorer(config) as scorer:
        inputs = load_train_inputs(config, scorer)
        return f"{inputs.loader.num_rows} prompts, {inputs.num_steps} steps", inputs.warnings


def _needs(config: TrainConfig) -> dict[str, int]:
    """Estimated bytes that a node should have free."""
    policy, pool = config.actor_rollout_ref, config.resource_pools
    per_node = max(one.n_gpus_per_node for one in pool.values())
    roles = 1 + (config.critic is not None)
    engines = max(1, per_node // policy.rollout.tensor_model_parallel_size)
    buckets = 2 * (policy.rollout.sync_bucket_mb << 20)
    needed = {
        "memory": per_node * roles * RANK_BYTES + engines * ENGINE_BYTES,
        "shared_memory": per_node * buckets,
        "disk": GIB,
    }
    trainer = config.trainer
    if trainer.save_freq > 0 or trainer.save_minutes is not None:
        num_saved = _num_saved(policy.model.path, policy.model.lora)
        if config.critic is not None:
            num_saved += _num_saved(config.critic.model.path, config.critic.model.lora)
        size = CHECKPOINT_BYTES_PER_PARAMETER * num_saved
        if trainer.save_hf and policy.model.lora.rank:  # the merged model is larger than the adapters' states
            size += EXPORTED_BYTES_PER_PARAMETER * _num_saved(policy.model.path, LoraConfig())
        kept = (trainer.max_ckpt_to_keep or 1) + 1  # the one being written exists next to the kept ones
        needed["disk"] += kept * size
    return needed


def _num_saved(path: str, lora: LoraConfig) -> int:
    """The parameters of a model that its checkpoints have: all of them, or its adapters'."""
    model = read_model_config(path)
    shapes = logical_adapters(model, lora) if lora.rank else logical_tensors(model)
    return sum(map(prod, shapes.values()))


def _nodes(run: Run, folder: Path) -> dict[str, NodeFacts]:
    """Facts of this machine, and of every machine on which the run has devices, by Ray's id of it.

    Raises:
        RuntimeError: a machine does not answer.
    """
    facts = {}
    own = ray.get_runtime_context().get_node_id()
    ids = dict.fromkeys([own, *(device.node_id for pool in run.pools.values() for device in pool.devices)])
    for node_id in ids:
        told = on_node(node_id, NODE_SECONDS, node_facts, str(folder.resolve()), PROBE_FILE)
        if told is None:
            raise RuntimeError(f"node {node_id} did not answer within {NODE_SECONDS:g} s")
        # Compared as soon as it is told: the next machine may take seconds to answer.
        facts[node_id] = replace(told, clock=told.clock - time.time())
    return facts


def _bandwidth(run: Run, pool: str) -> Finding:
    """Whether all devices of a pool reach each other in one process group, and at which bandwidth."""
    devices = run.pools[pool]
    what = f"devices of pool {pool}"
    group = run.start(
        WorkerGroup("probe", PROBE, devices, len(devices), {"timeout": PROBE_TIMEOUT}, run.log_dir)
    )
    try:
        run.wait(group.started)
        seconds = max(run.wait(group.call("all_reduce", PROBE_BYTES, PROBE_ROUNDS)))
    except RuntimeError as error:
        advice = (
            "look at the interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), firewalls, ports 20000 to 32767"
        )
        return Finding(FAILURE, what, str(error).splitlines()[0], advice)
    finally:
        group.shutdown()
        run.groups.remove(group)
    world = len(devices)
    if world == 1:
        return Finding(OK, what, "one device")
    rate = bus_bandwidth(PROBE_BYTES, world, seconds) / 1e9
    return Finding(OK, what, f"{world} ranks reach each other, all-reduce at {rate:.2f} GB/s a link")


def print_findings(findings: list[Finding]) -> int:
    """Print findings as a table; returns the exit code: 1 if there is a failure."""
    console = Console()
    table = Table("", "what", "found", "what to do", box=box.SIMPLE_HEAD, pad_edge=False)
    for finding in findings:
        level = f"[{STYLES[finding.level]}]{finding.level}[/]"
        table.add_row(level, *map(escape, (finding.what, finding.found, finding.advice)))
    console.print(table)
    for command in dict.fromkeys(finding.command for finding in findings if finding.command):
        console.print(command, soft_wrap=True, highlight=False, markup=False)
    counts = {level: sum(finding.level == level for finding in findings) for level in (FAILURE, WARNING)}
    console.print(f"{counts[FAILURE]} failures, {counts[WARNING]} warnings")
    return 1 if counts[FAILURE] else 0
