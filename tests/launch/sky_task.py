"""Reads a task from standard input as SkyPilot does, and prints how SkyPilot has understood it. It runs with SkyPilot installed."""

import json
import sys

import sky
import yaml
from sky.utils import schemas
from sky.utils.common_utils import validate_schema

if __name__ == "__main__":
    config = yaml.safe_load(sys.stdin)
    validate_schema(config, schemas.get_task_schema(), "task: ")
    validate_schema(config["resources"], schemas.get_resources_schema(), "resources: ")
    secrets = [(name, "a secret") for name in config["secrets"]]
    task = sky.Task.from_yaml_config(config, secrets_overrides=secrets)
    understood = {
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
    json.dump(understood, sys.stdout)
