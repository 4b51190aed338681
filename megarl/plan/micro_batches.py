"""The size of a micro-batch where a configuration has none, and the line that says so.

On GPUs, of this machine or else of the cluster that the run joins, it is as large as their memory allows by the formulas of
`megarl plan memory`; elsewhere `resolve` has a rule that needs nothing but lengths. A run that goes on from a checkpoint keeps the size
that was chosen when it began, whatever GPUs it has now.
"""

from __future__ import annotations

from typing import Any, TypeVar

from megarl.config import EvalConfig, TrainConfig, TuningConfig, resolve
from megarl.config.resolve import CHOSEN_MULTIPLE, CHOSEN_TOKENS, lacks_size, least_tokens
from megarl.config.schema import with_value
from megarl.trainer.run.earlier_runs import CONFIG_FILE, checkpoint_to_resume
from megarl.util.gpus import Gpu, gpus_here
from megarl.util.yaml_loader import safe_load

C = TypeVar("C", bound=TrainConfig | TuningConfig | EvalConfig)

_ACTOR = "actor_rollout_ref.actor"
_NODE_SECONDS = 60.0  # that a machine may take to list its GPUs


def with_chosen_size(config: C) -> tuple[C, list[str]]:
    """The configuration with a size for its micro-batches, and lines about it: none where it has one.

    Args:
        config: unresolved, accepted by `preflight`.
    """
    if isinstance(config, EvalConfig) or not lacks_size(config):
        return config, []
    full = resolve(config)
    least, in_tokens = least_tokens(full), True
    if isinstance(full, TrainConfig):
        actor = full.actor_rollout_ref.actor
        in_tokens = actor.ppo_max_token_len_per_gpu is not None
        key = f"{_ACTOR}.ppo_{'max_token_len' if in_tokens else 'micro_batch_size'}_per_gpu"
        size = actor.ppo_max_token_len_per_gpu if in_tokens else actor.ppo_micro_batch_size_per_gpu
    else:
        key, size = "max_token_len_per_gpu", full.max_token_len_per_gpu
    why = f"{CHOSEN_MULTIPLE} times the {least} tokens that it must hold, up to {CHOSEN_TOKENS} tokens"
    saved = _saved_size(full, key)
    if saved is not None and saved >= (least if in_tokens else 1):
        size, why = saved, "as in the checkpoint that the run goes on from"
    elif gpus := gpus_here() or _gpus_of_cluster(full):
        limit = min(gpu.memory for gpu in gpus)
        # Here, because it takes torch, and most runs give a size.
        from megarl.plan.memory import fitting_tokens

        tokens = fitting_tokens(config, least, limit)
        size = tokens if in_tokens else tokens // least
        why = f"{tokens // least} times the {least} tokens that it must hold, by the memory of a GPU ({limit / (1 << 30):.0f} GiB)"
    return with_value(config, key, size), [f"{key}={size} is chosen: {why}"]


def _gpus_of_cluster(full: TrainConfig | TuningConfig) -> tuple[Gpu, ...]:
    """The GPUs of one machine of the cluster that the run joins, for a controller on a machine without any, such as the head's pod on
    Kubernetes; empty: there is no cluster, it has none, or the machine does not answer.

    Raises:
        ConnectionError: as `start_cluster`.
    """
    trainer = full.trainer
    if trainer.ray_address is None:
        return ()
    # Here, because it takes Ray, which most runs need later.
    from megarl.cluster import start_cluster, stop_cluster
    from megarl.cluster.hosts import living_nodes, on_node

    cluster = start_cluster(trainer.ray_address, 1, trainer.default_local_dir)
    try:
        nodes = [node["NodeID"] for node in living_nodes() if node["Resources"].get("GPU", 0) > 0]
        return (on_node(min(nodes), _NODE_SECONDS, gpus_here) or ()) if nodes else ()
    finally:
        stop_cluster(cluster)


def _saved_size(full: TrainConfig | TuningConfig, key: str) -> int | None:
    """The size in the checkpoint that the run goes on from; None: there is no checkpoint, or no such size in it."""
    folder = checkpoint_to_resume(full)
    value: Any = None if folder is None else safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int) else None
