"""The groups of a step, a group being all responses to one prompt; dynamic sampling.

Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): where all responses to a prompt score the same, advantages that
compare them are 0 and the prompt teaches nothing. Such groups are dropped, and others generated in their place, so that
a step always trains on `data.train_batch_size` prompts. Where sessions have players, a prompt teaches something if one of the players
has different scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from megarl.config import FilterGroupsConfig
from megarl.data.sessions import players
from megarl.data.trajectories import list_lengths, replace_column
from megarl.trainer.stages.given_responses import join_given
from megarl.trainer.stages.scoring import OVERLONG_PENALTY, Scored, concat_scored, group_numbers

_ROUNDING = 1e-6  # of values up to 1; of larger ones, relative to them
_FOR_METRICS = ("uid", "prompt_uid", "score", "response_mask", OVERLONG_PENALTY)


@dataclass
class Groups:
    """Collects a step's groups, generation by generation, until `complete`.

    Without dynamic sampling the first generation is the step's batch.
    """

    options: FilterGroupsConfig
    num_prompts: int  # of the step
    parts: list[Scored] = field(default_factory=list)  # all generations, without token ids
    kept: list[Scored] = field(default_factory=list)  # the kept groups of each generation
    num_kept: int = 0
    num_dropped: int = 0
    num_surplus: int = 0
    names: dict[str, str] = field(default_factory=dict)  # uid within the step -> the data's
    given: pa.Table | None = None  # trajectories of given responses; the engines do not answer their prompts

    @property
    def complete(self) -> bool:
        return self.num_kept + self.num_given == self.num_prompts

    @property
    def num_given(self) -> int:
        """Prompts whose responses are given."""
        return 0 if self.given is None else len(np.unique(group_numbers(self.given)))

    @property
    def generated_tokens(self) -> int:
        """Response tokens of all generations, including dropped groups."""
        return sum(int(list_lengths(part.table, "response_mask").sum()) for part in self.parts)

    def distinct(self, prompts: pa.Table) -> pa.Table:
        """The prompts under uids that the step has not used: one that comes again gets "~2", "~3", ... after its own.

        Rows of a step's batch are told apart by their uids, and the sampling's noise depends on them.
        """
        uids = []
        for uid in prompts["uid"].to_pylist():
            name, number = uid, 1
            while name in self.names:
                number += 1
                name = f"{uid}~{number}"
            self.names[name] = uid
            uids.append(name)
        return replace_column(prompts, "uid", pa.array(uids, pa.string()))

    def add(self, scored: Scored) -> None:
        """Take the trajectories of one generation.

        Raises:
            ValueError: too few groups after the last generation that is allowed, or the reward does not give the
                metric.
        """
        columns = [name for name in _FOR_METRICS if name in scored.table.column_names]
        self.parts.append(replace(scored, table=scored.table.select(columns)))
        groups = group_numbers(scored.table)
        chosen = np.unique(groups)  # in the prompts' order
        if self.options.enable:
            values, live = metric_values(scored, self.options.metric), scored.live
            names = players(scored.table)
            differing = np.array(
                [
                    group
                    for group in chosen
                    if teaches(values[(groups == group) & live], names[(groups == group) & live])
                ],
                int,
            )
            room = self.num_prompts - self.num_kept
            self.num_dropped += len(chosen) - len(differing)
            self.num_surplus += max(0, len(differing) - room)
            chosen = differing[:room]
        self.num_kept += len(chosen)
        if len(chosen):
            self.kept.append(scored.take(np.flatnonzero(np.isin(groups, chosen))))
        limit = self.options.max_num_gen_batches
        if not self.complete and limit and len(self.parts) >= limit:
            mean = concat_scored(self.parts).scores.mean()
            raise too_few_teach(self.options, self.num_kept, self.num_prompts, mean)

    def batch(self) -> pa.Table:
        """The step's trajectories: the samples of a prompt are neighbours, prompts are in the order in which they were drawn."""
        assert self.complete, f"{self.num_kept} of {self.num_prompts} prompts"
        if self.given is None:
            return concat_scored(self.kept).table
        own = concat_scored(self.kept).table if self.kept else self.given.slice(0, 0)
        place = {name: number for number, name in enumerate(self.names)}
        uids = [*own["prompt_uid"].to_pylist(), *self.given["prompt_uid"].to_pylist()]
        order = np.argsort([place[uid] for uid in uids], kind="stable")
        return join_given(own, self.given, order >= own.num_rows)

    def prompt_scores(self) -> tuple[list[str], np.ndarray]:
        """The prompt's uid in the data and the score of every session that was generated and scored, or of each of its players [sessions]."""
        if not self.parts:
            return [], np.empty(0)
        every = concat_scored(self.parts)
        every = every.take(np.flatnonzero(every.live)).by_player()
        return [self.names[uid] for uid in every.table["prompt_uid"].to_pylist()], every.scores

    def metrics(self) -> dict[str, float]:
        """The rewards' metrics of all generated trajectories, and the counts of dropped groups."""
        if not self.parts:
            return {}
        every = concat_scored(self.parts).by_player()
        metrics = every.metrics()
        if OVERLONG_PENALTY in every.table.column_names:
            penalties = every.table[OVERLONG_PENALTY].to_numpy()
            metrics["reward/overlong_penalty"] = float(penalties.mean())
            metrics["reward/overlong"] = float((penalties < 0).mean())
        if self.options.enable:
            metrics |= {
                "filter_groups/generations": float(len(self.parts)),
                "filter_groups/dropped": float(self.num_dropped),
                "filter_groups/surplus": float(self.num_surplus),
                "filter_groups/score_before": float(every.scores[every.live].mean()),
            }
        return metrics


def too_few_teach(
    options: FilterGroupsConfig, num_kept: int, num_prompts: int, mean_score: float
) -> ValueError:
    """The error of a step for which the generations that are allowed gave `num_kept` groups in place of `num_prompts`."""
    return ValueError(
        f"algorithm.filter_groups: {options.max_num_gen_batches} generations (max_num_gen_batches) gave {num_kept} of the "
        f"{num_prompts} prompts whose responses differ in {options.metric!r}; the mean score was {mean_score:.3g}. Give data that "
        "is neither too easy nor too hard, or raise data.gen_batch_size, actor_rollout_ref.rollout.n or max_num_gen_batches (0: no "
        "limit)"
    )


def metric_values(scored: Scored, metric: str) -> np.ndarray:
    """The metric that groups are compared by [rows]; "score" is the reward's score, "seq_reward" the score for training.

    Raises:
        ValueError: the reward does not give the metric to every trajectory that it scored.
    """
    if metric == "seq_reward":
        return scored.scores
    penalty = (
        scored.table[OVERLONG_PENALTY].to_numpy() if OVERLONG_PENALTY in scored.table.column_names else 0.0
    )
    score = scored.scores - penalty
    if metric == "score" or (metric == "acc" and "acc" not in scored.numbers):
        return score
    values = scored.number(metric)
    if np.isnan(values[scored.live]).any():
        known = ", ".join(["score", "seq_reward", *scored.numbers])
        raise ValueError(
            f"algorithm.filter_groups.metric={metric!r}: the reward does not give this number to every trajectory; "
            f"there are {known}"
        )
    return values


def teaches(values: np.ndarray, names: np.ndarray) -> bool:
    """Whether the values [trajectories] of a player differ in a group; `names`: the player of each."""
    return any(differ(values[names == name]) for name in np.unique(names))


def differ(values: np.ndarray) -> bool:
    """Whether a group's values [trajectories] differ by more than rounding, so that advantages that compare them teach something.

    Scores are float32, and a score less its overlong penalty is rounded.
    """
    return len(values) > 1 and float(np.ptp(values)) > _ROUNDING * max(1.0, float(np.abs(values).max()))
