"""Manifests for KubeRay: a RayJob (a cluster and its run) or a RayCluster alone, and their pods.

The head has no device; the workers have all of them.

Guarantees:
- a run is started once in a cluster: Ray is given it under one submission id, however often its submitter is started. Should
  a former cluster still have pods, a run folder has one writer (megarl/checkpoints);
- a job that fails is started again, in a new cluster, `retries` times, and goes on from its newest checkpoint;
- the whole recipe is in the manifest: a job that is started again is the same, whatever became of the file.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from megarl.config.schema.launch import KubeRayConfig
from megarl.launch.job import Job, check_image, matched, read_variables

RAY_VERSION = "2.60.0"  # of the image
_RECIPE_FILE = "recipe.yaml"
_SUBMITTER_RETRIES = 2  # each finds the run by its id, and only shows its output again
_MOUNT = re.compile(r"([a-z0-9](?:[-a-z0-9.]*[a-z0-9])?):(/[^:]*?)/?(:ro)?")
_QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?([KMGTP]i|[kMGTP])?")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DEVICE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)
RECIPE_FOLDER = "/etc/megarl"
WORK_DIR = "/workspace"  # of the image
_CPUS_PER_DEVICE, _GIB_PER_DEVICE = 8, 64
_RECIPE_VOLUME, _SHARED_MEMORY_VOLUME = "recipe", "shared-memory"
_SHARED_MEMORY = "/dev/shm"
# Ray's own defaults without an operator, except that all are below the ephemeral range (from 32768), in which another process may
# get a port first.
_RAY_START = {
    "node-manager-port": "6380",
    "object-manager-port": "6381",
    "min-worker-port": "10002",
    "max-worker-port": "19999",
}


def manifest(job: Job) -> list[dict[str, Any]]:
    """The ConfigMap with the recipe, and the RayJob or RayCluster.

    Raises:
        ValueError: the job lacks something, or has a value that Kubernetes refuses; or the run folder is on no volume.
    """
    _check(job)
    kuberay = job.launch.kuberay
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": recipe_name(job), "namespace": kuberay.namespace},
        "data": {_RECIPE_FILE: job.recipe_text()},
    }
    spec = _job_spec(job) if kuberay.kind == "RayJob" else _cluster_spec(job)
    resource = {"apiVersion": "ray.io/v1", "kind": kuberay.kind, "metadata": _metadata(job), "spec": spec}
    return [recipe, resource]


def entrypoint(job: Job) -> str:
    """The command of the run, in words without quotes, since the shells of two pods parse it."""
    return f"megarl {job.command} {RECIPE_FOLDER}/{_RECIPE_FILE} trainer.ray_address=auto"


def _job_spec(job: Job) -> dict[str, Any]:
    limit = {} if job.seconds is None else {"activeDeadlineSeconds": job.seconds}
    return {
        "entrypoint": entrypoint(job),
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": submitter_pod(job),
        "submitterConfig": {"backoffLimit": _SUBMITTER_RETRIES},
        "backoffLimit": job.launch.retries,
        "shutdownAfterJobFinishes": True,  # Kueue asks for it, too
        "ttlSecondsAfterFinished": job.launch.kuberay.ttl,
        **limit,
        "rayClusterSpec": _cluster_spec(job),
    }


def _cluster_spec(job: Job) -> dict[str, Any]:
    return {
        "rayVersion": RAY_VERSION,
        # Everybody who reaches a Ray cluster can run code in its pods, so the operator makes a token for its pods.
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": False,
        "headGroupSpec": head_group(job),
        "workerGroupSpecs": [worker_group(job)],
    }


def _metadata(job: Job) -> dict[str, Any]:
    kuberay = job.launch.kuberay
    labels = {"app.kubernetes.io/name": "megarl"}
    if kuberay.kueue is not None:
        labels["kueue.x-k8s.io/queue-name"] = kuberay.kueue
    if kuberay.volcano is not None:
        labels |= {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": kuberay.volcano}
    if kuberay.priority is not None:
        labels["ray.io/priority-class-name"] = kuberay.priority
    return {"name": job.launch.name, "namespace": kuberay.namespace, "labels": labels}


def _check(job: Job) -> None:
    kuberay = job.launch.kuberay
    if job.launch.image is None:
        raise ValueError("image is required on Kubernetes: --image, or the key image of the job's file")
    check_image(job.launch)
    if kuberay.kueue is not None and kuberay.volcano is not None:
        raise ValueError(
            f"kuberay.kueue={kuberay.kueue} and kuberay.volcano={kuberay.volcano}: both admit all pods or none; give one of "
            "them"
        )
    for name in ("memory_per_node", "shared_memory", "head_memory"):
        value = getattr(kuberay, name)
        if value is not None:
            matched(f"kuberay.{name}", value, _QUANTITY, "an amount such as 64Gi")
    _check_names(kuberay)
    folder = job.run_folder_in(work_dir(job))
    writable = [PurePosixPath(target) for _, target, read_only in pod_mounts(job) if not read_only]
    if not any(folder.is_relative_to(target) for target in writable):
        raise ValueError(
            f"trainer.default_local_dir={job.run_folder} is {folder} in the pods, which is on no volume that they share and can "
            f"write to (kuberay.mount: {', '.join(kuberay.mount) or 'none'}): its checkpoints would go with the pods"
        )


def _check_names(kuberay: KubeRayConfig) -> None:
    """Check names here: the server accepts a RayJob with wrong ones, and refuses its pods later, which the command does not notice."""
    names = {"service_account": [kuberay.service_account], "priority": [kuberay.priority]}
    for key, values in (names | {"secret": kuberay.secret, "pull_secret": kuberay.pull_secret}).items():
        for value in values:
            if value is not None:
                expected = "a name of lower-case letters, digits, hyphens and dots"
                matched(f"kuberay.{key}", value, _NAME, expected)
    for key, example in {"gpu_resource": "nvidia.com/gpu", "rdma_resource": "rdma/ib"}.items():
        value = getattr(kuberay, key)
        if value is not None:
            matched(f"kuberay.{key}", value, _DEVICE, f"a name such as {example}")


def work_dir(job: Job) -> str:
    """The folder in the pods to which the recipe's relative paths refer."""
    return job.launch.work_dir or WORK_DIR


def pod_mounts(job: Job) -> list[tuple[str, str, bool]]:
    """(claim, where in the pods, whether it is read only) of each volume.

    Raises:
        ValueError: an entry that is not CLAIM:TARGET or CLAIM:TARGET:ro; two for one target; a target that is megarl's own.
    """
    expected = (
        "CLAIM:TARGET or CLAIM:TARGET:ro, with the name of a PersistentVolumeClaim and an absolute path"
    )
    found = [matched("kuberay.mount", text, _MOUNT, expected) for text in job.launch.kuberay.mount]
    mounts = [(one[1], one[2], one[3] is not None) for one in found]
    targets = [target for _, target, _ in mounts]
    double = {target for target in targets if targets.count(target) > 1}
    if double:
        raise ValueError(f"kuberay.mount: {', '.join(sorted(double))} is the target of several claims")
    own = {RECIPE_FOLDER: "the recipe", _SHARED_MEMORY: "shared memory"}
    for target in own.keys() & set(targets):
        raise ValueError(f"kuberay.mount: {target} has {own[target]} in the pods: choose another target")
    return mounts


def head_group(job: Job) -> dict[str, Any]:
    """The head: Ray's servers, the controller and the processes of rewards, but no devices."""
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
    # Each device takes one of Ray's CPUs, whatever number of cores the pod has; without GPUs there are no further ones.
    slots = str(max(cpus, job.devices) if gpus else job.devices)
    # The pod itself, and its extra rights and tolerations for the hardware that it has.
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
        # Kubernetes reads $(NAME) as a variable's value, and $$ as one $.
        "env": [{"name": key, "value": value.replace("$", "$$")} for key, value in _variables(job).items()],
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
            # Claims have many files: their owners are changed only where the top folder has another owner.
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
        # A label has at most 63 characters; claims that differ only after its end, or in a dot, still get a volume each.
        name = label = f"claim-{claim.replace('.', '-')}"[:60].rstrip("-")
        while volumes.setdefault(name, source) != source:
            name = f"{label}-{len(volumes)}"
        mounts.append({"name": name, "mountPath": target} | ({"readOnly": True} if read_only else {}))
    return mounts, [{"name": name, **source} for name, source in volumes.items()]


def recipe_name(job: Job) -> str:
    """The name of the ConfigMap with the recipe."""
    return f"{job.launch.name}-recipe"


def _variables(job: Job) -> dict[str, str]:
    """Environment variables of the pods: a run's, and the user's, which take precedence."""
    own = {
        # By default Ray runs its workers at nice 15, behind everything else in the pod; here they are the purpose of the pod.
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return own | ({} if job.launch.env_file is None else read_variables(job.launch.env_file))


def _resources(cpus: int, memory: str) -> dict[str, dict[str, str]]:
    """Equal requests and limits: if a node reclaimed memory from a pod, the run would end with the pod."""
    amounts = {"cpu": str(cpus), "memory": memory}
    return {"requests": dict(amounts), "limits": dict(amounts)}
