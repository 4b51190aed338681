"""Scores of steps: from characters to tokens, and, in addition to the score, into rewards and advantages."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.algorithms.kl import FixedKLController
from megarl.config import AlgorithmConfig
from megarl.data.trajectories import (
    Generation,
    append_column,
    build_trajectories,
    expand_prompts,
    ragged,
    take,
)
from megarl.rewards.sample import Score
from megarl.trainer.stages import scoring
from megarl.trainer.stages.advantages import compute_batch_advantages
from megarl.trainer.stages.step_scores import STEP_SCORES, last_tokens, read_step_scores
from tests.trainer.trajectories import FakeRun, FakeScorer, prompts

TEXT = "Tom has 3 pens.\n\nHe buys 4: 3+4=7.\n\n#### 7 \u00e9\u20ac\U0001f600!"


def test_a_step_ends_with_the_token_that_completes_its_text(tokenizer: PreTrainedTokenizerBase) -> None:
    """For every possible end, a step ends with the first token at which the decoded text, without special tokens, contains the step."""
    ids = [*tokenizer(TEXT)["input_ids"], tokenizer.eos_token_id]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole == TEXT
    ends = range(1, len(whole) + 1)
    for end, place in zip(ends, last_tokens(tokenizer, ids, ends), strict=True):
        texts = [tokenizer.decode(ids[:count], skip_special_tokens=True) for count in range(1, len(ids) + 1)]
        assert place == next(number for number, text in enumerate(texts) if text[:end] == whole[:end])
    assert last_tokens(tokenizer, ids, [len(whole)]) == [len(ids) - 2]  # not the end token


def test_bytes_that_are_no_character_leave_steps_their_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    """The text has only the first two bytes of a euro sign, then a step's end."""
    ids = tokenizer("Tom \u20ac")["input_ids"][:-1] + tokenizer("has.\n\n3")["input_ids"]
    whole = tokenizer.decode(ids)
    assert "\ufffd" in whole
    end = whole.index("\n\n") + 2
    (place,) = last_tokens(tokenizer, ids, [end])
    assert tokenizer.decode(ids[: place + 1])[:end] == whole[:end] != tokenizer.decode(ids[:place])[:end]


def collected(tokenizer: PreTrainedTokenizerBase, folder: Path, **weights: float) -> scoring.Scored:
    """Two answers of two words to a prompt; each word is a step, and only the second word of the first answer is good."""
    table = expand_prompts(prompts("p"), 2)
    texts = ["Tom has", "Tom buys"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    answers = [
        Generation(uid, own, [-1.0] * len(own), "stop", 1)
        for uid, own in zip(("p/0", "p/1"), ids, strict=True)
    ]

    def reward(sample):
        good = float(sample.response == "Tom has")
        return Score(sample.uid, good, steps=((3, 0.0), (len(sample.response), 0.5 * good - 0.25)))

    rewards = scoring.Rewards(FakeRun(folder), FakeScorer(reward), tokenizer, **weights)
    built = build_trajectories(table, answers)
    rewards.submit(built)
    return rewards.collect(built, "step 1")


def test_rewards_stand_at_the_ends_of_steps(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    scored = collected(tokenizer, tmp_path)
    steps = read_step_scores(scored.table)
    assert [[value for _, value in own] for own in steps] == [[0.0, 0.25], [0.0, -0.25]]
    assert scored.metrics()["reward/num_steps"] == 2.0 and scored.metrics()["reward/step_score"] == 0.0
    batch = append_column(scored.table, "old_log_probs", ragged(scored.table, "rollout_log_probs"))
    algorithm = AlgorithmConfig(adv_estimator="reinforce_plus_plus", whiten_advantages=False)
    found, _ = compute_batch_advantages(batch, algorithm, FixedKLController(0.0))
    rewards, offsets = ragged(found, "token_level_rewards")
    expected = np.zeros(len(rewards), np.float32)
    for row, own in enumerate(steps):
        for place, value in own:
            expected[offsets[row] + place] += value
    expected[offsets[1] - 1] += 1.0
    np.testing.assert_array_equal(rewards, expected)
    # Comparisons within a group use the sums: 1.25 and -0.25.
    found, metrics = compute_batch_advantages(
        batch, replace(algorithm, adv_estimator="rloo"), FixedKLController(0.0)
    )
    assert {*ragged(found, "advantages")[0].tolist()} == {1.5, -1.5}
    assert metrics["critic/score/mean"] == 0.5 and metrics["critic/rewards/mean"] == 0.5
    named = append_column(batch, "reward_part/score", np.array([1.0, 0.0]))
    gdpo = AlgorithmConfig(adv_estimator="gdpo", reward_weights={"score": 1.0})
    with pytest.raises(
        ValueError, match="'gdpo' compares named numbers of the reward, and would not see the scores of steps"
    ):
        compute_batch_advantages(named, gdpo, FixedKLController(0.0))


def test_steps_are_weighed_as_the_rules_score(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    table = collected(tokenizer, tmp_path).table
    rewards = scoring.Rewards(
        FakeRun(tmp_path),
        FakeScorer(lambda sample: Score(sample.uid, 1.0, steps=((1, 0.5),))),
        tokenizer,
        0.5,
        2.0,
    )
    plain = table.drop_columns(["score", STEP_SCORES])
    rewards.submit(plain)
    by_model = scoring.ModelScores(np.zeros(2, np.float32), np.zeros(2, bool))
    found = rewards.collect(plain, "step 1", by_model).table
    assert [own[0][1] for own in read_step_scores(found)] == [0.25, 0.25] and found["score"].to_pylist() == [
        0.5,
        0.5,
    ]


def test_a_greedy_answer_counts_with_its_steps(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    scored = collected(tokenizer, tmp_path)
    found = scoring.with_baselines(scored, np.array([False, True]))
    assert found.table[scoring.BASELINE_SCORE].to_pylist() == [-0.25]


def test_rows_without_steps(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Rows without steps have the column, too, so that parts of a batch can be concatenated; a table without it has no steps."""
    scored = collected(tokenizer, tmp_path)
    rewards = scoring.Rewards(FakeRun(tmp_path), FakeScorer(lambda sample: Score(sample.uid, 1.0)), tokenizer)
    plain = scored.table.drop_columns(["score", STEP_SCORES])
    rewards.submit(plain)
    other = rewards.collect(plain, "step 1")
    assert other.table[STEP_SCORES].to_pylist() == ["[]", "[]"] and read_step_scores(plain) == [[], []]
    both = scoring.concat_scored([scored, other])
    assert [len(own) for own in read_step_scores(take(both.table, np.array([3, 0])))] == [0, 2]
