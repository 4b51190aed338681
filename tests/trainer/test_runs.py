"""Complete runs from the command line: real Megatron ranks under Ray and a real SGLang engine."""

import json
import shutil

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from megarl.costs.tensors import BUCKET, SLOTS
from megarl.data.loader import TableLoader
from megarl.data.sft import SftDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import ragged, read_trajectories
from megarl.trainer.run.earlier_runs import ENTRIES
from megarl.trainer.run.logger import read_metrics
from tests.data.shared import SHARED_DATA
from tests.fixtures.runs import PPO, TWO_STEPS, environment, on, steps, succeed, warm


def test_runs_begin_when_their_imports_are_done():
    """If a test or an import changed the environment, every run would do its own imports, which take some ten processor seconds."""
    assert warm().changed(environment()) == set()


def test_the_first_update_is_on_policy_exactly(ppo_run):
    _, out, _ = ppo_run
    for step in steps(out):
        assert step["actor/ratio_mean"] == 1.0 and step["actor/ppo_kl"] == 0.0
        assert step["actor/pg_clipfrac"] == 0.0


def test_engine_and_trainer_agree_also_after_an_update(ppo_run):
    _, out, _ = ppo_run
    first, second = steps(out)
    assert first["training/rollout_log_prob_diff_max"] < 1e-4
    assert second["training/rollout_log_prob_diff_max"] < 1e-4
    # the update changed the weights, so that log-probs in the second step would differ after a wrong sync
    assert second["actor/ref_kl"] != 0.0 and first["actor/ref_kl"] == 0.0


def test_trajectories_are_kept_as_they_were_trained_on(ppo_run):
    _, out, _ = ppo_run
    for number in (1, 2):
        batch = read_trajectories(out / "rollouts" / f"step-{number:06d}.parquet")
        assert batch.num_rows == 8 and set(batch["weight_version"].to_pylist()) == {number}
        for name in (
            "old_log_probs",
            "ref_log_probs",
            "values",
            "advantages",
            "returns",
            "token_level_rewards",
        ):
            flat, _ = ragged(batch, name)
            assert torch.isfinite(torch.tensor(flat)).all(), name


def test_everything_is_logged_and_said(ppo_run):
    _, out, printed = ppo_run
    step = steps(out)[1]
    for name in (
        "critic/score/mean", "actor/ref_kl", "actor/entropy", "actor/pg_clipfrac", "critic/vf_loss",
        "actor/grad_norm", "critic/grad_norm", "response_length/mean", "perf/tokens_per_s",
        "timing_s/sync", "timing_s/generate", "timing_s/update", "sync/bytes_total", "val/score/mean",
    ):  # fmt: skip
        assert name in step, name
    assert 0 <= step["perf/actor/padding"] < 0.1  # TP2 with sequence parallelism: an even number of tokens
    assert step["perf/critic/micro_imbalance"] >= step["perf/critic/rank_imbalance"] >= 0  # DP 2
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("train/generations")] == [1, 2]
    plan = json.loads((out / "batch_plan.json").read_text())
    assert (plan["trajectories_per_step"], plan["actor"]["tp"], plan["critic"]["dp"]) == (8, 2, 2)
    assert "kl_coef: 0.001" in (out / "config.yaml").read_text()
    opening, _, _ = printed.partition("starting models")
    assert len(opening.splitlines()) <= 25 and "64 prompts" in opening and "config.yaml" in opening
    assert "actor_weights" in (out / "memory.txt").read_text() and "actor_weights" not in printed
    assert "tp2 x pp2" in printed and "step 2/2" in printed and str(out) in printed


def entries_of_a_run(folder):
    return {path.name for pattern in ENTRIES for path in folder.glob(pattern)}


def test_all_that_a_run_writes_would_be_kept_from_a_later_one(ppo_run):
    _, out, _ = ppo_run
    assert {path.name for path in out.iterdir()} == entries_of_a_run(out) | {"checkpoints"}


def test_an_unhealthy_metric_is_reported_once(ppo_run):
    """Every gradient norm is over the bound; the finding is reported once with advice, and not again in the next step."""
    _, out, printed = ppo_run
    findings = [json.loads(line) for line in (out / "health.jsonl").read_text().splitlines()]
    (found,) = [finding for finding in findings if finding["kind"] == "grad_norm"]
    assert found["step"] == 1 and found["value"] == steps(out)[0]["actor/grad_norm"]
    assert "lower actor_rollout_ref.actor.optim.lr from 0.01 to 0.005" in found["advice"]
    assert printed.count("health: step 1: actor/grad_norm is") == 1
    assert "health: step 2: actor/grad_norm" not in printed
    for step in steps(out):
        assert 0.0 <= step["health/ngram_repetition"] <= 1.0 and step["health/actions"] == 0.0


def test_bytes_are_those_of_the_weights(ppo_run):
    task, out, _ = ppo_run
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    every = sum(p.numel() for p in model.parameters())
    for step in steps(out):
        # float32; weights are sharded over two engine ranks, except norms, which both receive
        assert step["sync/bytes_total"] == 4 * (every + norms)
        links = ("local", "intra_node", "inter_node")
        assert sum(step[f"sync/bytes_{link}"] for link in links) == step["sync/bytes_total"]
        assert step["sync/bytes_inter_node"] == 0 < step["sync/bytes_local"]


def test_the_export_answers_as_the_engine_does(ppo_run, tmp_path):
    task, out, _ = ppo_run
    model = AutoModelForCausalLM.from_pretrained(out / "hf")
    before = AutoModelForCausalLM.from_pretrained(task / "model").state_dict()
    moved = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(moved) == len(before)
    succeed(
        "eval", "recipes/quickstart_eval.yaml", f"model.path={out}/hf",
        f"data.val_files={task}/data/test.parquet", f"trainer.default_local_dir={tmp_path}",
    )  # fmt: skip
    assert "16 of 16" in succeed("verify", out / "hf", tmp_path / "trajectories.parquet")
    assert {path.name for path in tmp_path.iterdir()} == entries_of_a_run(tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["score/mean"] == steps(out)[1]["val/score/mean"] and scores["num_problems"] == 16


OFFLOAD = ("param_offload", "grad_offload", "optimizer_offload")


@pytest.mark.slow
def test_a_resumed_run_with_memory_that_comes_and_goes_is_the_same(ppo_run, tmp_path):
    """The same run, resumed from step 1, where memory that a phase does not use is off the devices. The critic's optimizer states are
    always on the host, except for slots (of float32 weights, 8 bytes each)."""
    task, out, _ = ppo_run
    shutil.copytree(out / "checkpoints" / "step-1", tmp_path / "checkpoints" / "step-1")
    printed = succeed(
        "train", *TWO_STEPS, *on(task, tmp_path), "trainer.save_freq=-1", "actor_rollout_ref.rollout.free_cache_engine=true",
        *(f"{role}.megatron.{key}=true" for role in ("actor_rollout_ref.actor", "critic") for key in OFFLOAD),
        "critic.optim.optimizer_cpu_offload=true",
    )  # fmt: skip
    assert "going on from step 1" in printed and "param_offload: None -> True" in printed
    for expected, found in zip(steps(out)[1:], steps(tmp_path), strict=True):
        measured = {
            name for name in found if name.startswith(("timing_s/", "perf/", "sync/seconds", "memory/"))
        }
        names = set(found) - measured - {"time"}
        assert {name: found[name] for name in names} == {name: expected[name] for name in names}
        assert {"actor/grad_norm", "critic/vf_loss", "training/rollout_log_prob_diff_max"} <= names
        assert_one_copy_and_one_cache(found)
        assert expected["memory/sync/rollout_kv_cache"] > 0 < expected["memory/generate/actor_gradients"]
        assert found["memory/update_actor/actor_optimizer"] == expected["memory/update/actor_optimizer"] > 0
        assert found["memory/update_critic/critic_optimizer"] == SLOTS * BUCKET * 8
    for name in ("hf/model.safetensors", "rollouts/step-000002.parquet"):
        assert (out / name).read_bytes() == (tmp_path / name).read_bytes()
    assert "rollout_kv_cache" in printed and "all of these" in printed


def assert_one_copy_and_one_cache(step):
    """In each phase exactly the expected parts were measured on the devices; see `megarl.costs.phases`."""
    there = {
        phase: {
            name.rpartition("/")[2]
            for name, value in step.items()
            if name.startswith(f"memory/{phase}/")
            and not name.endswith(("_on_host", "_buffers", "/total"))
            and value
        }
        for phase in ("sync", "generate", "evaluate_models", "update_critic", "update_actor")
    }
    assert there == {
        "sync": {"actor_weights", "rollout_weights"},
        "generate": {"rollout_weights", "rollout_kv_cache"},
        "evaluate_models": {"actor_weights", "ref_weights", "critic_weights"},
        "update_critic": {"critic_weights", "critic_gradients", "critic_optimizer"},
        "update_actor": {"actor_weights", "actor_gradients", "actor_optimizer"},
    }


MY_LOSS = """
from megarl.algorithms.policy_loss import gspo, register_policy_loss

@register_policy_loss("mine")
def mine(log_probs, tokens, options):
    losses, sums = gspo(log_probs, tokens, options)
    return losses, {**sums, "actor/encouraged": (tokens.advantages > 0).sum().double()}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))
"""


@pytest.mark.slow
def test_grpo_with_a_reference_on_devices_of_its_own(task, tmp_path):
    """No critic, four samples a prompt, KL as a loss; the reference has another layout and pool than the actor.

    The run has a user-defined policy loss, importance weights, and a KL at which updates end.
    """
    (tmp_path / "my_loss.py").write_text(MY_LOSS)
    succeed(
        "train", *PPO, *on(task, tmp_path), "critic=null", "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
        "actor_rollout_ref.actor.resource_pool=main", "resource_pools.main.n_gpus_per_node=2",
        "actor_rollout_ref.ref.resource_pool=other", "resource_pools.other.n_gpus_per_node=1",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=3",
        "actor_rollout_ref.ref.megatron.param_offload=true", "trainer.relays_from=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1", "actor_rollout_ref.rollout.num_engines=2",
        "trainer.total_training_steps=1", f"plugins=[{tmp_path}/my_loss.py]",
        "actor_rollout_ref.actor.policy_loss.loss_mode=mine", "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0", f"custom_reward_function.path={tmp_path}/my_loss.py",
        "actor_rollout_ref.actor.ppo_epochs=3", "actor_rollout_ref.actor.target_kl=1e-3",
        "algorithm.rollout_correction.rollout_is=token",
    )  # fmt: skip
    (step,) = steps(tmp_path)
    assert 0 < step["actor/encouraged"] < 1
    assert step["rollout_corr/is_weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert step["actor/stopped_early"] == 1 and 2 <= step["actor/updates"] < 6
    assert "actor/kl_loss" in step and not any(name.startswith("critic/vf") for name in step)
    assert step["memory/generate/ref_weights"] == 0 < step["memory/evaluate_models/ref_weights"]
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "actor-rank0.log", "actor-rank1.log", "actor-relay-rank0.log", "ref-rank0.log", "rollout-rank0.log",
        "rollout-rank1.log",
    }  # fmt: skip
    batch = read_trajectories(tmp_path / "rollouts" / "step-000001.parquet")
    assert batch.num_rows == 32 and len(set(batch["prompt_uid"].to_pylist())) == 8
    old, ref = (torch.tensor(ragged(batch, name)[0]) for name in ("old_log_probs", "ref_log_probs"))
    torch.testing.assert_close(old, ref, atol=1e-5, rtol=0)  # the same weights in two layouts
    assert step["training/rollout_log_prob_diff_max"] < 1e-4  # from both engines


@pytest.mark.slow  # test_tuning_runs.py has SFT on text, with several epochs
def test_sft_follows_transformers(task, tmp_path):
    """Three steps on TP2 x PP2 give the losses of a plain loop over the Hugging Face model."""
    succeed(
        "sft", "recipes/quickstart_sft.yaml", f"data.train_files={task}/data/sft.parquet",
        f"data.val_files={task}/data/sft.parquet", f"model.path={task}/model", "data.train_batch_size=16",
        "trainer.total_training_steps=3", "trainer.test_freq=3", f"trainer.default_local_dir={tmp_path}",
        "optim.lr_warmup_steps=0", "optim.lr=1e-3", "optim.weight_decay=0",
    )  # fmt: skip
    dataset = SftDataset(
        str(task / "data/sft.parquet"), load_tokenizer(str(task / "model")), max_length=64,
        response_key="extra_info.answer",
    )  # fmt: skip
    expected = plain_losses(task / "model", TableLoader(dataset, 16, True, 1))
    found = [step["train/loss"] for step in read_metrics(tmp_path)]
    assert found == pytest.approx(expected, rel=1e-5)
    assert 0 < steps(tmp_path)[2]["val/loss"] < found[0]


def plain_losses(path, loader):
    return losses_of(AutoModelForCausalLM.from_pretrained(path), loader)


def losses_of(model, loader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _, batch in zip(range(3), loader, strict=False):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for ids, mask in zip(batch["input_ids"].to_pylist(), batch["loss_mask"].to_pylist(), strict=True):
            log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            chosen = log_probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            total, count = total - chosen[torch.tensor(mask[1:])].sum(), count + sum(mask[1:])
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.skipif(
    not SHARED_DATA.is_dir(), reason="GSM8K and stories260k lie in ../shared/data, which is not here"
)
@pytest.mark.slow
def test_gsm8k_from_real_pretrained_weights(tmp_path):
    """Real problems and a real model: the reward is 0, but all stages run and the log-probs agree."""
    from megarl.data.gsm8k import convert_gsm8k

    convert_gsm8k(str(SHARED_DATA / "gsm8k"), tmp_path / "data")
    succeed(
        "train", "recipes/gsm8k_cpu_smoke.yaml", f"data.train_files={tmp_path}/data/train.parquet",
        f"data.val_files={tmp_path}/data/test.parquet", f"trainer.default_local_dir={tmp_path}/run",
        f"actor_rollout_ref.model.path={SHARED_DATA}/stories260k",
    )  # fmt: skip
    found = steps(tmp_path / "run")
    assert [step["step"] for step in found] == [1, 2, 3]
    assert all(step["training/rollout_log_prob_diff_max"] < 1e-4 for step in found)
    # a trained model has far less entropy than one with random weights and 512 tokens (6.2 nats)
    assert all(step["actor/entropy"] < 4.0 for step in found)
