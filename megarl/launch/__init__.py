"""Giving a recipe to a cluster: this machine, Slurm, Kubernetes with KubeRay, clouds with SkyPilot.

The room promises: one description of a job (`LaunchConfig`) for all of them, checked against the recipe before
anything is submitted; the same arguments give the same script, the same manifest and the same task; `--dry-run` prints the
submission and changes nothing.

It does not know the training that a recipe describes, torch, Ray, Megatron-core or SGLang.
"""
