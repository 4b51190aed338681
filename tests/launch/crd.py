"""KubeRay's schema, closed to unknown fields, and the rules that its operator has in addition."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

HERE = Path(__file__).parent
TRIMMED = HERE / "rayjob_schema.json"
# The complete schema, if it lies next to a checkout of the project.
WHOLE = HERE.parents[2] / "shared/data/kuberay_crds/ray.io_rayjobs.yaml"


def trimmed_schema() -> dict[str, Any]:
    """The schema of a RayJob with the fields that megarl writes and their neighbours."""
    return _closed(json.loads(TRIMMED.read_text())["schema"])


def whole_schema() -> dict[str, Any]:
    """The complete schema of a RayJob, from its custom resource definition."""
    definition = yaml.load(WHOLE.read_text(), Loader=yaml.CSafeLoader)
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] == "v1")
    return _closed(version["schema"]["openAPIV3Schema"])


def schema_problems(resource: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """The keys of a RayJob's or RayCluster's manifest that the schema of a RayJob does not allow."""
    if resource["kind"] == "RayCluster":
        schema = {**schema["properties"]["spec"]["properties"]["rayClusterSpec"]}
        resource = resource["spec"]
    else:
        schema = {**schema, "properties": {**schema["properties"], "metadata": {"type": "object"}}}
    return [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(resource)
    ]


def operator_problems(resource: dict[str, Any]) -> list[str]:
    """The rules that a resource breaks: the operator's (its ray-operator/controllers/ray/utils/validation.go) and Kubernetes' own."""
    spec, name = resource["spec"], resource["metadata"]["name"]
    cluster = spec if resource["kind"] == "RayCluster" else spec["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    templates = [group["template"] for group in groups]
    rules = {
        "name is at most 47 characters": len(name) <= 47,
        "name is a DNS label": bool(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)),
        "a group has containers": all(template["spec"]["containers"] for template in templates),
        "resources are said once": all(
            not ("num-cpus" in group["rayStartParams"] and group.get("resources")) for group in groups
        ),
        "labels are no ray start parameters": all(
            "labels" not in group["rayStartParams"] for group in groups
        ),
        "ray start parameters are texts": all(
            isinstance(value, str) for group in groups for value in group["rayStartParams"].values()
        ),
        "tokens need Ray 2.52": "authOptions" not in cluster
        or tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0),
        "replicas are within their bounds": all(
            group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
            for group in cluster["workerGroupSpecs"]
        ),
    }
    if resource["kind"] == "RayJob":
        submitter = spec["submitterPodTemplate"]["spec"]
        templates = [*templates, spec["submitterPodTemplate"]]
        rules |= {
            "one cluster": "clusterSelector" not in spec and cluster is not None,
            "ttl is not negative": spec["ttlSecondsAfterFinished"] >= 0,
            "deadline is positive": spec.get("activeDeadlineSeconds", 1) > 0,
            "backoff limit is not negative": spec["backoffLimit"] >= 0,
            "suspended jobs shut down": spec["shutdownAfterJobFinishes"],
            "the submitter's pod is a Job's": submitter["restartPolicy"] in ("Never", "OnFailure"),
            "the submitter's command is the operator's": "command" not in submitter["containers"][0],
        }
    for template in templates:
        pod = template["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        mounts = [mount for container in pod["containers"] for mount in container.get("volumeMounts", [])]
        paths = [mount["mountPath"] for mount in mounts]
        rules |= {
            "mounts are of volumes": {mount["name"] for mount in mounts} == volumes,
            "each path is mounted once": len(paths) == len(set(paths)),
            "names of volumes are labels": all(
                re.fullmatch(r"[a-z0-9][-a-z0-9]{0,62}", name) for name in volumes
            ),
            "limits of devices are their requests": all(
                container["resources"]["limits"] == container["resources"]["requests"]
                for container in pod["containers"]
            ),
        } | {key: False for key, holds in rules.items() if not holds}
    return [rule for rule, holds in rules.items() if not holds]


def _closed(schema: Any) -> Any:
    """The schema with unknown fields refused, integers or texts where they may be either, and defaults not required."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(value) for name, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string") is True:
        closed.pop("type", None)
        closed["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed["additionalProperties"] = False
        defaults = {name for name, value in schema["properties"].items() if "default" in value}
        if isinstance(schema.get("required"), list):
            closed["required"] = [name for name in schema["required"] if name not in defaults]
    return closed
