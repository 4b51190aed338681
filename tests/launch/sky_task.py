"""Reads tasks from standard input as SkyPilot does, each as JSON in a line, and prints a line for each: how SkyPilot has understood the task, or
{"error": ...}. It runs with SkyPilot installed.
"""

import json
import sys
from typing import Any

import sky
import yaml
from sky.utils import schemas
from sky.utils.common_utils import validate_schema


def understood(config: dict[str, Any]) -> dict[str, Any]:
    validate_schema(config, schemas.get_task_schema(), "task: ")
    validate_schema(config["resources"], schemas.get_resources_schema(), "resources: ")
    secrets = [(name, "a secret") for name in config["secrets"]]
    task = sky.Task.from_yaml_config(config, secrets_overrides=secrets)
    return {
        "nodes": task.num_nodes,
        "resources": [
            {
                "infra": resources.infra.to_str(),
                "accelerators": resources.accelerators,
                "spot": resources.use_spot,
                "image": list((resources.image_id or {}).values()),
                "cpus": resources.cpus,
                "memory": resources.memory,
                "disk_size": resources.disk_size,
                "recovery": resources.job_recovery,
            }
            for resources in task.resources
        ],
        "volumes": task.volumes,
        "envs": task.envs,
        "secrets": {name: value.get_secret_value() for name, value in task.secrets.items()},
        "setup": task.setup,
        "run": task.run,
        "workdir": task.workdir,
        "buckets": {path: storage.source for path, storage in task.storage_mounts.items()},
    }


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            answer = understood(yaml.safe_load(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
