"""How a job is given to a cluster: the keys of a job's file, which are also the options of `megarl launch`."""

# Every default here is made by dataclasses.field, by `option` and `section`.
# ruff: noqa: RUF009

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megarl.config.schema import field_types, members, option, section, section_type


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Slurm."""

    partition: str | None = option("Where the job runs; null: Slurm's default.", None)
    account: str | None = option("Who pays for it.", None)
    qos: str | None = option("Its quality of service.", None)
    gres: str | None = option(
        "A generic resource of each node, such as gpu:h100:8, where --gpus-per-node is not what a site uses.",
        None,
    )
    cpus_per_node: int | None = option(
        "Cores of each node; null: whole nodes (--exclusive --mem=0).", None, ge=1
    )
    sbatch: tuple[str, ...] = option("Further options of sbatch, such as --constraint=h100.", ())
    container: str = option(
        "What runs the image: pyxis (with Enroot), apptainer, or none, where every node has megarl itself.",
        "none",
        choices=("none", "pyxis", "apptainer"),
    )
    mount: tuple[str, ...] = option(
        "SOURCE:TARGET or SOURCE:TARGET:ro, a folder of the hosts and its place in the container.", ()
    )
    interface: str | None = option(
        "The network interface that the nodes share, for Ray, gloo and NCCL; null: the one that a node's name is of.",
        None,
    )
    signal_seconds: int = option(
        "So long before the time limit the run is told to save and end; it is then queued again.", 300, ge=0
    )
    start_seconds: int = option("Seconds that the nodes may take to come together.", 300, ge=1)
    logs: str = option(
        "Each job's logs go into a folder of its number there, on a file system that the nodes share.",
        "outputs/slurm",
        is_path=True,
    )


@dataclass(frozen=True, kw_only=True)
class KubeRayConfig:
    """Kubernetes with the KubeRay operator."""

    kind: str = option(
        "RayJob: cluster and run, which end together; RayCluster: the cluster alone.",
        "RayJob",
        choices=("RayJob", "RayCluster"),
    )
    namespace: str = option("Where it runs.", "default")
    mount: tuple[str, ...] = option(
        "CLAIM:TARGET or CLAIM:TARGET:ro, a PersistentVolumeClaim that all pods can mount and its place in them.",
        (),
    )
    secret: tuple[str, ...] = option("Secrets whose keys become environment variables.", ())
    pull_secret: tuple[str, ...] = option("Secrets to pull the image with.", ())
    service_account: str | None = option("Of the pods; null: the namespace's default.", None)
    cpus_per_node: int | None = option("Cores of each worker pod; null: 8 for each device.", None, ge=1)
    memory_per_node: str | None = option(
        "Memory of each worker pod, such as 900Gi, shared memory included; null: 64 GiB for each device.",
        None,
    )
    shared_memory: str = option("Of each worker pod, at /dev/shm, such as 64Gi.", "32Gi")
    head_cpus: int = option("Cores of the head's pod: the controller, and the processes of rewards.", 8, ge=1)
    head_memory: str = option("Memory of the head's pod, such as 64Gi.", "64Gi")
    gpu_resource: str = option("What a GPU is called.", "nvidia.com/gpu")
    rdma_resource: str | None = option(
        "What a network card for RDMA is called, such as rdma/ib; null: none is asked for.", None
    )
    rdma_per_node: int = option("Cards of that kind for each worker pod.", 1, ge=1)
    kueue: str | None = option("The Kueue LocalQueue that admits all pods or none.", None)
    volcano: str | None = option("The Volcano queue whose scheduler starts all pods or none.", None)
    priority: str | None = option("The PriorityClass of the pods.", None)
    user: int = option(
        "The user and group of all processes; the image's own is 10001.", 10001, ge=1, le=2147483647
    )
    ttl: int = option("Seconds for which the finished RayJob's pods are kept.", 600, ge=0)


@dataclass(frozen=True, kw_only=True)
class SkyPilotConfig:
    """Clouds and Kubernetes by SkyPilot."""

    kind: str = option(
        "job: a managed job, whose machines end with it, and which is started again; cluster: machines that stay.",
        "job",
        choices=("job", "cluster"),
    )
    accelerator: str | None = option("The kind of GPU, such as H100, H200 or A100-80GB.", None)
    infra: tuple[str, ...] = option(
        "Where it may run, such as kubernetes or aws/us-east-1; none: wherever it is cheapest.", ()
    )
    spot: bool = option("Machines that can be taken away, for less.", False)
    cpus_per_node: int | None = option("Cores of each machine, at least.", None, ge=1)
    memory_per_node: int | None = option("GiB of memory of each machine, at least.", None, ge=1)
    disk_size: int | None = option("GiB of each machine's own disk; null: as SkyPilot has it.", None, ge=1)
    network_tier: str | None = option(
        "best: the fastest network between the machines that a cloud has.",
        None,
        choices=("standard", "best"),
    )
    mount: tuple[str, ...] = option(
        "VOLUME:TARGET, a volume of SkyPilot's and its place on all machines; the run folder lies on one.", ()
    )
    bucket: tuple[str, ...] = option(
        "ADDRESS:TARGET, a bucket such as s3://models and its place on all machines, for what is read only.",
        (),
    )
    secret: tuple[str, ...] = option(
        "Environment variables that are secret; taken from the command's own.", ()
    )
    setup: str | None = option(
        "Where no image is given: the commands that install megarl on a machine, in a copy of this checkout.",
        None,
    )
    start_seconds: int = option("Seconds that the nodes may take to come together.", 600, ge=1)


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """One job, whatever cluster it runs on."""

    name: str | None = option("The job's name; null: the recipe's.", None)
    nodes: int | None = option("Nodes; null: trainer.nnodes.", None, ge=1)
    gpus_per_node: int | None = option("Devices a node; null: trainer.n_gpus_per_node.", None, ge=1)
    cpu: bool = option("The nodes have no GPUs: the devices are processes.", False)
    time: str | None = option(
        "Time limit: minutes, HH:MM:SS or D-HH:MM:SS; null: as the cluster has it.", None
    )
    image: str | None = option("The container image.", None)
    work_dir: str | None = option(
        "The folder that the recipe's relative paths count from; null: the working directory (slurm), /workspace (kuberay, skypilot).",
        None,
    )
    env_file: str | None = option(
        "Environment variables of all processes: a file of lines NAME=value, taken as they are.",
        None,
        is_path=True,
    )
    retries: int = option(
        "How often a job that was preempted, or lost a node, is started again; it goes on from its newest checkpoint.",
        3,
        ge=0,
    )
    slurm: SlurmConfig = section("Slurm.", SlurmConfig)
    kuberay: KubeRayConfig = section("Kubernetes with the KubeRay operator.", KubeRayConfig)
    skypilot: SkyPilotConfig = section("Clouds and Kubernetes by SkyPilot.", SkyPilotConfig)


TARGETS = {
    "local": ("on this machine, as `megarl train` would", None),
    "slurm": ("as a job of Slurm's, by sbatch", SlurmConfig),
    "kuberay": ("on Kubernetes with the KubeRay operator, by kubectl", KubeRayConfig),
    "skypilot": ("on clouds or Kubernetes as a task of SkyPilot's, by sky", SkyPilotConfig),
}
_GIVEN = "launch."  # before the dotted key in the name of an option's value


def add_launch(
    commands: argparse._SubParsersAction,
    recipes: Sequence[str],
    run: Callable[[argparse.Namespace], int | None],
) -> None:
    """Add `megarl launch TARGET RECIPE`, with LaunchConfig's keys as options (`launch_keys` reads them).

    Args:
        recipes: the commands that run a recipe, the default first.
    """
    text = "run a recipe on this machine, on Slurm, on Kubernetes or by SkyPilot (docs/launch.md)"
    targets = commands.add_parser("launch", help=text, description=text).add_subparsers(
        required=True, metavar="where", dest="target"
    )
    for name, (text, schema) in TARGETS.items():
        target = targets.add_parser(name, help=text, description=f"Run a recipe {text}.")
        target.add_argument("recipe", help="YAML file, or recipe:NAME (see `megarl recipes`)")
        target.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
        )
        target.add_argument(
            "--command",
            choices=recipes,
            default=recipes[0],
            help=f"whose recipe it is (default: {recipes[0]})",
        )
        target.add_argument("--job", metavar="FILE", help="YAML file of the options below, as keys")
        target.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
        _add_keys(target, LaunchConfig, "")
        if schema is not None:
            _add_keys(target, schema, f"{name}.")
        target.set_defaults(run=run)


def _add_keys(parser: argparse.ArgumentParser, schema: type, prefix: str) -> None:
    for member in fields(schema):
        kind = field_types(schema)[member.name]
        if section_type(kind) is not None:
            continue
        kinds = members(kind)
        help = member.metadata["help"].replace("%", "%%")
        options: dict[str, Any] = {"action": "store_true"}
        if bool not in kinds:
            options = {
                "action": "append" if any(typing.get_origin(one) is tuple for one in kinds) else "store",
                "type": int if int in kinds else str,
                "metavar": "N" if int in kinds else "TEXT",
                "choices": member.metadata["choices"],
            }
        flag, key = f"--{member.name.replace('_', '-')}", f"{_GIVEN}{prefix}{member.name}"
        parser.add_argument(flag, dest=key, default=argparse.SUPPRESS, help=help, **options)


def launch_keys(options: argparse.Namespace) -> dict[str, Any]:
    """LaunchConfig's keys that are given among the options of `megarl launch`: dotted key -> value."""
    return {key.removeprefix(_GIVEN): value for key, value in vars(options).items() if key.startswith(_GIVEN)}
