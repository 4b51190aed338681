"""`megarl launch`: a recipe on this machine, on Slurm, on Kubernetes or by SkyPilot."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from megarl.config.schema.launch import launch_keys
from megarl.launch.job import Job, make_job, read_variables, yaml_text
from megarl.launch.kuberay import manifest
from megarl.launch.skypilot import TOKEN, secret_names, sky_arguments, task
from megarl.launch.slurm import sbatch_arguments

Runner = Callable[[argparse.Namespace], int | None]


def launch(options: argparse.Namespace, runners: Mapping[str, Runner]) -> int:
    """Run or submit a job; with --dry-run only print the command. Returns the exit code.

    Args:
        options: options of `megarl launch`.
        runners: by command, the function that runs it on this machine.

    Raises:
        ValueError: the job lacks something, or contradicts itself.
    """
    # Texts are quoted as JSON, so that YAML reads them as texts.
    given = [f"{key}={json.dumps(value)}" for key, value in launch_keys(options).items()]
    job = make_job(options.command, options.recipe, options.overrides, options.job, given)
    started_again = {
        "local": False,
        "slurm": True,
        "kuberay": job.launch.kuberay.kind != "RayCluster",
        "skypilot": job.launch.skypilot.kind != "cluster",
    }
    if job.launch.retries and started_again[options.target]:
        _check_restarts(job)
    if options.target == "local":
        return _local(job, options, runners)
    text = _TEXTS[options.target](job)
    if options.dry_run:
        print(text, end="")
        return 0
    program, advice, submit = _SUBMITTERS[options.target]
    if shutil.which(program) is None:
        raise ValueError(f"{program} is not on PATH: {advice} with --dry-run")
    return submit(job, text)


def _check_restarts(job: Job) -> None:
    """Whether a start after the first goes on from the job's checkpoints; says so where there are none.

    Raises:
        ValueError: it would set them aside, as trainer.resume_mode tells each start.
    """
    start = f"a start after the first, of which --retries {job.launch.retries} allows so many, would"
    if not job.saves:
        print(
            f"note: the recipe saves no checkpoints (trainer.save_freq): {start} begin anew", file=sys.stderr
        )
    elif job.resume_mode != "auto":
        copy = f"copy the checkpoint that it begins with into {job.run_folder}/checkpoints"
        instead = {"path": copy, "disable": "give another trainer.default_local_dir"}[job.resume_mode]
        raise ValueError(
            f"trainer.resume_mode={job.resume_mode}: {start} set the job's own checkpoints aside and begin where the first began; leave "
            f"it out and {instead}, or give --retries 0"
        )


def _local(job: Job, options: argparse.Namespace, runners: Mapping[str, Runner]) -> int:
    command = ["megarl", job.command, str(job.recipe), *job.overrides]
    if job.launch.image is not None:
        raise ValueError("image: megarl launch local runs without a container; run it inside of one")
    variables = {} if job.launch.env_file is None else read_variables(job.launch.env_file)
    if options.dry_run:
        print(shlex.join(command))
        return 0
    if job.launch.work_dir is not None:
        raise ValueError("work_dir: megarl launch local runs in the working directory; change into it")
    os.environ.update(variables)
    found = argparse.Namespace(recipe=str(job.recipe), overrides=list(job.overrides))
    return runners[job.command](found) or 0


def _sbatch(job: Job, text: str) -> int:
    Path(job.launch.slurm.logs).mkdir(parents=True, exist_ok=True)  # without it Slurm starts no job
    return subprocess.run(shlex.split(text), check=False).returncode


def _kubectl(job: Job, text: str) -> int:
    return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=False).returncode


def _sky(job: Job, text: str) -> int:
    # A token for this run alone, unless the environment has one.
    variables = {TOKEN: secrets.token_hex(32)} | os.environ
    missing = [name for name in secret_names(job) if name not in variables]
    if missing:
        raise ValueError(f"skypilot.secret: not in this command's environment: {', '.join(missing)}")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        command = ["sky", *sky_arguments(job, file.name)]
        return subprocess.run(command, env=variables, check=False).returncode


# By target: the text that --dry-run prints; then the program that submits it, the advice where that is missing, and the function.
_TEXTS: dict[str, Callable[[Job], str]] = {
    "slurm": lambda job: shlex.join(["sbatch", *sbatch_arguments(job)]) + "\n",
    "kuberay": lambda job: yaml_text(*manifest(job)),
    "skypilot": lambda job: yaml_text(task(job)),
}
_SUBMITTERS: dict[str, tuple[str, str, Callable[[Job, str], int]]] = {
    "slurm": ("sbatch", "run this where jobs are submitted, or look at the command", _sbatch),
    "kuberay": ("kubectl", "run this where the cluster can be reached, or write the manifest", _kubectl),
    "skypilot": ("sky", "run this where SkyPilot is installed, or write the task", _sky),
}
