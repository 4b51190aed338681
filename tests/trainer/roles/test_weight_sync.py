"""Weight syncs of real runs with settings other than the defaults."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.data.trajectories import read_trajectories
from tests.fixtures.runs import PPO, on, steps, succeed
from tests.trainer.test_families import greedy_differences

SMALL = [
    "critic=null", "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.num_engines=2", "trainer.total_training_steps=2",
    "actor_rollout_ref.actor.optim.lr=1e-2",
]  # fmt: skip


@pytest.mark.slow
def test_point_to_point_in_float8_and_only_what_changed(task, tmp_path):
    """Two actor ranks, two engines; the validation before the first step has already synced the weights of step 1."""
    succeed(
        "train", *PPO, *on(task, tmp_path), *SMALL, "trainer.val_before_train=true", "trainer.test_freq=2",
        "actor_rollout_ref.rollout.sync_transport=p2p", "actor_rollout_ref.rollout.sync_skip_unchanged=true",
        "actor_rollout_ref.rollout.quantization=fp8", "actor_rollout_ref.rollout.quantization_block_size=[8,16]",
    )  # fmt: skip
    _, first, second = steps(tmp_path)
    total = first["sync/bytes_total"]
    assert first["sync/bytes_unchanged"] == total and first["sync/bytes_written_max_per_rank"] == 0
    assert second["sync/bytes_unchanged"] < 0.5 * total
    for step in (first, second):
        assert step["sync/bytes_max_per_rank"] == total / 2
        # the trainer ranks also hold the buffers of the engine ranks: two buckets for each side
        assert step["sync/engine_buffer_bytes_max"] == 0 < step["sync/trainer_buffer_bytes_max"]
        # the engine's weights have 3 bits of mantissa: log-probs are close, but less than with float32
        assert 1e-4 < step["training/rollout_log_prob_diff_max"] < 0.5
    for step, model in ((0, task / "model"), (2, tmp_path / "hf")):
        answers = read_trajectories(tmp_path / "rollouts" / f"val-{step:06d}.parquet")
        rounded = in_float8(model, tmp_path / f"rounded-{step}", (8, 16))
        assert greedy_differences(rounded, answers) == (0, pytest.approx(0.0, abs=1e-4))
        assert greedy_differences(model, answers) != (0, pytest.approx(0.0, abs=1e-4))


def in_float8(model, out, block):
    """A copy of the model whose layers' projections have their float8 values: w / s is rounded, then multiplied by s, where
    s = amax / 448 of each block."""
    shutil.copytree(model, out)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            (rows, down), (columns, right) = (
                (size // step, step) for size, step in zip(tensor.shape, block, strict=True)
            )
            blocks = tensor.view(rows, down, columns, right)
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            tensors[name] = ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).view(tensor.shape)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.slow
def test_adapters_are_served_with_weights_that_are_sent_once(task, tmp_path):
    """Two actor ranks, two engines; step 2's validation uses adapters that were sent without the base weights."""
    printed = succeed(
        "train", *PPO, *on(task, tmp_path), *SMALL, "trainer.test_freq=2", "actor_rollout_ref.model.lora.rank=4",
        "actor_rollout_ref.actor.entropy_coeff=0.1",  # so that there is a gradient with any rewards
    )  # fmt: skip
    assert "rollout engines serve adapters beside the weights" in printed
    first, second = steps(tmp_path)
    assert second["sync/bytes_total"] < 0.25 * first["sync/bytes_total"]
    assert second["sync/bytes_written_max_per_rank"] == second["sync/bytes_total"] / 2
    assert second["sync/buckets"] < first["sync/buckets"]
    for step in (first, second):
        assert step["training/rollout_log_prob_diff_max"] < 1e-4
    answers = read_trajectories(tmp_path / "rollouts" / "val-000002.parquet")
    assert greedy_differences(tmp_path / "hf", answers) == (0, pytest.approx(0.0, abs=1e-4))
    assert greedy_differences(task / "model", answers) != (0, pytest.approx(0.0, abs=1e-4))


@pytest.mark.slow
def test_an_engine_on_two_nodes(task, tmp_path):
    """Both nodes are this machine: one engine has two processes, and each of the actor's two ranks sends its half to one of them."""
    succeed(
        "train", *PPO, *on(task, tmp_path), *SMALL, "trainer.test_freq=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "actor_rollout_ref.rollout.num_engines=1",
        "actor_rollout_ref.rollout.nodes_per_engine=2",
        "actor_rollout_ref.actor.entropy_coeff=0.1",  # so that there is a gradient with any rewards
    )  # fmt: skip
    assert {path.name for path in (tmp_path / "logs").glob("rollout*")} == {
        "rollout-rank0.log",
        "rollout-rank0.part1.log",
    }
    for step in steps(tmp_path):
        assert step["training/rollout_log_prob_diff_max"] < 1e-4
        assert 0 < step["sync/bytes_written_max_per_rank"] < step["sync/bytes_total"]
    answers = read_trajectories(tmp_path / "rollouts" / "val-000002.parquet")
    assert greedy_differences(tmp_path / "hf", answers) == (0, pytest.approx(0.0, abs=1e-4))
    assert greedy_differences(task / "model", answers) != (0, pytest.approx(0.0, abs=1e-4))


@pytest.mark.slow
def test_engines_apart_get_the_same_from_each_other_whatever_carries_it(task, tmp_path):
    """Two actor ranks, two engines with devices of their own, where the second engine gets all weights from the first."""
    weights = []
    for transport in ("auto", "p2p", "nixl"):
        run = tmp_path / transport
        succeed(
            "train", *PPO, *on(task, run), *SMALL, "trainer.n_gpus_per_node=4", "trainer.mode=one_step_off",
            "resource_pools={train: {n_gpus_per_node: 2}, serve: {n_gpus_per_node: 2}}",
            "actor_rollout_ref.actor.resource_pool=train", "actor_rollout_ref.rollout.resource_pool=serve",
            "algorithm.rollout_correction.rollout_is=token", f"actor_rollout_ref.rollout.sync_transport={transport}",
        )  # fmt: skip
        first, _ = steps(run)
        assert first["training/rollout_log_prob_diff_max"] < 1e-4
        assert (first["sync/engine_buffer_bytes_max"] > 0) == (transport != "auto")
        assert first["sync/bytes_max_per_rank"] == first["sync/bytes_total"] / 2
        weights.append(load_file(run / "hf" / "model.safetensors"))
    for found in weights[1:]:
        assert all(torch.equal(found[name], values) for name, values in weights[0].items())
