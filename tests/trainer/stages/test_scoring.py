import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from megarl.config import OverlongBufferConfig
from megarl.data.trajectories import expand_prompts, ragged, replace_column, take, validate_trajectories
from megarl.rewards.processes.scorer import Scorer
from megarl.rewards.registry import RewardSpec
from megarl.trainer.stages import scoring
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.stages.reward_model import ModelScores
from megarl.trainer.stages.rollouts import greedy_requests
from tests.trainer.trajectories import (
    FakeRun,
    FakeScorer,
    FakeTokenizer,
    answer,
    games,
    prompts,
    score,
    scored,
)


def rewards(tmp_path, function, **weights):
    return scoring.Rewards(FakeRun(tmp_path), FakeScorer(function), FakeTokenizer(), **weights)


def length_of(sample):
    """A reward function: the number of words."""
    return score(sample.uid, float(len(sample.response.split())), words=2.0)


def test_scores_find_their_rows_whatever_finished_first(tmp_path):
    """Trajectories are submitted as they finish, in any order and in any parts; the rows stay in the order of the requests."""
    table = answer(expand_prompts(prompts("a", "b", "c"), 2))
    asked = rewards(tmp_path, length_of)
    for rows in ([4, 1], [0], [5, 3, 2]):
        asked.submit(take(table, rows))
    found = asked.collect(table, "step 1", None)
    assert found.scores.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.table["uid"].to_pylist() == table["uid"].to_pylist()
    assert found.metrics() == {"reward/failed": 0.0, "reward/words": 2.0}
    assert not asked.run.said and not list(tmp_path.iterdir())


def paths(*uids):
    """Trajectories with these uids, whose responses have 1, 2, 3, ... words."""
    table = answer(expand_prompts(prompts(*(f"p{number}" for number in range(len(uids)))), 1))
    return replace_column(table, "uid", pa.array(uids))


def test_a_session_has_one_score_that_of_its_last_trajectory(tmp_path):
    table = paths("a/0.0", "a/0.1", "a/1.0", "b/0")
    asked = rewards(
        tmp_path, lambda sample: score(sample.uid, None if sample.uid == "a/1.0" else 3.0, acc=0.5)
    )
    asked.submit(table)
    assert [sample.uid for batch in asked.scorer.batches for sample in batch] == ["a/0.1", "a/1.0", "b/0"]
    found = asked.collect(table, "step 1", None)
    assert found.scores.tolist() == [3, 3, 0, 3] and found.failed.tolist() == [False, False, True, False]
    assert found.sessions().table["uid"].to_pylist() == ["a/0.1", "a/1.0", "b/0"]
    assert found.metrics()["reward/failed"] == 1.0
    assert len((tmp_path / scoring.ERRORS_FILE).read_text().splitlines()) == 1


def test_each_player_of_a_session_has_a_score_that_of_its_last_trajectory(tmp_path):
    table = paths("a/0.0.b", "a/0.1.b", "a/0.2.w", "a/1.0.w")
    found_by = {"a/0.1.b": 3.0, "a/0.2.w": None, "a/1.0.w": 1.0}
    asked = rewards(tmp_path, lambda sample: score(sample.uid, found_by[sample.uid]))
    asked.submit(table)
    assert [sample.uid for batch in asked.scorer.batches for sample in batch] == [*found_by]
    found = asked.collect(table, "step 1", None)
    assert found.scores.tolist() == [3, 3, 0, 1] and found.failed.tolist() == [False, False, True, False]
    metrics = found.metrics()
    assert (metrics["reward/b/mean"], metrics["reward/w/mean"], metrics["reward/failed"]) == (3.0, 1.0, 1.0)
    assert len((tmp_path / scoring.ERRORS_FILE).read_text().splitlines()) == 1


def test_a_session_of_players_counts_once_with_their_mean():
    found = games("bw", "w", "-", scores=[-1.0, 1.0, 1.0, 0.5], moves=[2.0, 4.0, 5.0, np.nan])
    assert found.by_player().table.num_rows == 4
    one = found.sessions()
    assert one.table["uid"].to_pylist() == ["a/0.1.w", "a/1.0.w", "a/2.0"]
    assert one.scores.tolist() == [0.0, 1.0, 0.5] and one.numbers["moves"][:2].tolist() == [3.0, 5.0]
    assert found.metrics() == {
        "reward/failed": 0.0, "reward/moves": 4.0, "reward/b/mean": -1.0, "reward/w/mean": 1.0
    }  # fmt: skip


def test_samples_are_texts_of_the_trajectory(tmp_path):
    table = answer(expand_prompts(prompts("a"), 2))
    (first, second) = scoring.make_samples(table, FakeTokenizer())
    assert (first.uid, first.prompt, first.response) == ("a/0", "1", "0")
    assert (second.response, second.ground_truth, second.extra_info) == ("0 1", "truth of a", "{}")


def test_a_reward_that_fails_costs_its_sample_alone(tmp_path):
    table = answer(expand_prompts(prompts("a", "b"), 2))
    asked = rewards(tmp_path, lambda sample: score(sample.uid, None if sample.uid == "a/1" else 1.0, acc=0.5))
    asked.submit(table)
    found = asked.collect(table, "step 7", None)
    assert found.scores.tolist() == [1, 0, 1, 1] and found.failed.tolist() == [False, True, False, False]
    mask, offsets = ragged(found.table, "response_mask")
    alive = [bool(mask[start:end].all()) for start, end in itertools.pairwise(offsets)]
    assert alive == [True, False, True, True]
    assert not mask[offsets[1] : offsets[2]].any() and found.live.tolist() == [True, False, True, True]
    assert found.metrics()["reward/failed"] == 1.0
    validate_trajectories(found.table)
    (line,) = (tmp_path / "reward_errors.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "when": "step 7", "uid": "a/1", "data_source": "megarl/arithmetic", "error": "ValueError: of a/1"
    }  # fmt: skip
    (said,) = asked.run.said
    assert "a/1" in said and "megarl/arithmetic" in said and "ValueError: of a/1" in said


def test_an_error_with_half_of_a_surrogate_pair_costs_its_sample_alone(tmp_path):
    """As a reward or an environment raises it that reads JSON which the policy wrote."""
    table, half = answer(expand_prompts(prompts("a"), 3)), json.loads(r'"\ud83d"')
    at = table.column_names.index("environment_notes")
    notes = [{"error": half}, {}, {}]
    table = table.set_column(at, "environment_notes", pa.array([json.dumps(note) for note in notes]))
    failed = score("a/1", None)
    asked = rewards(
        tmp_path,
        lambda sample: (
            replace(failed, error=half)
            if sample.uid == "a/1"
            else replace(score(sample.uid, 1.0), notes={"pred": half})
        ),
    )
    asked.submit(table)
    found = asked.collect(table, "step 1", None)
    assert found.errors == [r"environment: \ud83d", r"\ud83d", None] and found.preds[2] == r"\ud83d"
    lines = (tmp_path / "reward_errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["error"] for line in lines] == found.errors[:2]
    assert "".join(asked.run.said).encode()


def test_many_failures_are_in_the_file_and_a_few_on_the_screen(tmp_path):
    table = answer(expand_prompts(prompts("a", "b"), 4))
    asked = rewards(tmp_path, lambda sample: score(sample.uid, None if sample.uid < "b/3" else 1.0))
    asked.submit(table)
    asked.collect(table, "step 1", None)
    assert len((tmp_path / "reward_errors.jsonl").read_text().splitlines()) == 7
    assert len(asked.run.said) == 4 and "7 rewards failed in all" in asked.run.said[-1]


def test_rewards_that_all_fail_end_the_run_with_the_first_error(tmp_path):
    table = answer(expand_prompts(prompts("a"), 2))
    asked = rewards(tmp_path, lambda sample: score(sample.uid, None))
    asked.submit(table)
    found = asked.collect(table, "step 2", None)
    with pytest.raises(RuntimeError, match=r"rewards of all 2 .*a/0.*ValueError: of a/0"):
        scoring.refuse_if_all_failed(found)
    assert len((tmp_path / "reward_errors.jsonl").read_text().splitlines()) == 2


def test_an_environments_score_is_not_asked_for_again(tmp_path):
    table = answer(expand_prompts(prompts("a"), 3))
    own = pa.array(np.array([np.nan, 0.25, np.nan], dtype=np.float32))
    if scoring.ENVIRONMENT_SCORE in table.column_names:
        table = table.drop_columns([scoring.ENVIRONMENT_SCORE])
    table = table.append_column(scoring.ENVIRONMENT_SCORE, own)
    asked = rewards(tmp_path, length_of)
    asked.submit(table)
    assert [sample.uid for batch in asked.scorer.batches for sample in batch] == ["a/0", "a/2"]
    assert asked.collect(table, "step 1", None).scores.tolist() == [1.0, 0.25, 3.0]


def test_what_failed_in_its_environment_needs_no_rule(tmp_path):
    """An agent may fail to start; its data source may have no rule, since agents score themselves."""
    table = answer(expand_prompts(prompts("a"), 3))
    notes = [{"error": "exit code 2"}, {"numbers": {"num_turns": 1}}, {"error": "exit code 2"}]
    at = table.column_names.index("environment_notes")
    table = table.set_column(at, "environment_notes", pa.array([json.dumps(note) for note in notes]))
    asked = rewards(tmp_path, length_of)
    asked.submit(table)
    assert [sample.uid for batch in asked.scorer.batches for sample in batch] == ["a/1"]
    found = asked.collect(table, "step 1", None)
    assert found.errors == ["environment: exit code 2", None, "environment: exit code 2"]
    failing = table.set_column(
        table.column_names.index("environment_notes"),
        "environment_notes",
        pa.array([json.dumps(notes[0])] * 3),
    )
    asked.submit(failing)
    with pytest.raises(RuntimeError, match=r"rewards of all 3 .*a/0.*environment: exit code 2"):
        scoring.refuse_if_all_failed(asked.collect(failing, "step 1", None))


def test_a_reward_models_scores_are_weighed_with_the_rules(tmp_path):
    table = answer(expand_prompts(prompts("a"), 2))
    by_model = ModelScores(np.array([10.0, 20.0], dtype=np.float32), np.array([False, True]))
    both = rewards(tmp_path, length_of, rule_weight=0.5, model_weight=2.0)
    both.submit(table)
    found = both.collect(table, "step 1", by_model)
    assert found.scores.tolist() == [0.5 * 1 + 2 * 10, 0.5 * 2 + 2 * 20]
    assert found.metrics()["reward/model"] == 15.0 and found.metrics()["reward/rule"] == 1.5
    alone = rewards(tmp_path, length_of, rule_weight=0.0, model_weight=1.0)
    alone.submit(table)
    assert not alone.scorer.batches
    assert alone.collect(table, "step 1", by_model).scores.tolist() == [10.0, 20.0]


def test_a_reward_model_whose_score_is_not_finite_leaves_no_open_samples(tmp_path, monkeypatch):
    """The samples of its own trajectories are given up, since the prompts may return in a later step; other samples stay open."""
    table, other = (answer(expand_prompts(prompts(name), 2)) for name in "ab")

    def fail(run, role, batch, inputs):
        raise NotFinite("a score is nan", batch)

    monkeypatch.setattr(scoring, "score_with_model", fail)
    with Scorer(RewardSpec(), num_workers=0, timeout=1.0) as scorer:
        asked = scoring.Rewards(FakeRun(tmp_path), scorer, FakeTokenizer(), model="facts")
        asked.submit(other)
        asked.submit(table)
        with pytest.raises(NotFinite, match="a score is nan"):
            asked.ask_model(SimpleNamespace(reward_model="ranks"), table, nullcontext)
        asked.submit(table)
        with pytest.raises(AssertionError, match="'b/0' was submitted twice"):
            asked.submit(other)


def test_overlong_penalty_is_the_papers():
    """DAPO's own setting (section 4.1): 16384 tokens and a soft punishment over the next 4096; the penalties are computed by hand."""
    lengths = np.array([0, 10, 16384, 16385, 18432, 20480])
    found = scoring.overlong_penalty(lengths, 20480, 4096, 1.0)
    assert found.tolist() == [0, 0, 0, -1 / 4096, -0.5, -1]
    assert scoring.overlong_penalty(np.array([20, 19]), 20, 2, 3.0).tolist() == [-3.0, -1.5]


def test_overlong_responses_are_punished_and_failed_ones_left_alone():
    batch = scored({"a": [1.0, 1.0, None, 0.5]}, lengths=[2, 7, 8, 8])
    found = scoring.punish_overlong(batch, OverlongBufferConfig(enable=True, len=4, penalty_factor=0.5), 8)
    assert found.scores.tolist() == [1.0, 1.0 - 0.5 * 3 / 4, 0.0, 0.0]
    assert found.table[scoring.OVERLONG_PENALTY].to_pylist() == [0.0, -0.375, 0.0, -0.5]


def test_the_greedy_answers_score_is_the_baseline_of_its_prompts_samples():
    asked = prompts("a", "b", "c")
    table = pa.concat_tables(
        [answer(expand_prompts(asked, 2)), answer(greedy_requests(asked))]
    ).combine_chunks()
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.5, None, -1.0]
    uids = table["uid"].to_pylist()
    assert uids[6:] == ["a/greedy", "b/greedy", "c/greedy"]
    batch = scoring.join_scores(
        table, {uid: score(uid, value) for uid, value in zip(uids, values, strict=True)}
    )
    greedy = np.array([uid.endswith("/greedy") for uid in uids])
    found = scoring.with_baselines(batch, greedy)
    assert found.table["uid"].to_pylist() == uids[:6]
    assert found.table[scoring.BASELINE_SCORE].to_pylist() == [0.5, 0.5, 0.0, 0.0, -1.0, -1.0]
    # A sample without a baseline has nothing to be compared with.
    assert found.live.tolist() == [True, True, False, False, True, True]
    assert found.metrics()["reward/failed"] == 2.0
    assert found.scores.tolist() == [1, 2, 3, 4, 5, 6]


def test_parts_with_other_numbers_are_put_together():
    one, other = scored({"a": [1.0, 0.0]}, acc=[1.0, 0.0]), scored({"b": [1.0, 1.0]}, steps=[3.0, 4.0])
    found = scoring.concat_scored([one, other])
    assert found.table["uid"].to_pylist() == ["a/0", "a/1", "b/0", "b/1"]
    np.testing.assert_array_equal(found.numbers["acc"], [1.0, 0.0, np.nan, np.nan])
    assert found.metrics() == {"reward/failed": 0.0, "reward/acc": 0.5, "reward/steps": 3.5}


def test_named_rewards_become_columns(tmp_path):
    """The score is one of the rewards; a missing reward is named in the error."""
    table = answer(expand_prompts(prompts("a", "b"), 2))
    asked = rewards(
        tmp_path, lambda sample: score(sample.uid, None if sample.uid == "a/1" else 3.0, words=2.0)
    )
    asked.submit(table)
    found = asked.collect(table, "step 1", None)
    parts = scoring.with_parts(found, {"words": 1.0, "score": 0.5}).table
    assert parts[f"{scoring.REWARD_PART}words"].to_pylist() == [2, 0, 2, 2]
    assert parts[f"{scoring.REWARD_PART}score"].to_pylist() == [3, 0, 3, 3]
    with pytest.raises(ValueError, match=r"algorithm\.reward_weights\.form: .* there are score, words"):
        scoring.with_parts(found, ["form"])


def test_a_group_whose_rewards_all_failed_lacks_no_named_reward():
    """Groups of a stream are scored a few at a time, and one whose rewards fail may be alone."""
    failed, other = scored({"a": [None, None]}), scored({"b": [1.0]}, words=[2.0])
    parts = scoring.concat_scored([scoring.with_parts(one, ["words"]) for one in (failed, other)])
    assert parts.table[f"{scoring.REWARD_PART}words"].to_pylist() == [0, 0, 2]
