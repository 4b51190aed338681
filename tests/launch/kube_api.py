"""A stand-in for a Kubernetes API server that knows KubeRay's RayJobs: no pod runs, but kubectl talks to it as to a real one.

It keeps ConfigMaps and RayJobs, and refuses those that the API server or the operator would refuse (crd.py). It also does the part of the
operator's work that kubectl sees: a RayJob has a Job of its name, the Job has a pod, and the pod has printed something. Paths, kinds and answers
follow https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.launch.crd import operator_problems, schema_problems, trimmed_schema

Store = dict[tuple[str, str, str], dict[str, Any]]  # by resource, namespace and name
# By the path of a group and version: plural name -> (kind, short names).
RESOURCES = {
    "/api/v1": {"configmaps": ("ConfigMap", ["cm"]), "pods": ("Pod", ["po"])},
    "/apis/batch/v1": {"jobs": ("Job", [])},
    "/apis/ray.io/v1": {"rayjobs": ("RayJob", [])},
}
LOG = "step 1 of 8\n"
_OBJECT = re.compile(
    r"(?P<api>/api/v1|/apis/[^/]+/v1)/namespaces/(?P<space>[^/]+)/(?P<plural>[a-z]+)(/(?P<name>[^/]+)(?P<sub>/log)?)?"
)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store
    changes: list[str]  # "POST rayjobs quickstart", in their order

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if (found := discovery(path)) is not None:
            return self._answer(200, found)
        match = _OBJECT.fullmatch(path)
        if match is None:
            return self._fail(404, f"no path {path}")
        if match["sub"]:
            return self._answer(200, LOG)
        if match["name"]:
            stored = self.store.get((match["plural"], match["space"], match["name"]))
            return (
                self._fail(404, f'{match["plural"]} "{match["name"]}" not found')
                if stored is None
                else self._answer(200, stored)
            )
        labels = dict(pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair)
        items = [
            one
            for (plural, space, _), one in self.store.items()
            if (plural, space) == (match["plural"], match["space"])
            and labels.items() <= one["metadata"].get("labels", {}).items()
        ]
        kind = RESOURCES[match["api"]][match["plural"]][0]
        self._answer(
            200, {"kind": f"{kind}List", "apiVersion": _version(match["api"]), "metadata": {}, "items": items}
        )

    def do_POST(self) -> None:
        match, resource = _OBJECT.fullmatch(urlsplit(self.path).path), self._body()
        assert match is not None
        self._keep(match, resource, resource["metadata"]["name"])

    def do_PATCH(self) -> None:
        match = _OBJECT.fullmatch(urlsplit(self.path).path)
        assert match is not None and match["name"]
        stored = self.store[match["plural"], match["space"], match["name"]]
        self._keep(match, merged(stored, self._body()), match["name"])

    def do_DELETE(self) -> None:
        match = _OBJECT.fullmatch(urlsplit(self.path).path)
        assert match is not None
        self._body()
        self.changes.append(f"DELETE {match['plural']} {match['name']}")
        self._answer(200, self.store.pop((match["plural"], match["space"], match["name"])))

    def _keep(self, match: re.Match, resource: dict[str, Any], name: str) -> None:
        problems = problems_of(resource, match["space"])
        if problems:
            return self._fail(422, "; ".join(problems))
        number = len(self.changes) + 1
        resource["metadata"] |= {
            "uid": name,
            "resourceVersion": str(number),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        self.store[match["plural"], match["space"], name] = resource
        self.changes.append(f"{self.command} {match['plural']} {name}")
        if match["plural"] == "rayjobs":
            self.store |= operator_makes(match["space"], name)
        self._answer(201 if self.command == "POST" else 200, resource)

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")

    def _fail(self, code: int, message: str) -> None:
        reason = {404: "NotFound", 422: "Invalid"}[code]
        self._answer(
            code,
            {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": reason,
                "message": message,
                "code": code,
            },
        )

    def _answer(self, code: int, content: dict[str, Any] | str) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def discovery(path: str) -> dict[str, Any] | None:
    """A server's description of itself at a path; None: the path has no description."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        names = [api.split("/")[2] for api in RESOURCES if api != "/api/v1"]
        version = [{"groupVersion": f"{name}/v1", "version": "v1"} for name in names]
        groups = [
            {"name": name, "versions": [one], "preferredVersion": one}
            for name, one in zip(names, version, strict=True)
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path in RESOURCES:
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "shortNames": short,
             "verbs": ["create", "delete", "get", "list", "patch", "watch"]}
            for plural, (kind, short) in RESOURCES[path].items()
        ]  # fmt: skip
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": _version(path),
            "resources": resources,
        }
    if path == "/openapi/v3":
        return {"paths": {api[1:]: {"serverRelativeURL": f"/openapi/v3{api}"} for api in RESOURCES}}
    if path.removeprefix("/openapi/v3") in RESOURCES:
        api = path.removeprefix("/openapi/v3")
        return {
            "openapi": "3.0.0",
            "info": {"title": "stand-in", "version": "1"},
            "components": {},
            "paths": dict(_patches(api)),
        }
    return None


def _patches(api: str) -> Iterator[tuple[str, Any]]:
    """The declaration that the server itself checks fields: kubectl asks whether patches accept that option."""
    group = "" if api == "/api/v1" else api.split("/")[2]
    for plural, (kind, _) in RESOURCES[api].items():
        operation = {
            "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
            "responses": {},
            "x-kubernetes-group-version-kind": {"group": group, "version": "v1", "kind": kind},
        }
        yield f"{api}/namespaces/{{namespace}}/{plural}/{{name}}", {"patch": operation}


def problems_of(resource: dict[str, Any], namespace: str) -> list[str]:
    """The problems for which a server refuses a manifest."""
    found = [] if resource["metadata"]["namespace"] == namespace else ["the namespace is not the request's"]
    if resource["kind"] == "RayJob":
        return found + schema_problems(resource, trimmed_schema()) + operator_problems(resource)
    if not all(isinstance(value, str) for value in resource["data"].values()):
        found.append("data: not all are texts")
    if len(json.dumps(resource)) > 1 << 20:
        found.append("Too long: may not be more than 1048576 bytes")
    return found


def operator_makes(namespace: str, name: str) -> Store:
    """The submitter that KubeRay makes for a RayJob: a Job of its name, and the Job's pod."""
    labels = {"batch.kubernetes.io/job-name": name, "job-name": name}
    job = {
        "kind": "Job", "apiVersion": "batch/v1", "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {"containers": []}}},
    }  # fmt: skip
    pod = {
        "kind": "Pod", "apiVersion": "v1", "metadata": {"name": f"{name}-x", "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": "submitter"}]},
        "status": {"phase": "Running", "containerStatuses": [{"name": "submitter", "ready": True, "state": {"running": {}}}]},
    }  # fmt: skip
    return {("jobs", namespace, name): job, ("pods", namespace, f"{name}-x"): pod}


def merged(old: Any, patch: Any) -> Any:
    """JSON merge patch, RFC 7396; a strategic merge patch of a ConfigMap gives the same result."""
    if not isinstance(patch, dict):
        return patch
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merged(new.get(key), value)
    return new


def _version(api: str) -> str:
    return "v1" if api == "/api/v1" else api.removeprefix("/apis/")


@contextmanager
def serving(kubeconfig: Path) -> Iterator[tuple[Store, list[str]]]:
    """A server on a port of this machine, which `kubeconfig` names; yields its objects, and the changes that were made."""
    handler = type("Handler", (_Handler,), {"store": {}, "changes": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        cluster = {"name": "stand-in", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        context = {"name": "stand-in", "context": {"cluster": "stand-in", "user": "nobody"}}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "contexts": [context],
            "current-context": "stand-in",
        }
        kubeconfig.write_text(json.dumps(config | {"users": [{"name": "nobody", "user": {}}]}))
        try:
            yield handler.store, handler.changes
        finally:
            server.shutdown()
            thread.join()
