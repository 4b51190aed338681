"""A real Kubernetes control plane on this machine's loopback: etcd, kube-apiserver and kube-controller-manager, with KubeRay's resources.

Kubernetes is 1.20.2, which kubernetes_build.sh builds. The API server validates, admits and keeps objects; the controller
manager makes the pods of a Job and deletes objects whose owner is gone. KubeRay's definitions are complete, except for what 1.20 does not
know and drops: seven groups of CEL rules, on fields that megarl does not write. played.py simulates the parts that cannot be real.
"""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from tests.launch.crd import WHOLE
from tests.launch.played import playing

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "openssl", "setpriv")
DEFINITIONS = [WHOLE, WHOLE.with_name("ray.io_rayclusters.yaml")]
NAMESPACES = ("default", "team")
_TOKEN = "administrator"
_SECONDS = 90  # for a server to be ready; on an idle machine it takes less than ten


class RefusedError(Exception):
    """The API server's answer to a request that it refused."""


class Api:
    """The API server, called as its administrator."""

    def __init__(self, url: str, certificate: Path) -> None:
        self.url, self._session = url, requests.Session()
        self._session.trust_env = False  # no proxy
        self._session.verify = str(certificate)
        self._session.headers["Authorization"] = f"Bearer {_TOKEN}"

    def __call__(self, method: str, path: str, body: Any = None, type: str = "application/json") -> Any:
        """Send a request and return the server's answer.

        Raises:
            RefusedError: the server refuses the request; the message has its reason.
        """
        data = None if body is None else json.dumps(body)
        answer = self._session.request(
            method, self.url + path, data=data, headers={"Content-Type": type}, timeout=60
        )
        content = answer.json() if "json" in answer.headers.get("Content-Type", "") else answer.text
        if not answer.ok:
            why = content["message"] if isinstance(content, dict) else content
            raise RefusedError(f"{answer.status_code} {why[:2000]}")
        return content

    def patch(self, path: str, change: dict[str, Any]) -> None:
        """A JSON merge patch."""
        self("PATCH", path, change, "application/merge-patch+json")


@dataclass(frozen=True)
class Cluster:
    """The running control plane, and what it answered to the simulated parts."""

    api: Api
    kubeconfig: Path
    refused: list[str]  # requests of the simulated operator that the API server refused
    logs_asked: list[str]  # the logs it asked the simulated kubelet for


def obstacle() -> str | None:
    """Why no control plane can be started here; None: it can be started."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return (
            f"not on PATH: {', '.join(missing)}; Debian's etcd-server has etcd, and `tests/launch/kubernetes_build.sh FOLDER` builds "
            "kube-apiserver and kube-controller-manager into FOLDER"
        )
    absent = [str(path) for path in DEFINITIONS if not path.is_file()]
    if absent:
        return (
            f"not there: {', '.join(absent)}, from helm-chart/kuberay-operator/crds of KubeRay's repository"
        )
    return None


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A control plane whose data and logs are in `folder`, with the namespace `team`; all its programs end with the context.

    Raises:
        RuntimeError: a program ended or was not ready in time; the message has the end of its log.
    """
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    _openssl(key, certificate)
    (folder / "tokens.csv").write_text(f"{_TOKEN},{_TOKEN},{_TOKEN},system:masters\n")
    store, peers, port, other = (f"{port}" for port in _free_ports(4))
    api = Api(f"https://127.0.0.1:{port}", certificate)
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps(_kubeconfig(api.url, certificate)))
    with ExitStack() as stack:
        etcd = _start(
            stack, folder, "etcd", f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{store}", f"--advertise-client-urls=http://127.0.0.1:{store}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-cluster=default=http://127.0.0.1:{peers}",
        )  # fmt: skip
        server = _start(
            stack, folder, "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{store}", f"--secure-port={port}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
            f"--tls-cert-file={certificate}", f"--tls-private-key-file={key}", f"--cert-dir={folder}",
            f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=Node,RBAC",
            "--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
            "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip
        _wait(lambda: api("GET", "/readyz") == "ok", "the API server", [etcd, server])
        # Before the controller manager, which looks for new kinds twice a minute only.
        _define(api, [etcd, server])
        # The node is simulated: nothing renews its lease.
        manager = _start(
            stack, folder, "kube-controller-manager", f"--kubeconfig={kubeconfig}", f"--secure-port={other}", "--port=0",
            "--bind-address=127.0.0.1", f"--cert-dir={folder}", f"--service-account-private-key-file={key}",
            "--leader-elect=false", "--controllers=*,-nodelifecycle",
        )  # fmt: skip
        api("POST", "/api/v1/namespaces", {"metadata": {"name": "team"}})
        for name in NAMESPACES:  # pods are refused before that
            path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
            _wait(lambda path=path: "secrets" in api("GET", path), path, [etcd, server, manager])
        played = stack.enter_context(playing(Api(api.url, certificate), key, certificate))
        yield Cluster(api, kubeconfig, *played)


def _define(api: Api, processes: list[tuple[subprocess.Popen, Path]]) -> None:
    for path in DEFINITIONS:
        definition = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
        api("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    _wait(
        lambda: {one["name"] for one in api("GET", "/apis/ray.io/v1")["resources"]} >= {"rayjobs", "rayclusters"},
        "KubeRay's resources", processes,
    )  # fmt: skip
    # From now on kubectl has the fields; before, it would accept any.
    schemas = ('"io.ray.v1.RayJob"', '"io.ray.v1.RayCluster"')
    _wait(lambda: all(one in api("GET", "/openapi/v2") for one in schemas), "KubeRay's schemas", processes)


def _start(stack: ExitStack, folder: Path, *command: str) -> tuple[subprocess.Popen, Path]:
    """Start a program that ends with the context, and with this process, however that ends; returns the process and its log."""
    log = folder / f"{command[0]}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=folder, start_new_session=True,
        )  # fmt: skip
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process, log


def _wait(ready: Callable[[], bool], what: str, processes: list[tuple[subprocess.Popen, Path]]) -> None:
    end, answer = time.monotonic() + _SECONDS, None
    while time.monotonic() < end:
        for process, log in processes:
            if process.poll() is not None:
                raise RuntimeError(f"{log.stem} ended with {process.returncode}:\n{_tail(log)}")
        try:
            if ready():
                return
        except (RefusedError, requests.ConnectionError) as error:
            answer = error
        time.sleep(0.2)
    tails = "\n".join(f"{log.name}:\n{_tail(log)}" for _, log in processes)
    raise RuntimeError(f"{what}: not there after {_SECONDS} s (last answer: {answer})\n{tails}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        held = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]  # all at once, so that the ports differ
        return [one.getsockname()[1] for one in held]


def _openssl(key: Path, certificate: Path) -> None:
    """Make one key for both servers; it also signs the tokens of service accounts."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test", "-days", "2",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip


def _kubeconfig(url: str, certificate: Path) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url, "certificate-authority": str(certificate)}}],
        "users": [{"name": "test", "user": {"token": _TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
