"""megarl on a real Kubernetes API server: docs/launch.md's commands as the page has them, all manifests, and manifests that the server refuses."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megarl.cli.main import main
from tests.launch.kubernetes import NAMESPACES, Cluster, obstacle, running
from tests.launch.played import LOG
from tests.launch.test_docs import KUBERAY, PAGE
from tests.launch.test_kuberay import EXAMPLES, FULL, NEEDED, ROOT
from tests.waiting import wait_for

OBSTACLE = obstacle()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("kubernetes")) as cluster:
        high = {"metadata": {"name": "high"}, "value": 1000}
        cluster.api("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", high)
        cluster.api("POST", "/api/v1/namespaces/team/serviceaccounts", {"metadata": {"name": "runner"}})
        yield cluster


@pytest.fixture
def cluster(server: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The control plane, which kubectl finds; after the test all objects that were made in it are deleted."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
    monkeypatch.setenv("HOME", str(server.kubeconfig.parent))  # kubectl keeps facts about servers there
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # has megarl
    yield server
    for name in NAMESPACES:
        run(f"kubectl -n {name} delete --all rayjobs,rayclusters,configmaps")
    until(lambda: left(server) == [], "all is gone")
    server.refused.clear()


def run(command: str, input: str | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        shlex.split(command, comments=True),
        input=input, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def until(holds: Callable[[], bool], what: str) -> None:
    wait_for(holds, told=lambda: what, apart=0.2)


def left(cluster: Cluster) -> list[str]:
    """All objects of the kinds that a run is made of, except those that Kubernetes itself makes."""
    kinds = {"ConfigMap": "/api/v1/configmaps", "Pod": "/api/v1/pods", "Job": "/apis/batch/v1/jobs",
             "RayJob": "/apis/ray.io/v1/rayjobs", "RayCluster": "/apis/ray.io/v1/rayclusters"}  # fmt: skip
    found = [
        (f"{kind} {one['metadata']['name']}", one["metadata"]["namespace"])
        for kind, path in kinds.items()
        for one in cluster.api("GET", path)["items"]
    ]
    return sorted(
        name for name, space in found if space in NAMESPACES and name != "ConfigMap kube-root-ca.crt"
    )


def pods(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.api("GET", "/api/v1/pods")["items"]


def wait_for_pods(cluster: Cluster, count: int) -> None:
    """Wait until exactly `count` pods run."""

    def there() -> bool:
        assert cluster.refused == []
        return [pod["status"]["phase"] for pod in pods(cluster)] == ["Running"] * count

    until(there, f"{count} pods run: {left(cluster)}")


def rayjob(cluster: Cluster, name: str) -> dict[str, Any]:
    return cluster.api("GET", f"/apis/ray.io/v1/namespaces/team/rayjobs/{name}")


def count_of_pods(resource: dict[str, Any]) -> int:
    spec = resource["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    return (
        1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"]) + (resource["kind"] == "RayJob")
    )


def test_the_commands_of_the_page_run_as_they_stand(cluster: Cluster) -> None:
    large, launch = KUBERAY
    logs, get, delete = re.findall(r"^\$ (kubectl .*)$", PAGE, re.MULTILINE)
    made = run(large)
    assert re.fullmatch(r"configmap/\S+ created\nrayjob.ray.io/\S+ created\n", made.stdout), made
    name = made.stdout.split()[2]
    wait_for_pods(cluster, 3)  # head, worker, submitter
    assert run(f"kubectl delete {name}").returncode == 0
    until(lambda: pods(cluster) == [], "the pods are gone")

    made = run(launch)
    assert made.stdout == "configmap/demo-recipe created\nrayjob.ray.io/demo created\n", made
    wait_for_pods(cluster, 4)
    before = rayjob(cluster, "demo")
    again = run(launch)
    # A patch is sent, since KubeRay's definition adds a default to the list of worker groups; the server finds nothing new in it.
    assert again.stdout == "configmap/demo-recipe unchanged\nrayjob.ray.io/demo configured\n", again
    assert rayjob(cluster, "demo") == before
    del cluster.logs_asked[:]
    assert run(logs).stdout == LOG
    (asked,) = cluster.logs_asked
    assert re.fullmatch(r"/containerLogs/team/demo-\w+/ray-job-submitter\?follow=true", asked)
    heading, line = run(get).stdout.splitlines()
    assert heading.startswith("NAME ") and re.match(r"demo +RUNNING +Running +demo-\w+ ", line)
    assert run(delete).stdout.startswith('rayjob.ray.io "demo" deleted')
    until(
        lambda: [one for one in left(cluster) if "demo" in one] == ["ConfigMap demo-recipe"],
        "only the recipe is left",
    )


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_pods_of_an_example_run(path: Path, cluster: Cluster) -> None:
    applied = run(f"kubectl apply -f {path}")
    assert applied.returncode == 0 and applied.stderr == "", applied
    _, resource = yaml.safe_load_all(path.read_text())
    wait_for_pods(cluster, count_of_pods(resource))
    (worker, *_) = (
        pod for pod in pods(cluster) if pod["metadata"]["labels"].get("ray.io/group") == "workers"
    )
    template = resource["spec"].get("rayClusterSpec", resource["spec"])["workerGroupSpecs"][0]["template"]
    # All fields that megarl wrote arrive unchanged.
    asked, found = template["spec"]["containers"][0], worker["spec"]["containers"][0]
    assert {key: found[key] for key in asked} == asked
    assert worker["spec"]["securityContext"] == template["spec"]["securityContext"]
    assert worker["status"]["qosClass"] == "Guaranteed"


@pytest.mark.parametrize("more", [["--kueue", "q"], ["--volcano", "q"], ["--kind", "RayCluster"], ["--cpu"]], ids=" ".join)  # fmt: skip
def test_the_pods_of_all_options_run(more: list[str], cluster: Cluster) -> None:
    options = [*FULL, *more, "trainer.save_freq=5"]
    launched = run(
        shlex.join(["megarl", "launch", "kuberay", "recipes/qwen2.5_72b_grpo_lora.yaml", *options])
    )
    assert launched.returncode == 0, launched
    wait_for_pods(cluster, 2 if "RayCluster" in more else 3)
    assert {pod["spec"]["priority"] for pod in pods(cluster)} == {1000}
    assert {pod["spec"]["serviceAccountName"] for pod in pods(cluster)} == {"runner"}
    # The pods have no token of Kubernetes, for which the server would have added a volume.
    names = {volume["name"] for pod in pods(cluster) for volume in pod["spec"].get("volumes", [])}
    assert names == {"recipe", "shared-memory", "claim-shared", "claim-models-v2"}


def test_every_recipe_is_taken(cluster: Cluster, capsys: pytest.CaptureFixture) -> None:
    """The server accepts the recipe's RayJob and its pods, without keeping them."""
    assert len(RECIPES) > 30
    for recipe in RECIPES:
        [command] = re.findall(r"Run: +megarl (\w+) ", recipe.read_text().replace("\n#", " "))
        arguments = ["launch", "kuberay", str(recipe), "--command", command, *NEEDED, "--namespace", "team"]
        assert main([*arguments, "--dry-run"]) == 0
        text = capsys.readouterr().out
        applied = run("kubectl apply --dry-run=server -f -", text)
        assert applied.stdout.count("created (server dry run)") == 2, (recipe, applied)
        _, job = yaml.safe_load_all(text)
        for spec in pod_specs(job):
            cluster.api(
                "POST",
                "/api/v1/namespaces/team/pods?dryRun=All",
                {"metadata": {"name": "pod"}, "spec": spec},
            )
    assert left(cluster) == []


def pod_specs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The specifications of the pods: submitter, head and workers."""
    spec = job["spec"]
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    return [one["template"]["spec"] for one in groups] + [spec["submitterPodTemplate"]["spec"]]


def manifest() -> str:
    text = run(f"{KUBERAY[-1]} --dry-run").stdout
    assert text.startswith("---\n")
    return text


WRONG = {
    # kubectl reports these from the server's schema: this server would drop the field (later ones refuse it, too).
    "a misspelt field": ("backoffLimit: 3", "backofLimit: 3", 'unknown field "backofLimit" in io.ray.v1.RayJob.spec'),
    "a misspelt field of a pod": ("volumeMounts:", "volumeMount:", 'unknown field "volumeMount"'),
    "a text for a number": ("backoffLimit: 3", "backoffLimit: three", 'got "string", expected "integer"'),
    # The server reports these.
    "a number for a text": ("mountPath: /dev/shm", "mountPath: 7", "in body must be of type string"),
    "a number below its bound": ("backoffLimit: 3", "preRunningDeadlineSeconds: -1", "should be greater than or equal to 1"),
    "no value of these": ("mode: token", "mode: tokens", 'Unsupported value: "tokens"'),
    "no amount": ("memory: 64Gi", "memory: 64000K", "spec.rayClusterSpec.headGroupSpec.template.spec.containers"),
    "two mounts at one place": ("mountPath: /workspace", "mountPath: /dev/shm", "volumeMounts[2]: Duplicate value"),
    "no name": ("  name: demo\n", "  name: Demo\n", 'metadata.name: Invalid value: "Demo"'),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_manifest_is_refused_with_the_reason(what: str, cluster: Cluster) -> None:
    right, wrong, reason = WRONG[what]
    text = manifest()
    assert right in text
    applied = run("kubectl apply -f -", text.replace(right, wrong))
    assert applied.returncode == 1 and reason in applied.stderr, applied
    assert left(cluster) == ["ConfigMap demo-recipe"]


def test_without_kubectls_check_this_server_drops_unknown_fields_and_checks_types(cluster: Cluster) -> None:
    text = manifest()
    wrong = run("kubectl apply --validate=false -f -", text.replace("backoffLimit: 3", "backoffLimit: three"))
    assert wrong.returncode == 1 and "spec.backoffLimit in body must be of type integer" in wrong.stderr
    text = text.replace("backoffLimit: 3", "backofLimit: 3")
    assert run("kubectl apply --validate=false -f -", text).returncode == 0
    assert "backofLimit" not in rayjob(cluster, "demo")["spec"]


# Values that a RayJob may have and a pod may not, each refused by megarl (test_kuberay.py): in a cluster there would be no pods.
ONLY_PODS = {
    "a user above the largest": ("runAsUser: 10001", "runAsUser: 2147483648", "must be between 0 and 2147483647"),
    "a secret's name that is none": (
        "- name: ray-job-submitter\n",
        "- name: ray-job-submitter\n        envFrom: [{secretRef: {name: Bad_Name}}]\n",
        "Bad_Name",
    ),
    "a device without a domain": ("            cpu: '1'", "            cpu: '1'\n            gpu: '1'", "fully qualified"),
}  # fmt: skip


@pytest.mark.parametrize("what", ONLY_PODS)
def test_some_mistakes_the_server_finds_in_the_pods_alone(what: str, cluster: Cluster) -> None:
    right, wrong, reason = ONLY_PODS[what]
    text = manifest()
    assert right in text
    assert run("kubectl apply -f -", text.replace(right, wrong)).returncode == 0
    until(lambda: any(reason in one for one in cluster.refused), f"{reason}: {cluster.refused}")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--namespace nowhere", 'namespaces "nowhere" not found'),
        ("--kueue 'bad queue'", "a valid label must be"),
    ],
)
def test_launch_ends_with_the_reason_where_the_server_refuses(
    more: str, reason: str, cluster: Cluster
) -> None:
    launched = run(KUBERAY[-1].replace("--namespace team", f"--namespace team {more}"))
    assert launched.returncode == 1 and reason in launched.stderr, launched


def test_launch_ends_with_the_reason_where_no_server_answers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = json.loads(cluster.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    launched = run(KUBERAY[-1])
    assert launched.returncode == 1 and "127.0.0.1:1" in launched.stderr, launched


def test_a_part_that_ends_is_named_with_its_last_words_and_the_others_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs, folder = tmp_path / "programs", tmp_path / "folder"
    for one in (programs, folder):
        one.mkdir()
    (programs / "etcd").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 300\n")
    (programs / "kube-apiserver").write_text(
        f"#!/bin/sh\nuntil [ -s {tmp_path}/pid ]; do sleep 0.1; done\necho no such flag\nexit 3\n"
    )
    for one in programs.iterdir():
        one.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="kube-apiserver ended with 3:\nno such flag"), running(folder):
        pass
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
