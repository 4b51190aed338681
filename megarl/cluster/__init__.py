"""Ray, and nothing but Ray: where processes run, how the controller calls them, how it learns that one died.

What the room promises:

- one process per rank, placed on the devices of a `ResourcePool`; several `WorkerGroup`s may share a pool;
- user methods run in the main thread of their process, one at a time, in the order in which they were called;
- arguments that are `ObjectRef`s are resolved from the shared object store without a copy;
- `wait` raises within seconds when any process of any group that it watches dies, also when the others hang, and
  names role, rank, host, cause and the last lines of that process's own log;
- with a `Watch` it does so too when a process is stopped, or when no process that is waited for works any more;
- a report tells everything there is about a failure: the stacks of all processes, on all machines, and the ends of their logs;
- nothing outlives the controller: neither workers nor the processes that workers started, even after `kill -9`.

It knows nothing of models, algorithms or torch: a worker class is named by its import path and is imported
in its own process only.

Files: `cluster` starts or joins Ray, `fork_server` makes processes whose imports are done, `pool` reserves devices, `worker` is the
rank's process, `ranks` describes a rank and names its errors, `group` is the controller's handle on all ranks of a role, `relays`
calls large groups, `waiting` waits for calls and explains failures, `watch` finds hangs, `report` writes a failure's report, `spans`
collects the spans of all processes, `guard` cleans up after dead processes, `hosts` does small jobs on a given machine.
"""

from megarl.cluster.cluster import (
    Cluster,
    ClusterSetup,
    abandon_cluster,
    gpus_here,
    open_cluster_setup,
    ray_messages_in,
    start_cluster,
    stop_cluster,
)
from megarl.cluster.fork_server import ProcessKind
from megarl.cluster.group import WorkerGroup
from megarl.cluster.pool import Device, ResourcePool
from megarl.cluster.ranks import (
    RankInfo,
    RayFailed,
    RunFailure,
    WaitTimeout,
    WorkerDied,
    WorkerFailed,
    WorkerHung,
    WorkerLost,
)
from megarl.cluster.relays import group_kind
from megarl.cluster.report import write_report
from megarl.cluster.spans import SpanCollector
from megarl.cluster.waiting import loss_of, wait
from megarl.cluster.watch import Watch, ending_when_stuck
from megarl.cluster.worker import rank_environment

__all__ = [
    "Cluster",
    "ClusterSetup",
    "Device",
    "ProcessKind",
    "RankInfo",
    "RayFailed",
    "ResourcePool",
    "RunFailure",
    "SpanCollector",
    "WaitTimeout",
    "Watch",
    "WorkerDied",
    "WorkerFailed",
    "WorkerGroup",
    "WorkerHung",
    "WorkerLost",
    "abandon_cluster",
    "ending_when_stuck",
    "gpus_here",
    "group_kind",
    "loss_of",
    "open_cluster_setup",
    "rank_environment",
    "ray_messages_in",
    "start_cluster",
    "stop_cluster",
    "wait",
    "write_report",
]
