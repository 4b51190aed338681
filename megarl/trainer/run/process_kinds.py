"""The kinds of processes that a run has several of, and what they import (see cluster/fork_server.py)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megarl.cluster import ClusterSetup, ProcessKind, open_cluster_setup, rank_environment
from megarl.config import EvalConfig, RolloutConfig, TrainConfig, TuningConfig
from megarl.rollout.sglang.before_import import sglang_environment
from megarl.trainer.run.devices import check_devices

MODEL, ENGINE = "model", "engine"
# All that takes long, but Ray.
_MODEL = (
    "megarl.megatron.build",
    "torch._dynamo",  # which Megatron's model imports when it is made
    "megarl.weight_sync.sender",
    "megarl.weight_sync.sync_plan",
    "megarl.checkpoints.hf.adapters",
    "megarl.checkpoints.hf.export",
    "megarl.data.trajectories",
    "megarl.checkpoints",
    "megarl.config",
)
_ENGINE = (
    "megarl.rollout.sglang.process",
    "megarl.rollout.turns",
    "megarl.data.trajectories",
    "megarl.config",
)


@contextmanager
def cluster_setup_of(config: TrainConfig | TuningConfig | EvalConfig) -> Iterator[ClusterSetup | None]:
    """What a command's cluster needs before it is started; None: it joins one.

    Raises:
        ValueError: this machine has fewer devices than its cluster is asked for.
    """
    check_devices(config)
    if config.trainer.ray_address is not None:
        yield None
        return
    kinds = {} if isinstance(config, EvalConfig) else {MODEL: _kind(_MODEL, {})}
    if isinstance(config, EvalConfig):
        kinds[ENGINE] = _engine(config.rollout)
    elif isinstance(config, TrainConfig) and config.trainer.train_only is None:
        kinds[ENGINE] = _engine(config.actor_rollout_ref.rollout)
    with open_cluster_setup(kinds) as cluster_setup:
        yield cluster_setup


def _engine(rollout: RolloutConfig) -> ProcessKind:
    """The processes that own engines."""
    env = sglang_environment("cpu", rollout.tensor_model_parallel_size, nodes=rollout.nodes_per_engine)
    return _kind(_ENGINE, env)


def _kind(modules: tuple[str, ...], env: Mapping[str, str]) -> ProcessKind:
    return ProcessKind(modules, tuple((rank_environment((), single_machine=True) | env).items()))
