"""Giving a recipe to a cluster: this machine, Slurm, Kubernetes with KubeRay, clouds with SkyPilot.

Guarantees:
- One description of a job (`LaunchConfig`) serves all of them, and is checked against the recipe before anything is submitted.
- The same arguments give the same script, the same manifest and the same task.
- `--dry-run` prints the submission and changes nothing.

It does not know the training that a recipe describes, torch, Ray, Megatron-core or SGLang.
"""
