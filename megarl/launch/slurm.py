"""The arguments of sbatch that run a job by launch/slurm/train.sbatch."""

from __future__ import annotations

import sys
from pathlib import Path

from megarl.launch.job import Job, matched, read_variables
from megarl.util.packages import shipped

ROOT = shipped()


def sbatch_arguments(job: Job) -> list[str]:
    """The arguments of `sbatch`: its options, the script, the script's options, the recipe.

    Raises:
        ValueError: the job lacks something, or its parts do not fit together.
    """
    _check(job)
    launch, slurm = job.launch, job.launch.slurm
    arguments = [f"--job-name={launch.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1"]
    if slurm.gres is not None:
        arguments.append(f"--gres={slurm.gres}")
    elif not launch.cpu:
        arguments.append(f"--gpus-per-node={job.devices}")
    if slurm.cpus_per_node is not None:
        arguments.append(f"--cpus-per-task={slurm.cpus_per_node}")
    else:
        # By --exclusive alone a job has all cores, but only the memory that it asks for. A later --mem takes this one's place.
        per_unit = any(option.startswith("--mem-per-") for option in slurm.sbatch)
        arguments += ["--exclusive", *([] if per_unit else ["--mem=0"])]
    if launch.time is not None:
        arguments.append(f"--time={launch.time}")
    for option in ("partition", "account", "qos"):
        value = getattr(slurm, option)
        if value is not None:
            arguments.append(f"--{option}={value}")
    arguments += [
        f"--signal=B:USR1@{slurm.signal_seconds}",
        "--requeue" if launch.retries else "--no-requeue",
        "--open-mode=append",
        f"--chdir={Path(launch.work_dir or '.').resolve()}",
        f"--output={Path(slurm.logs).resolve()}/%j.out",
        *slurm.sbatch,
        str(ROOT / "launch/slurm/train.sbatch"),
    ]
    return [*arguments, *_script_options(job), "--", str(job.recipe.resolve()), *job.overrides]


def _script_options(job: Job) -> list[str]:
    launch, slurm = job.launch, job.launch.slurm
    options = ["--root", str(ROOT), "--command", job.command, "--devices", str(job.devices)]
    options += ["--cpu"] if launch.cpu else []
    if slurm.container != "none":
        options += ["--container", slurm.container, "--image", str(launch.image)]
    elif sys.prefix != sys.base_prefix:  # the virtual environment that this command is from
        options += ["--venv", sys.prefix]
    for mount in slurm.mount:
        options += ["--mount", mount]
    if launch.env_file is not None:
        options += ["--env-file", str(Path(launch.env_file).resolve())]
    if slurm.interface is not None:
        options += ["--interface", slurm.interface]
    options += ["--logs", str(Path(slurm.logs).resolve()), "--retries", str(launch.retries)]
    return [*options, "--start-seconds", str(slurm.start_seconds)]


def _check(job: Job) -> None:
    launch, slurm = job.launch, job.launch.slurm
    if slurm.container == "none" and launch.image is not None:
        raise ValueError(f"image={launch.image} needs slurm.container: pyxis or apptainer (--container)")
    if slurm.container != "none" and launch.image is None:
        raise ValueError(f"slurm.container={slurm.container} needs an image (--image)")
    image = launch.image or ""
    if (image.startswith("/") or image.endswith((".sqsh", ".sif"))) and not Path(image).exists():
        raise ValueError(f"image={image}: there is no such file (working directory {Path.cwd()})")
    for mount in slurm.mount:
        matched("slurm.mount", mount, r"/[^:]*:/[^:]*(:ro)?", "/SOURCE:/TARGET or /SOURCE:/TARGET:ro")
    if slurm.mount and slurm.container == "none":
        raise ValueError(
            "slurm.mount is for containers; without one (slurm.container=none) every folder is there"
        )
    if launch.env_file is not None:
        read_variables(launch.env_file)
    if job.seconds is not None and slurm.signal_seconds >= job.seconds:
        raise ValueError(
            f"slurm.signal_seconds={slurm.signal_seconds} is not less than time={launch.time}: the run would be told to end as it "
            "begins"
        )
