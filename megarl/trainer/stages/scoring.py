"""Scores of trajectories, requested while other trajectories are still generated, and further results of their rewards.

Guarantees
- Scores are joined by uid: in whatever order trajectories finish and rewards answer, each row gets its own.
- A reward that fails costs its sample: score 0, no token that is trained on, a line on the screen and one in
  `reward_errors.jsonl`. If all fail, the reward is broken, and the run ends with the first error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megarl.config import DataConfig, OverlongBufferConfig
from megarl.data.sessions import (
    first_rows,
    first_rows_of_players,
    last_rows,
    last_rows_of_players,
    players,
)
from megarl.data.tokenizer import decode_texts
from megarl.data.trajectories import (
    append_column,
    environment_notes,
    from_ragged,
    list_lengths,
    ragged,
    replace_column,
    take,
)
from megarl.rewards.processes.scorer import Scorer
from megarl.rewards.sample import Sample, Score
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.run import Run
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.stages.reward_model import ModelScores, RewardModelInputs, score_with_model
from megarl.trainer.stages.rollouts import GREEDY
from megarl.trainer.stages.step_scores import add_step_scores, step_sums, with_step_scores
from megarl.util.files import naming

ERRORS_FILE = "reward_errors.jsonl"
NUM_ERRORS_PRINTED = 3  # of a batch: the others are in the file
ENVIRONMENT_SCORE = "environment_score"
BASELINE_SCORE = "baseline_score"
OVERLONG_PENALTY = "overlong_penalty"
REWARD_PART = "reward_part/"


@dataclass(frozen=True)
class Scored:
    """Trajectories and the results of their rewards, row by row.

    Attributes:
        table: with the column `score`.
        numbers: by name, other numbers of the reward [rows]; NaN where it gave none.
        preds: the answer that the reward read from the response, for majority votes; None where it gave none.
        errors: why a row's reward failed; None: it did not.
    """

    table: pa.Table
    numbers: dict[str, np.ndarray]
    preds: list[str | None]
    errors: list[str | None]

    @property
    def scores(self) -> np.ndarray:
        """[rows]"""
        return self.table["score"].to_numpy()

    @property
    def failed(self) -> np.ndarray:
        """Rows whose reward failed [rows]."""
        return np.array([error is not None for error in self.errors], dtype=np.bool_)

    @property
    def live(self) -> np.ndarray:
        """Rows with a token that is trained on [rows]."""
        return live_rows(self.table)

    def number(self, name: str) -> np.ndarray:
        """A number of the reward [rows]; NaN where it gave none, as for rows that all failed."""
        return self.numbers.get(name, np.full(self.table.num_rows, np.nan))

    def take(self, rows: np.ndarray) -> Scored:
        """Some rows, in the order of their numbers."""
        return Scored(
            take(self.table, rows),
            {name: values[rows] for name, values in self.numbers.items()},
            [self.preds[row] for row in rows],
            [self.errors[row] for row in rows],
        )

    def by_player(self) -> Scored:
        """The last row of each player of each session, for comparisons. Sessions without players have one row."""
        last = last_rows_of_players(self.table)
        return self if len(last) == self.table.num_rows else self.take(last)

    def sessions(self) -> Scored:
        """The last row of each session, for counts. With several players it has the means of their scores and numbers, and the first error."""
        each = self.by_player()
        first, last = first_rows(each.table), last_rows(each.table)
        if len(last) == each.table.num_rows:
            return each
        one = each.take(last)
        means = _means_between(each.scores, first).astype(np.float32)
        bounds = list(zip(first.tolist(), (last + 1).tolist(), strict=True))
        return replace(
            one,
            table=replace_column(one.table, "score", pa.array(means)),
            numbers={name: _means_between(values, first) for name, values in each.numbers.items()},
            errors=[next(filter(None, each.errors[start:end]), None) for start, end in bounds],
        )

    def metrics(self) -> dict[str, float]:
        """The means of the reward's numbers, how many rewards failed, and each player's mean score."""
        one = self.sessions()
        there = {name: values[~np.isnan(values)] for name, values in one.numbers.items()}
        means = {f"reward/{name}": float(values.mean()) for name, values in there.items() if len(values)}
        return {"reward/failed": float(one.failed.sum()), **means, **self._of_players()}

    def _of_players(self) -> dict[str, float]:
        each = self.by_player()
        names = players(each.table)
        of_name = {str(name): (names == name) & ~each.failed for name in np.unique(names) if name}
        return {
            f"reward/{name}/mean": float(each.scores[rows].mean())
            for name, rows in of_name.items()
            if rows.any()
        }


@dataclass(frozen=True)
class Rewards:
    """Requests scores as trajectories finish, and joins them to the table of all trajectories.

    Attributes:
        rule_weight, model_weight: score = rule_weight * the scorer's + model_weight * the reward model's; with a
            rule_weight of 0 the scorer is not asked.
        model: facts of the reward model; None: there is none.
    """

    run: Run
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    rule_weight: float = 1.0
    model_weight: float = 0.0
    model: RewardModelInputs | None = None

    def submit(self, table: pa.Table) -> None:
        """Request the scores of finished trajectories; returns at once.

        Trajectories that their environment has scored, or that failed in it, are left out. Of a session, and of each of its players, the
        last trajectory is scored.
        """
        if self.rule_weight:
            ends = last_rows_of_players(table)
            last = take(table, ends)
            ended = np.array([note.error is None for note in environment_notes(last)], dtype=np.bool_)
            rows = ends[ended & np.isnan(environment_scores(last))]
            if len(rows):
                self.scorer.submit(make_samples(take(table, rows), self.tokenizer))

    def ask_model(
        self, roles: Roles, table: pa.Table, phase: Callable[[str], AbstractContextManager]
    ) -> ModelScores | None:
        """The reward model's scores of trajectories, for `collect`; None: there is no reward model.

        Args:
            phase: `DeviceMemory.phase`, or `held` where the time belongs to no phase of the step.

        Raises:
            NotFinite: a score is not finite; what `submit` requested for the trajectories is given up.
        """
        if roles.reward_model is None:
            return None
        assert self.model is not None, "read with the run's inputs"
        try:
            with phase("score_model"):
                return score_with_model(self.run, roles.reward_model, table, self.model)
        except NotFinite:  # the run may go on, and the prompts may come again under the same uids
            self.scorer.give_up(table["uid"].to_pylist())
            raise

    def awaits(self, table: pa.Table, seconds: float) -> bool:
        """Whether `collect` would wait for scores, also after so many seconds, which this waits for them."""
        return bool(self.rule_weight) and self.scorer.awaits(table["uid"].to_pylist(), seconds)

    def collect(self, table: pa.Table, when: str, by_model: ModelScores | None = None) -> Scored:
        """Append `score` to trajectories that were submitted, in any order; waits for scores that are open.

        Args:
            when: such as "step 3", for reports of failed rewards.
            by_model: the reward model's scores; they and the scorer's are also added to the reward's numbers.
        """
        scores = {}
        if self.rule_weight:  # the death of a process ends the wait
            scores = self.scorer.collect(lambda: self.run.wait([]), table["uid"].to_pylist())
        weight = 1.0 if by_model is None else self.rule_weight
        table = with_step_scores(table, scores, self.tokenizer, weight)
        scored = join_scores(table, of_sessions(table, scores))
        if by_model is not None:
            scored = mix_scores(scored, by_model, self.rule_weight, self.model_weight)
        self._report(scored.sessions(), when)
        return scored

    def _report(self, scored: Scored, when: str) -> None:
        columns = (scored.table["uid"].to_pylist(), scored.table["data_source"].to_pylist(), scored.errors)
        failures = [
            {"when": when, "uid": uid, "data_source": source, "error": error}
            for uid, source, error in zip(*columns, strict=True)
            if error is not None
        ]
        if not failures:
            return
        path = self.run.folder / ERRORS_FILE
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(failure, ensure_ascii=False) + "\n" for failure in failures)
        for failure in failures[:NUM_ERRORS_PRINTED]:
            self.run.say(
                f"{when}: the reward of {failure['uid']} (data_source {failure['data_source']}) failed and costs "
                f"this sample: {failure['error']}"
            )
        if len(failures) > NUM_ERRORS_PRINTED:
            self.run.say(f"{when}: {len(failures)} rewards failed in all, see {path}")


def check_prompts(scorer: Scorer, prompts: pa.Table) -> None:
    """ValueError: the scorer has no rule for a prompt, or the prompt lacks the ground truth of its rule."""
    columns = [prompts[name].to_pylist() for name in ("uid", "data_source", "ground_truth")]
    scorer.check(zip(*columns, strict=True))


def make_samples(table: pa.Table, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Trajectories as text, without special tokens."""
    texts = {name: decode_texts(tokenizer, table[f"{name}_ids"]) for name in ("prompt", "response")}
    columns = [table[name].to_pylist() for name in ("uid", "data_source", "ground_truth", "extra_info")]
    return [
        Sample(uid, source, prompt, response, truth, extra)
        for uid, source, truth, extra, prompt, response in zip(
            *columns, texts["prompt"], texts["response"], strict=True
        )
    ]


def mix_scores(scored: Scored, by_model: ModelScores, rule_weight: float, model_weight: float) -> Scored:
    """score = rule_weight * the scorer's + model_weight * the reward model's; 0 where the scorer failed.

    Where the model scores steps, the steps' rewards take the place of its score: they are added to STEP_SCORES.
    """
    rules, of_model = scored.scores, by_model.scores if by_model.steps is None else 0.0
    mixed = np.where(scored.failed, 0.0, rule_weight * rules + model_weight * of_model)
    numbers = {"model": by_model.scores, "model_text_cut": by_model.truncated.astype(np.float32)}
    numbers |= by_model.numbers
    if rule_weight:
        numbers["rule"] = np.where(scored.failed, np.nan, rules)
    table = replace_column(scored.table, "score", pa.array(mixed.astype(np.float32)))
    if by_model.steps is not None:
        table = add_step_scores(table, by_model.steps, model_weight, scored.failed)
    return replace(scored, table=table, numbers={**scored.numbers, **numbers})


def environment_scores(table: pa.Table) -> np.ndarray:
    """The scores of the environments of multi-turn trajectories [rows]; NaN: none."""
    if ENVIRONMENT_SCORE not in table.column_names:
        return np.full(table.num_rows, np.nan)
    return table[ENVIRONMENT_SCORE].to_numpy()


def join_scores(table: pa.Table, scores: dict[str, Score]) -> Scored:
    """Append `score` (0 where there is none); rows whose reward failed lose all tokens of their `response_mask`.

    An environment's score is preferred to the one in `scores`; rows with neither are scored by the reward model alone. An environment
    that failed costs its trajectory as a reward does; its numbers are added to the reward's.
    """
    found = [scores.get(uid) for uid in table["uid"].to_pylist()]
    own = environment_scores(table)
    told = environment_notes(table)
    errors = [None if score is None or score.score is not None else str(score.error) for score in found]
    errors = [
        error if note.error is None else f"environment: {note.error}"
        for note, error in zip(told, errors, strict=True)
    ]
    given = [0.0 if score is None or score.score is None else score.score for score in found]
    values = np.where(np.isnan(own), given, own).astype(np.float32)
    each = [
        {**note.numbers, **({} if score is None else {**score.numbers, **_of_steps(score)})}
        for note, score in zip(told, found, strict=True)
    ]
    names = sorted({name for row in each for name in row})
    numbers = {name: np.array([row.get(name, np.nan) for row in each]) for name in names}
    preds = [None if score is None else score.notes.get("pred") for score in found]
    failed = np.array([error is not None for error in errors], dtype=np.bool_)
    table = append_column(without_tokens(table, failed), "score", values)
    return Scored(table, numbers, [*map(_unicode, preds)], [*map(_unicode, errors)])


def _unicode(text: str | None) -> str | None:
    """A text for files and tables. Half of a surrogate pair, whose escape the policy may have written, becomes that escape again."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def of_sessions(table: pa.Table, scores: Mapping[str, Score]) -> dict[str, Score]:
    """By uid, the score of each row's session, or of its player there, which is the last row's score."""
    uids, first, last = table["uid"].to_pylist(), first_rows_of_players(table), last_rows_of_players(table)
    return {
        uids[row]: scores[uids[end]]
        for start, end in zip(first.tolist(), last.tolist(), strict=True)
        if uids[end] in scores
        for row in range(start, end + 1)
    }


def _of_steps(score: Score) -> dict[str, float]:
    """The number of steps, and their mean score; {}: there are none."""
    given = [value for _, value in score.steps]
    return {"num_steps": float(len(given)), "step_score": float(np.mean(given))} if given else {}


def refuse_if_all_failed(scored: Scored) -> None:
    """RuntimeError, with the first error, if no reward succeeded: the reward is broken, not the samples."""
    if scored.failed.all():
        first = {name: scored.table[name][0].as_py() for name in ("uid", "data_source")}
        raise RuntimeError(
            f"the rewards of all {scored.table.num_rows} trajectories failed; the first, of {first['uid']} (data_source "
            f"{first['data_source']}): {scored.errors[0]}"
        )


def without_tokens(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Take some rows (true in `rows` [rows]) out of training: all of their `response_mask` becomes false."""
    if not rows.any():
        return table
    mask, offsets = ragged(table, "response_mask")
    dead = np.repeat(rows, np.diff(offsets))
    return replace_column(table, "response_mask", from_ragged(mask & ~dead, offsets))


def live_rows(table: pa.Table) -> np.ndarray:
    """Rows with a token that is trained on [rows]."""
    mask, offsets = ragged(table, "response_mask")
    return np.diff(np.concatenate([[0], np.cumsum(mask)])[offsets]) > 0


def _means_between(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The mean of the values from each of `first` to the next one, in float64 [first]; NaN is left out, and is the mean of no values."""
    there = ~np.isnan(values)
    count = np.add.reduceat(there.astype(np.float64), first)
    total = np.add.reduceat(np.where(there, values, 0.0).astype(np.float64), first)
    return np.divide(total, count, out=np.full(len(first), np.nan), where=count > 0)


def group_numbers(table: pa.Table) -> np.ndarray:
    """The number of each row's prompt [rows]: prompts are counted from 0 as they come."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(uid, len(numbers)) for uid in table["prompt_uid"].to_pylist()])


def training_scores(
    scored: Scored,
    overlong: OverlongBufferConfig,
    data: DataConfig,
    parts: Collection[str] = (),
    may_all_fail: bool = False,
) -> Scored:
    """Scores for training: penalties for long responses are added, and greedy answers become ReMax's baseline.

    Args:
        parts: names of rewards (`algorithm.reward_weights`), appended as columns whose names begin with REWARD_PART.
        may_all_fail: whether the rows are so few that all of their rewards may fail although rewards work.

    Raises:
        RuntimeError: every reward failed.
    """
    if not may_all_fail:
        refuse_if_all_failed(scored)
    if overlong.enable:
        scored = punish_overlong(scored, overlong, data.max_response_length)
    if parts:
        scored = with_parts(scored, parts)
    greedy = np.array([uid.endswith(GREEDY) for uid in scored.table["uid"].to_pylist()], dtype=np.bool_)
    return with_baselines(scored, greedy) if greedy.any() else scored


def with_parts(scored: Scored, names: Collection[str]) -> Scored:
    """Append named numbers of the reward as columns whose names begin with REWARD_PART; "score" is the score for training.

    Raises:
        ValueError: the reward does not give one of them to every trajectory that it scored.
    """
    table = scored.table
    for name in names:
        values = scored.scores if name == "score" else scored.number(name)
        if np.isnan(values[~scored.failed]).any():
            known = ", ".join(["score", *scored.numbers])
            raise ValueError(
                f"algorithm.reward_weights.{name}: the reward does not give this number to every trajectory; there are {known}"
            )
        table = append_column(table, f"{REWARD_PART}{name}", np.where(scored.failed, 0.0, values))
    return replace(scored, table=table)


def overlong_penalty(
    lengths: np.ndarray, max_response_length: int, buffer: int, penalty_factor: float
) -> np.ndarray:
    """Soft overlong punishment, DAPO (arXiv:2503.14476), equation 13: 0 up to `max_response_length - buffer`
    tokens, from there linearly down to -`penalty_factor` at `max_response_length` (in the paper 1).

    Args:
        lengths: tokens of the responses [rows], at most `max_response_length`.
        buffer: the paper's L_cache.
    """
    over = lengths - (max_response_length - buffer)
    return -penalty_factor * np.clip(over / buffer, 0.0, 1.0)


def punish_overlong(scored: Scored, overlong: OverlongBufferConfig, max_response_length: int) -> Scored:
    """Add the penalty to `score`, and append it as `overlong_penalty` (<= 0)."""
    lengths = list_lengths(scored.table, "response_ids")
    penalty = overlong_penalty(lengths, max_response_length, overlong.len, overlong.penalty_factor)
    penalty = np.where(scored.failed, 0.0, penalty)
    punished = pa.array((scored.scores + penalty).astype(np.float32))
    table = append_column(replace_column(scored.table, "score", punished), OVERLONG_PENALTY, penalty)
    return replace(scored, table=table)


def with_baselines(scored: Scored, greedy: np.ndarray) -> Scored:
    """Rows other than the greedy ones, with their prompt's greedy score as `baseline_score`.

    Samples whose baseline failed cannot be compared: they fail, too.

    Args:
        greedy: rows of greedy answers [rows], one of each prompt.
    """
    answers, baselines = scored.take(np.flatnonzero(~greedy)), scored.take(np.flatnonzero(greedy))
    values = np.where(baselines.failed, np.nan, baselines.scores + step_sums(baselines.table))
    by_prompt = dict(zip(baselines.table["prompt_uid"].to_pylist(), values, strict=True))
    baseline = np.array([by_prompt[uid] for uid in answers.table["prompt_uid"].to_pylist()])
    lost = np.isnan(baseline)
    table = append_column(without_tokens(answers.table, lost), BASELINE_SCORE, np.where(lost, 0.0, baseline))
    errors = [
        error or ("the reward of the greedy answer failed" if without else None)
        for error, without in zip(answers.errors, lost, strict=True)
    ]
    return replace(answers, table=table, errors=errors)


def concat_scored(parts: list[Scored]) -> Scored:
    """All rows of several parts, one after the other."""
    names = sorted({name for part in parts for name in part.numbers})
    return Scored(
        pa.concat_tables([part.table for part in parts]).combine_chunks(),
        {name: np.concatenate([part.number(name) for part in parts]) for name in names},
        [pred for part in parts for pred in part.preds],
        [error for part in parts for error in part.errors],
    )
