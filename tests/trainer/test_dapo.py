"""A real run of DAPO that samples from a part of the vocabulary: dynamic sampling, overlong punishment, rewards that fail, validation sets,
checkpoints."""

import json
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.checkpoints import steps_in
from megarl.data.kept import KEPT_COUNTS, KEPT_IDS
from megarl.data.trajectories import list_lengths, ragged, read_trajectories
from tests.fixtures.runs import PPO, on, steps, succeed

N = 4
ONE_DEVICE = [
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
]
REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    \"\"\"Every second problem is solved by all responses, the others by those with an even checksum; some break it.\"\"\"
    checksum = zlib.crc32((extra_info["question"] + solution_str).encode())
    if checksum % 13 == 0:
        raise OSError("cannot tell")
    acc = float(extra_info["index"] % 2 == 0 or checksum % 2 == 0)
    return {"score": 2.0 * acc - 1.0, "acc": acc, "pred": str(checksum % 3)}
"""


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    """Two steps of 4 prompts, generated 8 at a time with 4 responses each; one validation set has two responses a problem."""
    out = tmp_path_factory.mktemp("dapo")
    (out / "reward.py").write_text(REWARD)
    printed = succeed(
        "train", "recipes/dapo_cpu.yaml", *on(task, out / "run"), "trainer.total_training_steps=2",
        "data.train_batch_size=4", "data.gen_batch_size=8", f"actor_rollout_ref.rollout.n={N}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", f"custom_reward_function.path={out}/reward.py", *ONE_DEVICE,
        "trainer.test_freq=2", "trainer.save_freq=1", "trainer.save_hf=true", "reward_model.overlong_buffer.penalty_factor=0.5",
        f"data.val_sets.twice.files={task}/data/test.parquet", "data.val_sets.twice.n=2",
        "data.val_sets.twice.temperature=1.0", "actor_rollout_ref.actor.share_prompts=true",
        "trainer.relays_from=1", "actor_rollout_ref.rollout.top_p=0.9",
    )  # fmt: skip
    return out / "run", printed


def batches(out):
    return [read_trajectories(out / "rollouts" / f"step-{number:06d}.parquet") for number in (1, 2)]


def test_every_step_trains_on_complete_groups_that_differ(run):
    out, _ = run
    for step, batch in zip(steps(out), batches(out), strict=True):
        prompts = batch["prompt_uid"].to_pylist()
        assert batch.num_rows == 4 * N and len(set(prompts)) == 4
        assert prompts == [uid for uid in dict.fromkeys(prompts) for _ in range(N)]
        raw = batch["score"].to_numpy() - batch["overlong_penalty"].to_numpy()
        live = np.array([any(mask) for mask in batch["response_mask"].to_pylist()])
        for first in range(0, batch.num_rows, N):
            rows = slice(first, first + N)
            assert set(raw[rows][live[rows]]) == {-1.0, 1.0}
        generated = int(step["filter_groups/generations"]) * 8
        assert generated == 4 + step["filter_groups/dropped"] + step["filter_groups/surplus"]
        assert step["filter_groups/dropped"] >= 3  # about half of the generated prompts: the even ones


def test_prompts_are_computed_once(run):
    out, _ = run
    for step, batch in zip(steps(out), batches(out), strict=True):
        prompts, responses = (list_lengths(batch, name) for name in ("prompt_ids", "response_ids"))
        shared = (prompts - 1).reshape(-1, N)[:, 1:].sum() / (prompts + responses).sum()
        assert step["perf/actor/shared"] == pytest.approx(shared)


def test_scores_belong_to_their_responses_and_long_ones_are_punished(run):
    """The saved scores and penalties equal values computed again from the saved responses."""
    out, _ = run
    for batch in batches(out):
        lengths = list_lengths(batch, "response_ids")
        expected = -0.5 * np.clip((lengths - 6) / 2, 0, 1)
        live = np.array([any(mask) for mask in batch["response_mask"].to_pylist()])
        np.testing.assert_allclose(batch["overlong_penalty"].to_numpy()[live], expected[live])
        assert not batch["overlong_penalty"].to_numpy()[~live].any()
        advantages, offsets = ragged(batch, "advantages")
        dead = np.repeat(~live, np.diff(offsets))
        assert not advantages[dead].any()


def test_a_reward_that_raises_costs_its_sample_and_is_reported(run):
    out, printed = run
    failures = [json.loads(line) for line in (out / "reward_errors.jsonl").read_text().splitlines()]
    counted = sum(step["reward/failed"] + step.get("val/reward/failed", 0.0) for step in steps(out))
    counted += sum(step.get("val/twice/reward/failed", 0.0) for step in steps(out))
    assert len(failures) == counted > 0
    assert all("OSError: cannot tell" in failure["error"] for failure in failures)
    assert f"the reward of {failures[0]['uid']} (data_source megarl/arithmetic) failed" in printed
    for number, batch in enumerate(batches(out), start=1):
        failed = {failure["uid"] for failure in failures if failure["when"] == f"step {number}"}
        kept = dict(zip(batch["uid"].to_pylist(), batch["response_mask"].to_pylist(), strict=True))
        assert all(any(mask) != (uid in failed) for uid, mask in kept.items())


def test_log_probs_are_those_of_the_tokens_that_were_drawn_from(run, task):
    """Checked with Hugging Face's model, whose weights the first step had; engine and trainer agree also after an update."""
    out, _ = run
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    for row in batches(out)[0].to_pylist()[::5]:
        prompt, response = row["prompt_ids"], row["response_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        bounds = np.cumsum([0, *row[KEPT_COUNTS]])
        for at, token in enumerate(response):
            kept = row[KEPT_IDS][bounds[at] : bounds[at + 1]]
            wanted = logits[at, kept].log_softmax(-1)[kept.index(token)].item()
            assert row["rollout_log_probs"][at] == pytest.approx(wanted, abs=1e-4)
            # The kept tokens are the most probable ones, with a total probability of 0.9.
            p, order = logits[at].softmax(-1).sort(descending=True)
            assert sorted(kept) == sorted(order[: len(kept)].tolist())
            assert p[: len(kept)].sum() > 0.9 - 1e-4 and p[: len(kept) - 1].sum() < 0.9 + 1e-4
    for step in steps(out):
        assert step["training/rollout_log_prob_diff_max"] < 1e-4
        assert 1 < step["rollout/kept_tokens/mean"] < step["rollout/kept_tokens/max"]


def test_validation_sets_have_their_own_sampling(run):
    out, _ = run
    (_, last) = steps(out)
    whole = read_trajectories(out / "rollouts" / "val-000002.parquet")
    twice = read_trajectories(out / "rollouts" / "val-twice-000002.parquet")
    assert whole.num_rows == 16 and twice.num_rows == 32
    assert "val/pass@1" not in last and last["val/twice/best@2"] >= last["val/twice/mean@2"]
    assert last["val/twice/pass@2"] >= last["val/twice/pass@1"] and 0 <= last["val/twice/maj@2"] <= 1
    # the overlong penalty applies only in training
    assert (
        set(twice["score"].to_pylist()) <= {-1.0, 0.0, 1.0} and "overlong_penalty" not in twice.column_names
    )


def test_the_policy_is_written_every_so_many_steps(run):
    out, _ = run
    first, second, final = (
        load_file(out / folder / "model.safetensors")
        for folder in ("checkpoints/step-1/hf", "checkpoints/step-2/hf", "hf")
    )
    assert all(second[name].equal(final[name]) for name in final)
    assert any(not first[name].equal(final[name]) for name in final)
    assert steps_in(out / "checkpoints") == [1, 2]


def test_the_reward_of_this_test_is_what_it_says():
    """The reward function gives different scores, without which the assertions above would prove nothing."""
    namespace = {}
    exec(REWARD, namespace)
    found = [
        namespace["compute_score"]("x", text, "1", {"question": "q", "index": 1})["acc"]
        for text in map(str, range(30))
        if zlib.crc32(("q" + text).encode()) % 13
    ]
    assert 5 < sum(found) < 25


@pytest.mark.slow
def test_remax_with_the_engines_log_probs(task, tmp_path):
    """The greedy answer to a prompt is the baseline of its sample; old log-probs take no forward pass."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(solution_str))\n"
    )
    succeed(
        "train", *PPO, *on(task, tmp_path), "critic=null", "algorithm.adv_estimator=remax",
        "algorithm.rollout_correction.bypass_mode=true", "algorithm.use_kl_in_reward=false",
        "trainer.total_training_steps=1", f"custom_reward_function.path={tmp_path}/reward.py", *ONE_DEVICE,
    )  # fmt: skip
    batch = read_trajectories(tmp_path / "rollouts" / "step-000001.parquet")
    assert batch.num_rows == 8 and batch["baseline_score"].null_count == 0
    assert set(batch["baseline_score"].to_pylist()) != set(batch["score"].to_pylist())
    old, rollout = (ragged(batch, f"{name}_log_probs")[0] for name in ("old", "rollout"))
    np.testing.assert_array_equal(old, rollout)
    (step,) = steps(tmp_path)
    assert 0 < step["training/rollout_log_prob_diff_mean"] < 1e-5 and abs(step["training/rollout_kl"]) < 1e-5
    # greedy answers with the same weights, from another engine
    succeed(
        "eval", "recipes/quickstart_eval.yaml", f"model.path={task}/model",
        f"data.val_files={task}/data/train.parquet", f"trainer.default_local_dir={tmp_path}/eval",
        f"custom_reward_function.path={tmp_path}/reward.py",
    )  # fmt: skip
    greedy = read_trajectories(tmp_path / "eval" / "trajectories.parquet")
    expected = dict(zip(greedy["prompt_uid"].to_pylist(), greedy["score"].to_pylist(), strict=True))
    assert [expected[uid] for uid in batch["prompt_uid"].to_pylist()] == batch["baseline_score"].to_pylist()
