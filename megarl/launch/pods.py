"""The pods of a Ray cluster on Kubernetes: its head, which has no device, and its workers."""

from __future__ import annotations

import re
from typing import Any

from megarl.launch.environment import read_variables
from megarl.launch.job import Job

RECIPE_FOLDER = "/etc/megarl"
WORK_DIR = "/workspace"  # of the image
_CPUS_PER_DEVICE, _GIB_PER_DEVICE = 8, 64
_RECIPE_VOLUME, _SHARED_MEMORY_VOLUME = "recipe", "shared-memory"
_SHARED_MEMORY = "/dev/shm"
# As Ray has them without an operator, but below the ephemeral range (32768 on), where others may be given them first.
_RAY_START = {
    "node-manager-port": "6380",
    "object-manager-port": "6381",
    "min-worker-port": "10002",
    "max-worker-port": "19999",
}


def work_dir(job: Job) -> str:
    """The folder in the pods that the recipe's relative paths count from."""
    return job.launch.work_dir or WORK_DIR


def pod_mounts(job: Job) -> list[tuple[str, str, bool]]:
    """(claim, where in the pods, whether it is read only) of each volume.

    Raises:
        ValueError: an entry that is not CLAIM:TARGET or CLAIM:TARGET:ro; two for one target; a target that is megarl's own.
    """
    mounts = []
    for text in job.launch.kuberay.mount:
        found = re.fullmatch(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?):(/[^:]*?)/?(:ro)?", text)
        if found is None:
            raise ValueError(
                f"kuberay.mount: expected CLAIM:TARGET or CLAIM:TARGET:ro, with the name of a PersistentVolumeClaim and an "
                f"absolute path, found {text!r}"
            )
        mounts.append((found[1], found[3], found[4] is not None))
    targets = [target for _, target, _ in mounts]
    double = {target for target in targets if targets.count(target) > 1}
    if double:
        raise ValueError(f"kuberay.mount: {', '.join(sorted(double))} is the target of several claims")
    own = {RECIPE_FOLDER: "the recipe", _SHARED_MEMORY: "shared memory"}
    for target in own.keys() & set(targets):
        raise ValueError(f"kuberay.mount: {target} has {own[target]} in the pods: choose another target")
    return mounts


def head_group(job: Job) -> dict[str, Any]:
    """The head: Ray's servers, the controller and the processes of rewards; none of Ray's devices."""
    kuberay = job.launch.kuberay
    resources = _resources(kuberay.head_cpus, kuberay.head_memory)
    return {
        "rayStartParams": {**_RAY_START, "num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
        "template": _pod(job, "ray-head", resources, shared_memory="8Gi"),
    }


def worker_group(job: Job) -> dict[str, Any]:
    """The workers: `job.nodes` pods of `job.devices` devices each, no more and no fewer."""
    kuberay = job.launch.kuberay
    cpus = kuberay.cpus_per_node or _CPUS_PER_DEVICE * job.devices
    resources = _resources(cpus, kuberay.memory_per_node or f"{_GIB_PER_DEVICE * job.devices}Gi")
    gpus = 0 if job.launch.cpu else job.devices
    if gpus:
        resources["limits"][kuberay.gpu_resource] = resources["requests"][kuberay.gpu_resource] = str(gpus)
    if kuberay.rdma_resource is not None:
        cards = str(kuberay.rdma_per_node)
        resources["limits"][kuberay.rdma_resource] = resources["requests"][kuberay.rdma_resource] = cards
    # Without GPUs a device is one of Ray's CPUs, whatever number of cores the pod has.
    slots = str(cpus if gpus else job.devices)
    template = _pod(job, "ray-worker", resources, shared_memory=kuberay.shared_memory)
    container = template["spec"]["containers"][0]
    if kuberay.rdma_resource is not None:  # RDMA pins memory
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    if gpus:
        template["spec"]["tolerations"] = [
            {"key": kuberay.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        ]
    return {
        "groupName": "workers",
        "replicas": job.nodes,
        "minReplicas": job.nodes,
        "maxReplicas": job.nodes,
        "numOfHosts": 1,
        "rayStartParams": {**_RAY_START, "num-cpus": slots, "num-gpus": str(gpus)},
        "template": template,
    }


def submitter_pod(job: Job) -> dict[str, Any]:
    """The pod that hands the run to the cluster and shows its output."""
    template = _pod(job, "ray-job-submitter", _resources(1, "1Gi"), shared_memory=None)
    template["spec"]["restartPolicy"] = "Never"
    return template


def _pod(
    job: Job, name: str, resources: dict[str, dict[str, str]], shared_memory: str | None
) -> dict[str, Any]:
    """A pod of one container; without shared memory it has no volumes either."""
    launch, user = job.launch, job.launch.kuberay.user
    container: dict[str, Any] = {
        "name": name,
        "image": launch.image,
        "env": [{"name": key, "value": value} for key, value in _variables(job).items()],
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if launch.kuberay.secret:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in launch.kuberay.secret]
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            # Claims have many files: their owners are changed only where the top folder's is another.
            "fsGroupChangePolicy": "OnRootMismatch",
        },
        "containers": [container],
    }
    if launch.kuberay.pull_secret:
        spec["imagePullSecrets"] = [{"name": secret} for secret in launch.kuberay.pull_secret]
    if launch.kuberay.service_account is not None:
        spec["serviceAccountName"] = launch.kuberay.service_account
    if launch.kuberay.priority is not None:
        spec["priorityClassName"] = launch.kuberay.priority
    if shared_memory is not None:
        container["workingDir"] = work_dir(job)
        container["volumeMounts"], spec["volumes"] = _volumes(job, shared_memory)
    return {"spec": spec}


def _volumes(job: Job, shared_memory: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A container's mounts and its pod's volumes. A claim that is mounted twice is one volume."""
    mounts: list[dict[str, Any]] = [
        {"name": _RECIPE_VOLUME, "mountPath": RECIPE_FOLDER, "readOnly": True},
        {"name": _SHARED_MEMORY_VOLUME, "mountPath": _SHARED_MEMORY},
    ]
    volumes: dict[str, dict[str, Any]] = {
        _RECIPE_VOLUME: {"configMap": {"name": recipe_name(job)}},
        _SHARED_MEMORY_VOLUME: {"emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
    }
    for claim, target, read_only in pod_mounts(job):
        source = {"persistentVolumeClaim": {"claimName": claim}}
        # A label of 63 characters; claims that differ only behind its end, or in a dot, still have a volume each.
        name = label = f"claim-{claim.replace('.', '-')}"[:60].rstrip("-")
        while volumes.setdefault(name, source) != source:
            name = f"{label}-{len(volumes)}"
        mounts.append({"name": name, "mountPath": target} | ({"readOnly": True} if read_only else {}))
    return mounts, [{"name": name, **source} for name, source in volumes.items()]


def recipe_name(job: Job) -> str:
    """Of the ConfigMap that has the recipe."""
    return f"{job.launch.name}-recipe"


def _variables(job: Job) -> dict[str, str]:
    """The user's over those that a run needs."""
    own = {
        # Ray runs its workers at nice 15, behind everything else in the pod: here they are what the pod is for.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return own | ({} if job.launch.env_file is None else read_variables(job.launch.env_file))


def _resources(cpus: int, memory: str) -> dict[str, dict[str, str]]:
    """Requests and limits are the same: a pod that the node takes memory from would take the run with it."""
    amounts = {"cpu": str(cpus), "memory": memory}
    return {"requests": dict(amounts), "limits": dict(amounts)}
