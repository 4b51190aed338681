"""Manifests for KubeRay: a RayJob, which is cluster and run, or a RayCluster alone.

Guarantees:
- a run is started once in a cluster: Ray is given it under one submission id, however often its submitter is started. Should
  a former cluster still have pods, a run folder has one writer (megarl/checkpoints);
- a job that fails is started again, in a new cluster, `retries` times, and goes on from its newest checkpoint;
- all of the recipe is in the manifest: what is started again is the same, whatever became of the file.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

import yaml

from megarl.config.loading.document import YamlDumper
from megarl.config.schema.launch import KubeRayConfig
from megarl.launch.job import Job
from megarl.launch.pods import (
    RECIPE_FOLDER,
    head_group,
    pod_mounts,
    recipe_name,
    submitter_pod,
    work_dir,
    worker_group,
)

RAY_VERSION = "2.60.0"  # of the image
_RECIPE_FILE = "recipe.yaml"
_SUBMITTER_RETRIES = 2  # each finds the run by its id, and only shows its output again
_QUANTITY = re.compile(r"[1-9]\d*(\.\d+)?([KMGTP]i|[kMGTP])?")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DEVICE = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", re.ASCII)


class _Dumper(YamlDumper):
    """Texts of several lines as they are."""


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def manifest(job: Job) -> list[dict[str, Any]]:
    """The ConfigMap with the recipe, and the RayJob or RayCluster.

    Raises:
        ValueError: what the job lacks, or has that Kubernetes does not take; the run folder is on no volume.
    """
    _check(job)
    kuberay = job.launch.kuberay
    recipe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": recipe_name(job), "namespace": kuberay.namespace},
        "data": {_RECIPE_FILE: job.recipe_text()},
    }
    return [recipe, _ray_job(job) if kuberay.kind == "RayJob" else _ray_cluster(job)]


def manifest_text(job: Job) -> str:
    """The manifest as YAML."""
    return yaml.dump_all(
        manifest(job), Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True, width=110
    )


def entrypoint(job: Job) -> str:
    """The command of the run: plain words, since shells of two pods read them."""
    return f"megarl {job.command} {RECIPE_FOLDER}/{_RECIPE_FILE} trainer.ray_address=auto"


def _ray_job(job: Job) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "entrypoint": entrypoint(job),
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": submitter_pod(job),
        "submitterConfig": {"backoffLimit": _SUBMITTER_RETRIES},
        "backoffLimit": job.launch.retries,
        "shutdownAfterJobFinishes": True,  # Kueue asks for it, too
        "ttlSecondsAfterFinished": job.launch.kuberay.ttl,
    }
    if job.seconds is not None:
        spec["activeDeadlineSeconds"] = job.seconds
    spec["rayClusterSpec"] = _cluster_spec(job)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(job),
        "spec": spec,
    }


def _ray_cluster(job: Job) -> dict[str, Any]:
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _metadata(job),
        "spec": _cluster_spec(job),
    }


def _cluster_spec(job: Job) -> dict[str, Any]:
    return {
        "rayVersion": RAY_VERSION,
        # Whoever can talk to a Ray cluster can run code in its pods: the operator makes a token and gives it to them.
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
    if re.search(r"\s", job.launch.image):
        raise ValueError(f"image: expected the name of a container image, found {job.launch.image!r}")
    if kuberay.kueue is not None and kuberay.volcano is not None:
        raise ValueError(
            f"kuberay.kueue={kuberay.kueue} and kuberay.volcano={kuberay.volcano}: both admit all pods or none; give one of "
            "them"
        )
    for name in ("memory_per_node", "shared_memory", "head_memory"):
        value = getattr(kuberay, name)
        if value is not None and not _QUANTITY.fullmatch(value):
            raise ValueError(f"kuberay.{name}: expected an amount such as 64Gi, found {value!r}")
    _check_names(kuberay)
    folder = PurePosixPath(work_dir(job)) / job.run_folder
    writable = [PurePosixPath(target) for _, target, read_only in pod_mounts(job) if not read_only]
    if not any(folder.is_relative_to(target) for target in writable):
        raise ValueError(
            f"trainer.default_local_dir={job.run_folder} is {folder} in the pods, which is on no volume that they share and can "
            f"write to (kuberay.mount: {', '.join(kuberay.mount) or 'none'}): its checkpoints would go with the pods"
        )


def _check_names(kuberay: KubeRayConfig) -> None:
    """The server takes a RayJob whatever these are, and refuses its pods later, of which the command hears nothing."""
    names = {"service_account": [kuberay.service_account], "priority": [kuberay.priority]}
    for key, values in (names | {"secret": kuberay.secret, "pull_secret": kuberay.pull_secret}).items():
        for value in values:
            if value is not None and not _NAME.fullmatch(value):
                raise ValueError(
                    f"kuberay.{key}: expected a name of lower-case letters, digits, hyphens and dots, found {value!r}"
                )
    for key, example in {"gpu_resource": "nvidia.com/gpu", "rdma_resource": "rdma/ib"}.items():
        value = getattr(kuberay, key)
        if value is not None and not _DEVICE.fullmatch(value):
            raise ValueError(f"kuberay.{key}: expected a name such as {example}, found {value!r}")
