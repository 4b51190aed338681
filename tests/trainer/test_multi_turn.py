"""A real run with an environment: the environment's tokens are not trained on, and the policy's tokens have log-probs given
the complete conversation before them."""

import itertools
import json

import numpy as np
import pytest

from megarl.data.tokenizer import load_tokenizer
from megarl.data.trajectories import environment_notes, ragged, read_trajectories
from tests.fixtures.runs import PPO, on, steps, succeed

PLUGIN = """
from megarl.environments.environment import Environment, StepResult, register_environment


@register_environment("test.parity")
class Parity(Environment):
    def __init__(self, word):
        self.word = word

    def reset(self, task):
        assert task.prompt.endswith("assistant\\n") and task.extra_info["split"] == "train" and task.messages is None
        self.sample = task.uid.rpartition("/")[2]

    def step(self, turn):
        if self.sample == "3" and turn.number == 1:
            raise ConnectionError("the server is gone")
        told = [{"role": "tool", "content": self.word}]
        return StepResult(told, score=float(turn.token_ids[0] % 2), numbers={"odd": turn.token_ids[0] % 2})
"""
SAID = "<|im_end|>\n<|im_start|>tool\nagain<|im_end|>\n<|im_start|>assistant\n"
NUM_TURNS = 3


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    """Two steps of 8 prompts with 4 samples each; every second token of the vocabulary ends a turn of the random model."""
    folder = tmp_path_factory.mktemp("turns")
    (folder / "parity.py").write_text(PLUGIN)
    stops = list(range(3, len(load_tokenizer(f"{task}/model", False)), 2))
    succeed(
        "train", *PPO, *on(task, folder / "out"), "critic=null", "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=false", f"plugins=[{folder}/parity.py]", "trainer.n_gpus_per_node=1",
        "data.max_response_length=80", "actor_rollout_ref.actor.optim.lr=1e-2", "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",  # two updates, so that old log-probs are computed before them
        *(f"actor_rollout_ref.actor.megatron.{name}_model_parallel_size=1" for name in ("tensor", "pipeline")),
        *(f"actor_rollout_ref.rollout.{setting}" for setting in (
            "tensor_model_parallel_size=1", "n=4", f"stop_token_ids={stops}", "multi_turn.enable=true",
            "multi_turn.environment=test.parity", "multi_turn.options={word: again}",
            f"multi_turn.max_assistant_turns={NUM_TURNS}", "multi_turn.step_timeout=30",
        )),
    )  # fmt: skip
    out = folder / "out"
    return out, [read_trajectories(out / "rollouts" / f"step-{number:06d}.parquet") for number in (1, 2)]


def split(batch):
    """Each row's slice of flat columns."""
    _, offsets = ragged(batch, "response_ids")
    return [slice(start, end) for start, end in itertools.pairwise(offsets)]


def test_the_trainers_log_probs_of_all_turns_are_the_engines(run):
    out, batches = run
    for batch, metrics in zip(batches, steps(out), strict=True):
        mask, _ = ragged(batch, "response_mask")
        engine, trainer = ragged(batch, "rollout_log_probs")[0], ragged(batch, "old_log_probs")[0]
        assert mask.sum() > 64 and (~mask).sum() > 64
        np.testing.assert_allclose(trainer[mask], engine[mask], atol=1e-4)
        assert metrics["training/rollout_log_prob_diff_max"] < 1e-4


def test_the_environments_words_are_masked(run, task):
    _, batches = run
    tokenizer = load_tokenizer(f"{task}/model", False)
    for batch in batches:
        ids, mask = ragged(batch, "response_ids")[0], ragged(batch, "response_mask")[0]
        log_probs, advantages = ragged(batch, "rollout_log_probs")[0], ragged(batch, "advantages")[0]
        assert not advantages[~mask].any() and advantages[mask].any()
        for row, (part, note) in enumerate(zip(split(batch), environment_notes(batch), strict=True)):
            turns = batch["num_turns"][row].as_py()
            if note.error is not None:
                continue
            others = ids[part][~mask[part]]
            said = tokenizer.decode(others)
            # a turn that ends with an end token does not get the template's end token
            assert said.replace("<|im_end|>\n<|im_start|>tool", "\n<|im_start|>tool") == (
                SAID.removeprefix("<|im_end|>") * (turns - 1)
            )
            assert not log_probs[part][~mask[part]].any() and mask[part][-1]


def test_the_environment_scores(run):
    out, batches = run
    for batch, metrics in zip(batches, steps(out), strict=True):
        notes = environment_notes(batch)
        good = np.array([note.error is None for note in notes])
        scores, own = batch["score"].to_numpy(), batch["environment_score"].to_numpy()
        np.testing.assert_array_equal(scores[good], own[good])
        assert set(scores[good]) == {0.0, 1.0}
        turns = batch["num_turns"].to_numpy()
        assert turns.max() == NUM_TURNS and set(turns[~good]) == {2}
        assert metrics["reward/num_turns"] == pytest.approx(turns.mean())
        assert metrics["reward/odd"] == pytest.approx(np.mean([note.numbers["odd"] for note in notes]))


def test_an_environment_that_fails_costs_its_trajectory(run):
    out, batches = run
    reported = [json.loads(line) for line in (out / "reward_errors.jsonl").read_text().splitlines()]
    for number, (batch, metrics) in enumerate(zip(batches, steps(out), strict=True), start=1):
        mask, advantages = ragged(batch, "response_mask")[0], ragged(batch, "advantages")[0]
        failed = {}
        for uid, part, note in zip(
            batch["uid"].to_pylist(), split(batch), environment_notes(batch), strict=True
        ):
            if note.error is None:
                assert mask[part].any()
                continue
            failed[uid] = note.error
            assert uid.endswith("/3") and not mask[part].any() and not advantages[part].any()
        assert set(failed.values()) == {"step: ConnectionError: the server is gone"}
        assert metrics["reward/failed"] == len(failed) > 0
        assert {line["uid"] for line in reported if line["when"] == f"step {number}"} == set(failed)


def test_turns_begin_where_the_policy_does(run):
    """Each turn begins with a token of the policy, after one of the environment, whose message is the same in all turns except the first."""
    _, batches = run
    for batch in batches:
        mask, _ = ragged(batch, "response_mask")
        for turns, part, note in zip(
            batch["num_turns"].to_pylist(), split(batch), environment_notes(batch), strict=True
        ):
            places = np.array([place for place, _ in note.turns])
            assert len(places) == turns and len({state for _, state in note.turns[1:]}) == min(1, turns - 1)
            if note.error is None:
                own = mask[part]
                assert own[places].all() and not own[places[1:] - 1].any()
