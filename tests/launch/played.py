"""Simulations of the parts of a cluster that kubernetes.py lacks: KubeRay's operator, a scheduler, and a kubelet whose pods run nothing.

The operator makes the objects that its user sees, through the API server: for a RayJob a RayCluster and a Job of its name, for a RayCluster its pods.
Each object belongs to the object that it was made for. Pods are the templates with labels: the real operator adds commands, probes, an init container
and the token, makes the Job once the cluster is up, and refuses some objects that are accepted here (crd.py has those rules).
"""

import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Api = Any  # kubernetes.Api; that module imports this one
LOG = "step 1 of 8\n"
NODE = "played"


@contextmanager
def playing(api: Api, key: Path, certificate: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Simulate all parts until the context ends: (the API server's refusals, the logs that it asked for)."""
    refused: list[str] = []
    stop = threading.Event()
    with _kubelet(key, certificate) as (port, logs_asked), ThreadPoolExecutor(1) as pool:
        api("POST", "/api/v1/nodes", _node(port))
        future = pool.submit(_play, api, stop, refused)
        try:
            yield refused, logs_asked
        finally:
            stop.set()
            future.result()  # raises the error that ended the simulation


def _play(api: Api, stop: threading.Event, refused: list[str]) -> None:
    made: set[str] = set()
    while not stop.wait(0.2):
        for plural, make in {"rayjobs": _of_job, "rayclusters": _of_cluster}.items():
            for one in api("GET", f"/apis/ray.io/v1/{plural}")["items"]:
                meta = one["metadata"]
                if meta["uid"] in made or "deletionTimestamp" in meta:
                    continue
                made.add(meta["uid"])
                try:
                    make(api, one)
                except Exception as error:
                    refused.append(f"{meta['name']}: {error}")
        for pod in api("GET", "/api/v1/pods")["items"]:
            _run(api, pod)


def _of_job(api: Api, job: dict[str, Any]) -> None:
    spec, meta = job["spec"], job["metadata"]
    space, owner = meta["namespace"], _owner(job)
    cluster = api(
        "POST", f"/apis/ray.io/v1/namespaces/{space}/rayclusters",
        {"apiVersion": "ray.io/v1", "kind": "RayCluster", "spec": spec["rayClusterSpec"],
         "metadata": {"generateName": f"{meta['name']}-", "labels": meta.get("labels", {}), "ownerReferences": owner}},
    )  # fmt: skip
    submitter = {
        "backoffLimit": spec["submitterConfig"]["backoffLimit"],
        "template": spec["submitterPodTemplate"],
    }
    api(
        "POST", f"/apis/batch/v1/namespaces/{space}/jobs",
        {"metadata": {"name": meta["name"], "ownerReferences": owner}, "spec": submitter},
    )  # fmt: skip
    state = {
        "jobStatus": "RUNNING",
        "jobDeploymentStatus": "Running",
        "rayClusterName": cluster["metadata"]["name"],
    }
    api.patch(f"/apis/ray.io/v1/namespaces/{space}/rayjobs/{meta['name']}/status", {"status": state})


def _of_cluster(api: Api, cluster: dict[str, Any]) -> None:
    meta, spec = cluster["metadata"], cluster["spec"]
    groups = [("head", 1, spec["headGroupSpec"])]
    groups += [(group["groupName"], group["replicas"], group) for group in spec["workerGroupSpecs"]]
    for name, count, group in groups:
        pod = {
            "metadata": {
                "generateName": f"{meta['name']}-{name}-",
                "labels": {"ray.io/cluster": meta["name"], "ray.io/group": name},
                "ownerReferences": _owner(cluster),
            },
            "spec": group["template"]["spec"],
        }
        for _ in range(count):
            api("POST", f"/api/v1/namespaces/{meta['namespace']}/pods", pod)


def _owner(one: dict[str, Any]) -> list[dict[str, Any]]:
    meta = one["metadata"]
    return [
        {"apiVersion": one["apiVersion"], "kind": one["kind"], "name": meta["name"], "uid": meta["uid"],
         "controller": True, "blockOwnerDeletion": True}
    ]  # fmt: skip


def _run(api: Api, pod: dict[str, Any]) -> None:
    """The work of the scheduler and the kubelet: new pods run, and pods that should end are removed."""
    meta = pod["metadata"]
    path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
    try:
        if "deletionTimestamp" in meta:
            api("DELETE", path, {"gracePeriodSeconds": 0})
        elif "nodeName" not in pod["spec"]:
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            api("POST", f"{path}/binding", {"metadata": {"name": meta["name"]}, "target": target})
            started = {
                "state": {"running": {"startedAt": meta["creationTimestamp"]}},
                "ready": True,
                "started": True,
            }
            containers = [
                {"name": one["name"], "image": one["image"], "imageID": "", "restartCount": 0, **started}
                for one in pod["spec"]["containers"]
            ]
            state = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            api.patch(f"{path}/status", {"status": {**state, "containerStatuses": containers}})
    except Exception as error:
        if not str(error).startswith(("404", "409")):  # deleted or changed since: the next round tells
            raise


def _node(port: int) -> dict[str, Any]:
    return {
        "metadata": {"name": NODE},
        "status": {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


@contextmanager
def _kubelet(key: Path, certificate: Path) -> Iterator[tuple[int, list[str]]]:
    """A kubelet that has one line of output for every container: (its port, the paths that were requested)."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path.startswith("/containerLogs/") else 404)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            self.wfile.write(LOG.encode())

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()
