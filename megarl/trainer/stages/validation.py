"""Answers to held-out prompts: sets with their own sampling, metrics of several answers to a prompt, and samples to read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megarl.cluster import WorkerGroup
from megarl.config import SamplingConfig
from megarl.data.sessions import players
from megarl.data.trajectories import expand_prompts, take
from megarl.trainer.run.run import Run
from megarl.trainer.stages.reward_model import ModelScores
from megarl.trainer.stages.rollouts import generate, sampling_params
from megarl.trainer.stages.scoring import Rewards, Scored, concat_scored, group_numbers, refuse_if_all_failed


def sample_rows(table: pa.Table, tokenizer: PreTrainedTokenizerBase, count: int) -> list[dict[str, Any]]:
    """`count` answers (or all), evenly spaced in the table: the same prompts in every validation.

    Args:
        table: scored trajectories.
    """
    rows = np.unique(np.linspace(0, table.num_rows - 1, min(count, table.num_rows)).astype(np.int64))
    return [
        {
            "prompt": tokenizer.decode(row["prompt_ids"]),
            "response": tokenizer.decode(row["response_ids"]),
            "ground_truth": row["ground_truth"],
            "score": row["score"],
        }
        for row in take(table, rows).to_pylist()
    ]


@dataclass(frozen=True)
class ValidationSet:
    """Held-out prompts and how they are answered. `name` is "" for the prompts of data.val_files."""

    name: str
    prompts: pa.Table
    sampling: SamplingConfig

    @property
    def prefix(self) -> str:
        """The beginning of its metrics' names."""
        return f"{self.name}/" if self.name else ""

    @property
    def file(self) -> str:
        """The beginning of the name of its trajectories' file."""
        return f"val-{self.name}" if self.name else "val"


def validate(
    run: Run,
    engines: WorkerGroup,
    sets: Sequence[ValidationSet],
    rewards: Rewards,
    max_response_length: int,
    seed: int,
    batch_size: int | None,
    when: str,
    generating: Callable[[], AbstractContextManager] = nullcontext,
    by_model: Callable[[pa.Table], ModelScores | None] = lambda table: None,
    keep: Callable[[str, pa.Table], None] = lambda file, answers: None,
) -> tuple[dict[str, pa.Table], dict[str, float]]:
    """Answer held-out prompts with the weights that the engines hold.

    Args:
        batch_size: prompts of a generation; None: all prompts of a set.
        when: such as "validation after step 3", for reports of failed rewards.
        generating: a context manager in which the engines can generate.
        by_model: a reward model's scores of trajectories.
        keep: called with the scored answers to each set, and its `ValidationSet.file`, before the next set is answered.

    Returns:
        The scored answers by `ValidationSet.file`, and metrics (see `session_metrics`), a set's under its prefix.
        `score/mean` is the mean of all sets' means.

    Raises:
        RuntimeError: every reward of a set failed.
    """
    answers, metrics = {}, {}
    for val_set in sets:
        size = batch_size or val_set.prompts.num_rows
        sampling = sampling_params(val_set.sampling, max_response_length, seed)
        parts = []
        for start in range(0, val_set.prompts.num_rows, size):
            requests = expand_prompts(val_set.prompts.slice(start, size), val_set.sampling.n)
            # Rewards are requested as responses finish, and waited for after generation.
            with generating():
                table = generate(run, engines, requests, sampling, rewards.submit)
            label = f"{when}{val_set.name and ', set '}{val_set.name}"
            parts.append(rewards.collect(table, label, by_model(table)))
        scored = concat_scored(parts)
        keep(val_set.file, scored.table)
        refuse_if_all_failed(scored)
        answers[val_set.file] = scored.table
        found = {**session_metrics(scored, val_set.sampling), **scored.metrics()}
        metrics |= {f"{val_set.prefix}{name}": value for name, value in found.items()}
    means = [metrics[f"{val_set.prefix}score/mean"] for val_set in sets]
    return answers, {**metrics, "score/mean": float(np.mean(means))}


def session_metrics(scored: Scored, sampling: SamplingConfig) -> dict[str, float]:
    """The metrics of sessions as answers (see `answer_metrics`), and under player/<name>/ those of each player's answers, where there are some.

    A session of several players counts with the mean of their scores, which is always the same in a game where one loses what another wins.
    """
    each = scored.by_player()
    names, metrics = players(each.table), answer_metrics(scored.sessions(), sampling)
    for name in np.unique(names[~each.failed]).tolist():
        if name:
            found = answer_metrics(each.take(np.flatnonzero(names == name)), sampling)
            metrics |= {f"player/{name}/{metric}": value for metric, value in found.items()}
    return metrics


def answer_metrics(scored: Scored, sampling: SamplingConfig) -> dict[str, float]:
    """Metrics of the answers whose reward did not fail.

    score/mean and score/<data source>: mean scores. With several answers to a prompt also the means over prompts of
    mean@n (the mean score of its n answers), best@n (the best one), pass@k for k = 1, 2, 4, ... n, and, where the reward
    gives its reading of the answer, maj@n (see `majority_score`); of several data sources also .../<data source>.
    """
    scored = scored.take(np.flatnonzero(~scored.failed))
    sources, groups = np.array(scored.table["data_source"].to_pylist()), group_numbers(scored.table)
    names = sorted(set(sources.tolist()))
    metrics = {"score/mean": float(scored.scores.mean())}
    metrics |= {f"score/{name}": float(scored.scores[sources == name].mean()) for name in names}
    if sampling.n == 1:
        return metrics
    metrics |= _of_groups(scored, groups, sampling)
    for name in names if len(names) > 1 else ():
        rows = np.flatnonzero(sources == name)
        found = _of_groups(scored.take(rows), groups[rows], sampling)
        metrics |= {f"{metric}/{name}": value for metric, value in found.items()}
    return metrics


def _of_groups(scored: Scored, groups: np.ndarray, sampling: SamplingConfig) -> dict[str, float]:
    rows = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    return group_metrics(
        [scored.scores[group] for group in rows],
        [[scored.preds[row] for row in group] for group in rows],
        sampling.n,
        sampling.pass_threshold,
    )


def group_metrics(
    scores: Sequence[np.ndarray], preds: Sequence[Sequence[str | None]], n: int, threshold: float
) -> dict[str, float]:
    """Means over prompts, each of which has an array of scores, and of answers as the reward read them.

    A prompt some of whose `n` rewards failed counts with the scores that it has, even if they are fewer than k.
    """
    metrics = {
        f"mean@{n}": float(np.mean([group.mean() for group in scores])),
        f"best@{n}": float(np.mean([group.max() for group in scores])),
    }
    passed = [(len(group), int((group >= threshold).sum())) for group in scores]
    for k in [2**power for power in range(n.bit_length()) if 2**power < n] + [n]:
        metrics[f"pass@{k}"] = float(
            np.mean([pass_at_k(size, passes, min(k, size)) for size, passes in passed])
        )
    votes = [majority_score(group, answers) for group, answers in zip(scores, preds, strict=True)]
    if any(vote is not None for vote in votes):
        metrics[f"maj@{n}"] = float(np.mean([vote or 0.0 for vote in votes]))
    return metrics


def pass_at_k(n: int, passes: int, k: int) -> float:
    """The unbiased estimate, from `n` answers of which `passes` pass, of the probability that one of `k` does.

    Chen et al., arXiv:2107.03374, equation 1: 1 - C(n - passes, k) / C(n, k).
    """
    assert 0 <= passes <= n and 1 <= k <= n, (n, passes, k)
    return 1.0 - comb(n - passes, k) / comb(n, k)


def majority_score(scores: np.ndarray, preds: Sequence[str | None]) -> float | None:
    """The mean score of the responses that give the most frequent answer, or the first of equally frequent ones.

    Responses without an answer (None) have no vote. None: no response has one.
    """
    votes = Counter(pred for pred in preds if pred is not None)
    if not votes:
        return None
    winner = votes.most_common(1)[0][0]
    return float(np.mean([score for score, pred in zip(scores, preds, strict=True) if pred == winner]))
