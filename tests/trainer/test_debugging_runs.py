"""Parts of real runs: a replayed step, generation without training, training without engines, and NaN losses."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures.runs import TWO_STEPS, megarl, on, steps, succeed

# A plugin with a policy loss that is NaN.
NAN_LOSS = """
from megarl.algorithms.policy_loss import POLICY_LOSSES, register_policy_loss

@register_policy_loss("nan_of_this_test")
def nan_of_this_test(log_probs, tokens, options):
    losses, sums = POLICY_LOSSES["vanilla"](log_probs, tokens, options)
    return losses * float("nan"), sums
"""
pytestmark = pytest.mark.timeout(900)  # a test has several runs, each with a time limit of its own


@pytest.fixture(scope="module")
def whole(ppo_run: tuple[Path, Path, str]) -> Path:
    """The folder of a run of two steps, with a checkpoint after each: actor TP2 x PP2, critic PP2 x DP2."""
    return ppo_run[1]


@pytest.fixture(scope="module")
def task(ppo_run: tuple[Path, Path, str]) -> Path:
    """The folder with the run's data and model."""
    return ppo_run[0]


def learnt(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that a step logs while it learns, without times and memory."""
    first_half = ("sync/", "reward/", "timing_s/", "perf/", "memory/", "time", "val/")
    return {name: value for name, value in metrics.items() if not name.startswith(first_half)}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "logs" not in path.parts
    }


def test_a_step_is_replayed_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    before = contents(whole)
    printed = succeed("replay", whole, "--step", "2", "--out", tmp_path / "hf")
    assert f"replaying step 2 of {whole} from {whole}/checkpoints/step-1" in printed
    count = len(learnt(steps(whole)[1])) - sum(name.startswith("health/") for name in steps(whole)[1])
    assert f"step 2: all {count - 1} numbers are equal bit for bit" in printed  # "step" is not counted
    weights, expected = (
        load_file(tmp_path / "hf" / "model.safetensors"),
        load_file(whole / "hf" / "model.safetensors"),
    )
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    assert "rollout" not in {
        path.name.split("-")[0] for path in (whole / "replays" / "step-2" / "logs").iterdir()
    }
    after = contents(whole)
    assert {name: content for name, content in after.items() if "replays" not in name} == before
    again, dumped = (
        pq.read_table(path / "step-000002.parquet")
        for path in (whole / "replays" / "step-2", whole / "rollouts")
    )
    assert again["advantages"].equals(dumped["advantages"])


@pytest.mark.slow
def test_a_step_is_replayed_in_another_layout_from_the_beginning(whole: Path, tmp_path: Path) -> None:
    """Without the checkpoint of step 1, both steps are replayed from the initial weights."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("config.yaml", "metrics.jsonl"):
        (run / name).write_bytes((whole / name).read_bytes())
    actor = "actor_rollout_ref.actor.megatron"
    printed = succeed(
        "replay", run, "--step", "2", f"{actor}.pipeline_model_parallel_size=1",
        f"{actor}.context_parallel_size=2",
    )  # fmt: skip
    assert f"replaying steps 1 to 2 of {run} from the models' first weights" in printed
    assert "changed: actor_rollout_ref.actor.megatron.context_parallel_size: 1 -> 2" in printed
    assert "numbers are not those of the run" in printed  # sums differ in their last bits
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] == ["actor/grad_norm"]]
    assert len(rows) == 2
    for _, logged, replayed, *_ in rows:
        assert float(replayed) == pytest.approx(float(logged), rel=1e-3)


def test_what_cannot_be_replayed(whole: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (
            (whole, "--step", "4"),
            "step 4 is replayed from step 3 on, and .*step-000004.parquet|step-000003.parquet is missing",
        ),
        ((whole, "--step", "1", "--checkpoint", whole / "checkpoints" / "step-2"), "steps from 3 on can"),
        ((tmp_path, "--step", "1"), "is no folder of a run: it has no config.yaml"),
    ):
        result = megarl("replay", *arguments)
        assert result.returncode == 2, result.stdout + result.stderr
        assert any(part in result.stderr for part in message.split("|")), result.stderr


@pytest.mark.slow
def test_collecting_and_learning_alone_equal_a_run(whole: Path, task: Path, tmp_path: Path) -> None:
    """A run that only generates and a run that only trains on its trajectories give the same results as a run that does both."""
    one = ("trainer.total_training_steps=1", "trainer.test_freq=-1")
    generating = ("trainer.rollout_only=true", "trainer.save_freq=-1")
    succeed("train", *TWO_STEPS, *on(task, tmp_path / "first"), *one, *generating)
    generated = pq.read_table(tmp_path / "first" / "rollouts" / "step-000001.parquet")
    expected = pq.read_table(whole / "rollouts" / "step-000001.parquet")
    for name in set(generated.column_names) - {"environment_score"}:  # is NaN
        assert generated[name].equals(expected[name]), name
    assert "advantages" not in generated.column_names and "score" in generated.column_names
    processes = {path.name.split("-")[0] for path in (tmp_path / "first" / "logs").iterdir()}
    assert not any(name.startswith("critic") for name in processes)
    assert "memory/generate/actor_optimizer" not in steps(tmp_path / "first")[0]
    printed = succeed(
        "train",
        *TWO_STEPS,
        *on(task, tmp_path / "second"),
        *one,
        f"trainer.train_only={tmp_path}/first/rollouts",
    )
    assert "rollout engines" not in printed
    assert learnt(steps(tmp_path / "second")[0]) == learnt(steps(whole)[0])


@pytest.mark.slow
def test_losses_that_are_nan_are_skipped_and_nothing_changes(whole: Path, task: Path, tmp_path: Path) -> None:
    plugin, run = tmp_path / "loss.py", tmp_path / "run"
    plugin.write_text(NAN_LOSS)
    settings = [
        *TWO_STEPS, *on(task, run), "trainer.test_freq=-1", f"trainer.train_only={whole}/rollouts", f"plugins=[{plugin}]",
        "actor_rollout_ref.actor.policy_loss.loss_mode=nan_of_this_test",
    ]  # fmt: skip
    printed = succeed("train", *settings, "trainer.on_nonfinite=skip")
    assert [step["training/skipped"] for step in steps(run)] == [1.0, 1.0]
    told = "actor: the gradient's norm is nan; the update was not made: the loss of trajectory train:"
    for step in (1, 2):
        path = run / "failures" / f"step-{step:06d}.parquet"
        assert f"step {step}: {told}" in printed
        assert f"megarl replay {run} --step {step} --trajectories {path}" in printed
        assert np.isfinite(np.concatenate(pq.read_table(path)["advantages"].to_pylist())).all()
    weights, first = (
        load_file(run / "hf" / "model.safetensors"),
        load_file(task / "model" / "model.safetensors"),
    )
    assert all(torch.equal(tensor, first[name]) for name, tensor in weights.items())
    states = [json.loads((run / "checkpoints" / f"step-{step}" / "run.json").read_text()) for step in (1, 2)]
    assert states[0]["controls"] == states[1]["controls"] and states[0]["controls"]["kl"]["coef"] == 0.001
    # The printed command finds the NaN again, and ends as the run would.
    result: subprocess.CompletedProcess = megarl(
        "replay", run, "--step", "2", "--trajectories", path, "trainer.on_nonfinite=stop"
    )
    assert result.returncode == 1 and told in result.stderr, result.stdout + result.stderr
