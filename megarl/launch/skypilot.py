"""A task for SkyPilot: the machines, their volumes, and the script that each of them runs (launch/skypilot/node.sh).

Guarantees:
- the whole recipe is in the task: a job that is started again is the same, whatever became of the file;
- the run folder is on a volume, or its checkpoints are copied to a bucket, so that another start, on other machines, continues from there;
- the task has no secrets: it has only their names, and `sky` gets the values separately.

Fields have the meaning that skypilot 0.14.1 gives them.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from megarl.launch.job import Job, check_image, matched, read_variables

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "RAY_AUTH_TOKEN"  # of the run's own Ray cluster
_REQUEUE = 75  # megarl's exit code for: start me again
_IMAGE_ROOT, _IMAGE_WORK_DIR = "/opt/megarl", "/workspace"  # of the image
_RECIPE = "/tmp/megarl-recipe.yaml"
_END = "END_OF_RECIPE"
# The values of each key, as a pattern and in words.
_SOURCES = {
    "mount": (r"[A-Za-z0-9][-\w.]*", "the name of a volume of SkyPilot's"),
    "bucket": (r"[a-z0-9]+://[^:\s]+", "an address such as s3://bucket/folder"),
}


def task(job: Job) -> dict[str, Any]:
    """The task.

    Raises:
        ValueError: the job lacks something, or has a value that SkyPilot refuses; or the run folder is on no volume.
    """
    _check(job)
    launch, sky = job.launch, job.launch.skypilot
    written: dict[str, Any] = {"name": launch.name, "num_nodes": job.nodes, "resources": _resources(job)}
    if launch.image is None:
        written["workdir"] = str(ROOT)  # copied to each machine, where setup and run begin in it
    if sky.mount:
        written["volumes"] = {target: volume for volume, target in _pairs(job, "mount")}
    if sky.bucket:
        written["file_mounts"] = {
            target: {"source": source, "mode": "MOUNT"} for source, target in _pairs(job, "bucket")
        }
    if launch.env_file is not None:
        written["envs"] = read_variables(launch.env_file)
    written["secrets"] = dict.fromkeys(secret_names(job))
    if sky.setup is not None:
        written["setup"] = sky.setup
    return written | {"run": _run(job)}


def sky_arguments(job: Job, path: str) -> list[str]:
    """The arguments of `sky` that launch the task in the file `path`; the values of secrets are in the environment."""
    secrets = [word for name in secret_names(job) for word in ("--secret", name)]
    if job.launch.skypilot.kind == "cluster":
        return ["launch", "--cluster", str(job.launch.name), *secrets, path]
    return ["jobs", "launch", *secrets, path]


def secret_names(job: Job) -> list[str]:
    """Names of the environment variables whose values `sky` gets; Ray's token first."""
    return [TOKEN, *job.launch.skypilot.secret]


def _resources(job: Job) -> dict[str, Any]:
    launch, sky = job.launch, job.launch.skypilot
    restarts = {"max_restarts_on_errors": launch.retries, "recover_on_exit_codes": [_REQUEUE]}
    found = {
        "accelerators": None if launch.cpu else {sky.accelerator: job.devices},
        "cpus": sky.cpus_per_node and f"{sky.cpus_per_node}+",  # at least
        "memory": sky.memory_per_node and f"{sky.memory_per_node}+",
        "disk_size": sky.disk_size,
        "network_tier": sky.network_tier,
        "image_id": launch.image and f"docker:{launch.image}",
        "use_spot": sky.spot or None,
        "job_recovery": restarts if sky.kind == "job" and launch.retries else None,
        "infra": sky.infra[0] if len(sky.infra) == 1 else None,
        "any_of": [{"infra": infra} for infra in sky.infra] if len(sky.infra) > 1 else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _run(job: Job) -> str:
    """The script of each node. The exit code of its last command is the node's; SkyPilot adds lines of its own after it."""
    launch = job.launch
    script = "launch/skypilot/node.sh" if launch.image is None else f"{_IMAGE_ROOT}/launch/skypilot/node.sh"
    options = ["--nodes", str(job.nodes), "--devices", str(job.devices)]
    options += ["--cpu"] if launch.cpu else []
    options += ["--work-dir", _work_dir(job), "--start-seconds", str(launch.skypilot.start_seconds)]
    recipe = job.recipe_text()
    assert _END not in recipe
    command = shlex.join(["bash", script, *options, "--", job.command, _RECIPE])
    return f"cat > {_RECIPE} << '{_END}'\n{recipe}{_END}\n{command}\n"


def _work_dir(job: Job) -> str:
    return job.launch.work_dir or _IMAGE_WORK_DIR


def _pairs(job: Job, key: str) -> list[tuple[str, str]]:
    """(volume or bucket, where on the machines) of each entry.

    Raises:
        ValueError: an entry that is not SOURCE:TARGET.
    """
    pattern, source = _SOURCES[key]
    expected = f"SOURCE:TARGET, with {source} and an absolute path"
    texts = getattr(job.launch.skypilot, key)
    found = [matched(f"skypilot.{key}", text, rf"({pattern}):(/[^:\s]*?)/?", expected) for text in texts]
    return [(one[1], one[2]) for one in found]


def _check(job: Job) -> None:
    launch, sky = job.launch, job.launch.skypilot
    if (launch.image is None) == (sky.setup is None):
        raise ValueError(
            "SkyPilot needs either an image that has megarl (--image), or the commands that install megarl's checkout "
            f"(skypilot.setup), found {'neither' if launch.image is None else 'both'}"
        )
    check_image(launch)
    if launch.image is None and not (ROOT / "launch/skypilot/node.sh").is_file():
        raise ValueError(
            f"{ROOT}/launch/skypilot/node.sh is not there: without an image megarl launch skypilot needs megarl's checkout, "
            "installed with pip install -e"
        )
    if (sky.accelerator is None) != launch.cpu:
        raise ValueError(
            f"skypilot.accelerator={sky.accelerator} and cpu={launch.cpu}: give --accelerator KIND, such as H100, or --cpu"
        )
    if launch.time is not None:
        raise ValueError(
            f"time={launch.time}: SkyPilot's tasks have no time limit; give trainer.max_run_minutes behind the recipe"
        )
    for name in sky.secret:
        expected = f"the name of an environment variable other than {TOKEN}"
        matched("skypilot.secret", name, rf"(?!{TOKEN}$)[A-Za-z_]\w*", expected)
    _check_folders(job)


def _check_folders(job: Job) -> None:
    volumes = [target for _, target in _pairs(job, "mount")]
    targets = [*volumes, *(target for _, target in _pairs(job, "bucket"))]
    double = {target for target in targets if targets.count(target) > 1}
    if double:
        raise ValueError(
            f"skypilot.mount, skypilot.bucket: {', '.join(sorted(double))} is the target of several entries"
        )
    folder = job.run_folder_in(_work_dir(job))
    apart = job.nodes == 1 and job.checkpoint_url is not None  # one machine needs to share nothing
    if not apart and not any(folder.is_relative_to(target) for target in volumes):
        raise ValueError(
            f"trainer.default_local_dir={job.run_folder} is {folder} on the machines, which is on no volume that they share "
            f"(skypilot.mount: {', '.join(job.launch.skypilot.mount) or 'none'}): its checkpoints would go with the machines; "
            "mount one, or on a single machine give trainer.checkpoint_url"
        )
