#!/usr/bin/env bash
# Makes the tasks of this folder anew, by the commands below, run in the repository's root. A test
# (tests/launch/test_skypilot.py) says when they are out of date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

megarl launch skypilot recipes/qwen2.5_72b_grpo_lora.yaml --dry-run \
    --name qwen-72b --image registry.example/megarl:1-root --accelerator H100 --spot --infra kubernetes \
    --cpus-per-node 96 --memory-per-node 900 --mount shared:/workspace --secret HF_TOKEN \
    trainer.save_freq=10 trainer.default_local_dir=runs/qwen-72b \
    > launch/skypilot/qwen2.5_72b_spot.yaml
