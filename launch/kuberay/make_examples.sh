#!/usr/bin/env bash
# Makes the manifests of this folder anew, by the commands below, run in the repository's root. A test
# (tests/launch/test_kuberay.py) says when they are out of date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

megarl launch kuberay recipes/qwen2.5_72b_grpo_lora.yaml --dry-run \
    --name qwen-72b --image registry.example/megarl:1 \
    --mount shared:/workspace --secret huggingface --kueue research --time 2-00:00:00 \
    trainer.save_freq=10 trainer.default_local_dir=runs/qwen-72b \
    > launch/kuberay/qwen2.5_72b_kueue.yaml

megarl launch kuberay recipes/deepseek_v3_grpo_lora.yaml --dry-run \
    --name deepseek-v3 --image registry.example/megarl:1 \
    --mount shared:/workspace --mount models:/models:ro --volcano research --rdma-resource rdma/ib --rdma-per-node 8 \
    --cpus-per-node 96 --memory-per-node 1500Gi --shared-memory 256Gi \
    trainer.save_freq=10 trainer.default_local_dir=runs/deepseek-v3 actor_rollout_ref.model.path=/models/DeepSeek-V3 \
    > launch/kuberay/deepseek_v3_volcano.yaml

megarl launch kuberay recipes/quickstart_ppo.yaml --dry-run --kind RayCluster --cpu \
    --name quickstart --image registry.example/megarl:1 \
    --mount shared:/workspace \
    --cpus-per-node 4 --memory-per-node 16Gi --shared-memory 2Gi --head-cpus 2 --head-memory 8Gi \
    > launch/kuberay/quickstart_raycluster.yaml
