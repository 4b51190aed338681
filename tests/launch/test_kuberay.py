"""Manifests for KubeRay: valid for its schema and its operator, safe to start again, and refused where they would fail."""

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from megarl.cli.main import main
from megarl.config import TrainConfig, load_config
from megarl.launch.kuberay import RAY_VERSION
from tests.launch.crd import WHOLE, operator_problems, schema_problems, trimmed_schema, whole_schema
from tests.launch.examples import examples

pytestmark = pytest.mark.usefixtures("in_root")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "launch/kuberay"
TARGET, RECIPE = "kuberay", "recipes/qwen2.5_72b_grpo_lora.yaml"
NEEDED = ["--image", "registry.example/megarl:1", "--mount", "shared:/workspace"]
FULL = [
    *NEEDED, "--mount", "models.v2:/models:ro", "--mount", "shared:/scratch", "--secret", "hub", "--pull-secret", "registry",
    "--service-account", "runner", "--rdma-resource", "rdma/ib", "--priority", "high", "--time", "1-12:00:00",
    "--namespace", "team", "--retries", "5",
]  # fmt: skip


@pytest.fixture
def launch(dry_run: Callable[..., str]) -> Any:
    """launch(arguments...): (ConfigMap, RayJob or RayCluster)."""
    return lambda *arguments, **options: tuple(yaml.safe_load_all(dry_run(*arguments, **options)))


@pytest.mark.parametrize("name", sorted(examples(EXAMPLES)))
def test_examples_are_what_the_command_makes(name: str, capsys: pytest.CaptureFixture) -> None:
    assert main(examples(EXAMPLES)[name]) == 0
    assert capsys.readouterr().out == (EXAMPLES / name).read_text(), "run launch/kuberay/make_examples.sh"
    _, resource = yaml.safe_load_all((EXAMPLES / name).read_text())
    assert schema_problems(resource, trimmed_schema()) == []
    assert operator_problems(resource) == []


def test_every_example_is_made() -> None:
    assert {path.name for path in EXAMPLES.glob("*.yaml")} == set(examples(EXAMPLES))


@pytest.mark.parametrize("more", [["--kueue", "q"], ["--volcano", "q"], ["--kind", "RayCluster"], ["--cpu"]])
def test_manifest_is_valid(more: list[str], launch: Any) -> None:
    _, resource = launch(*FULL, *more, "trainer.save_freq=5")
    assert schema_problems(resource, trimmed_schema()) == []
    assert operator_problems(resource) == []


@pytest.mark.skipif(not WHOLE.is_file(), reason=f"KubeRay's whole schema is not at {WHOLE}")
def test_manifest_is_valid_for_the_whole_schema(launch: Any) -> None:
    schema = whole_schema()
    for kind in ("RayJob", "RayCluster"):
        _, resource = launch(*FULL, "--kind", kind)
        assert schema_problems(resource, schema) == []
    resource["spec"]["headGroupSpec"]["template"]["spec"]["tolerationz"] = []
    assert "tolerationz" in schema_problems(resource, schema)[0]


def test_schema_refuses_what_it_does_not_know(launch: Any) -> None:
    _, resource = launch(*FULL)
    resource["spec"]["backofLimit"] = 3
    container = resource["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    container["resources"]["limits"]["cpu"] = ["8"]
    container["volumeMount"] = []
    problems = schema_problems(resource, trimmed_schema())
    assert len(problems) == 3 and {"backofLimit", "volumeMount"} <= set(" ".join(problems).split("'"))


def test_workers_have_the_devices_of_the_recipe_and_the_head_has_none(launch: Any) -> None:
    _, job = launch(*FULL, "--cpus-per-node", "96", "--memory-per-node", "900Gi", "--shared-memory", "128Gi")
    cluster = job["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"]["num-gpus"] == head["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" not in str(head)
    assert (
        workers["replicas"],
        workers["rayStartParams"]["num-gpus"],
        workers["rayStartParams"]["num-cpus"],
    ) == (1, "8", "96")
    pod = workers["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {
        "cpu": "96", "memory": "900Gi", "nvidia.com/gpu": "8", "rdma/ib": "1",
    }  # fmt: skip
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 10001
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]] == {"emptyDir": {"medium": "Memory", "sizeLimit": "128Gi"}}
    assert mounts["/workspace"] == mounts["/scratch"]
    assert volumes[mounts["/models"]] == {"persistentVolumeClaim": {"claimName": "models.v2"}}


def test_each_gpu_has_one_of_rays_cpus_on_pods_with_few_cores(launch: Any) -> None:
    _, job = launch(*NEEDED, "--cpus-per-node", "2")
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = int(workers["rayStartParams"]["num-gpus"])
    assert int(workers["rayStartParams"]["num-cpus"]) == gpus > 2
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "2"


def test_each_claim_has_a_volume_of_its_own(launch: Any) -> None:
    claims = ["a.b", "a-b", "a.b.c", f"{'a' * 70}1", f"{'a' * 70}2", f"{'a' * 70}3"]
    mounts = [word for number, claim in enumerate(claims) for word in ("--mount", f"{claim}:/{number}")]
    _, job = launch(*NEEDED, *mounts)
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounted = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert len(volumes) == len(pod["volumes"])
    for number, claim in enumerate(claims):
        assert volumes[mounted[f"/{number}"]]["persistentVolumeClaim"]["claimName"] == claim
    assert operator_problems(job) == []


def test_without_gpus_a_device_is_one_of_rays_cpus(launch: Any) -> None:
    _, cluster = launch(
        *NEEDED,
        "--cpu",
        "--cpus-per-node",
        "16",
        "--kind",
        "RayCluster",
        recipe="recipes/quickstart_ppo.yaml",
    )
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert (workers["rayStartParams"]["num-cpus"], workers["rayStartParams"]["num-gpus"]) == ("4", "0")
    assert "gpu" not in str(workers["template"]).replace("n_gpus_per_node", "")


def test_a_second_start_is_a_new_cluster_with_the_same_recipe(launch: Any, tmp_path: Path) -> None:
    """The entry point has none of the user's arguments, because the shells of two pods read it."""
    awkward = 'actor_rollout_ref.model.path=/models/it\'s "$HOME" 72b'
    config, job = launch(*FULL, awkward, "trainer.save_freq=5")
    spec = job["spec"]
    assert spec["entrypoint"] == "megarl train /etc/megarl/recipe.yaml trainer.ray_address=auto"
    assert shlex.join(shlex.split(spec["entrypoint"])) == spec["entrypoint"]
    assert (spec["backoffLimit"], spec["submitterConfig"]) == (5, {"backoffLimit": 2})
    assert spec["activeDeadlineSeconds"] == 36 * 3600 and spec["shutdownAfterJobFinishes"] is True
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(config["data"]["recipe.yaml"])
    given = load_config(TrainConfig, recipe)
    assert given == load_config(TrainConfig, RECIPE, [awkward, "trainer.save_freq=5"])
    assert given.trainer.resume_mode == "auto"
    (volume,) = [
        one
        for one in spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
        if "configMap" in one
    ]
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    assert job["metadata"]["namespace"] == config["metadata"]["namespace"] == "team"


def test_gang_scheduling_is_asked_for_by_labels(launch: Any) -> None:
    labels = launch(*NEEDED, "--kueue", "research")[1]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    labels = launch(*NEEDED, "--volcano", "research", "--priority", "high")[1]["metadata"]["labels"]
    assert labels["ray.io/scheduler-name"] == "volcano" and labels["volcano.sh/queue-name"] == "research"
    assert labels["ray.io/priority-class-name"] == "high"


def expanded(value: str, before: dict[str, str]) -> str:
    """The value of a container's variable, given the ones before it: Kubernetes' documentation of `env` ("dependent variables")."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[1] is None else before.get(found[1], found[0]),
        value,
    )


def test_variables_reach_every_pod_as_they_are(launch: Any, tmp_path: Path) -> None:
    secret = "a$$b$(NOTE)$$(NOTE)$"
    (tmp_path / "env").write_text(
        f"# of the site\n\nNCCL_SOCKET_IFNAME=eth0\nNOTE=a $b = 'c'd\nSECRET={secret}\n"
    )
    _, job = launch(*NEEDED, "--env-file", str(tmp_path / "env"), "--secret", "hub")
    cluster = job["spec"]["rayClusterSpec"]
    templates = [
        job["spec"]["submitterPodTemplate"],
        cluster["headGroupSpec"]["template"],
        cluster["workerGroupSpecs"][0]["template"],
    ]
    for template in templates:
        (container,) = template["spec"]["containers"]
        variables: dict[str, str] = {}
        for variable in container["env"]:
            variables[variable["name"]] = expanded(variable["value"], variables)
        assert variables["NOTE"] == "a $b = 'c'd" and variables["NCCL_SOCKET_IFNAME"] == "eth0"
        assert variables["SECRET"] == secret
        assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]


def test_what_would_fail_in_the_cluster_is_refused_here(refused: Any) -> None:
    assert "--image" in refused("--mount", "shared:/workspace")
    message = refused("--image", "i", "--mount", "shared:/data")
    assert "trainer.default_local_dir=outputs/megarl/ppo is /workspace/outputs/megarl/ppo" in message
    assert "shared:/data" in message
    message = refused(*NEEDED, "trainer.default_local_dir=../runs/a")
    assert "trainer.default_local_dir=../runs/a is /runs/a in the pods" in message
    assert "on no volume" in refused("--image", "i", "--mount", "shared:/workspace:ro")
    assert "expected CLAIM:TARGET" in refused("--image", "i", "--mount", "shared")
    assert "/workspace is the target of several" in refused(*NEEDED, "--mount", "other:/workspace")
    for target, what in {"/dev/shm": "shared memory", "/etc/megarl/": "the recipe"}.items():
        assert f"{target.rstrip('/')} has {what}" in refused(*NEEDED, "--mount", f"other:{target}")
    assert "expected a name such as nvidia.com/gpu, found 'gpu'" in refused(*NEEDED, "--gpu-resource", "gpu")
    assert "expected a name such as rdma/ib, found 'ib'" in refused(*NEEDED, "--rdma-resource", "ib")
    assert "head_memory: expected an amount such as 64Gi, found '64000K'" in refused(
        *NEEDED, "--head-memory", "64000K"
    )
    for option in ("secret", "pull-secret", "service-account", "priority"):
        message = f"kuberay.{option.replace('-', '_')}: expected a name of lower-case letters"
        assert message in refused(*NEEDED, f"--{option}", "Bad_Name")
    assert "kuberay.user=2147483648 is out of range" in refused(*NEEDED, "--user", "2147483648")
    assert "give one of them" in refused(*NEEDED, "--kueue", "a", "--volcano", "b")
    assert "shared_memory: expected an amount such as 64Gi, found '64GB!'" in refused(
        *NEEDED, "--shared-memory", "64GB!"
    )
    assert "name=Qwen: expected 1 to 47" in refused(*NEEDED, "--name", "Qwen")
    assert "kuberay.head_cpus=0 is out of range" in refused(*NEEDED, "--head-cpus", "0")


def test_missing_kubectl_is_named(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "kuberay", RECIPE, *NEEDED]) == 2
    assert "kubectl is not on PATH" in capsys.readouterr().err


def test_the_manifest_is_given_to_kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n/bin/cat > {tmp_path}/input\nexit 3\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "kuberay", RECIPE, *NEEDED]) == 3
    assert (tmp_path / "arguments").read_text() == "apply -f -\n"
    assert [one["kind"] for one in yaml.safe_load_all((tmp_path / "input").read_text())] == [
        "ConfigMap",
        "RayJob",
    ]


def test_ray_is_the_version_of_the_image() -> None:
    assert ray.__version__ == RAY_VERSION
    assert f"\nray=={RAY_VERSION}\n" in (ROOT / "requirements/gpu.txt").read_text()


def test_the_script_of_the_examples_is_bash() -> None:
    subprocess.run(["bash", "-n", EXAMPLES / "make_examples.sh"], check=True)
