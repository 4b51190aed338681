"""Trajectory tables for tests that start no processes, and stand-ins for runs, scorers and tokenizers."""

import numpy as np
import pyarrow as pa

from megarl.data.sessions import requested, trajectory_uid
from megarl.data.trajectories import PROMPT_SCHEMA, Generation, build_trajectories, expand_prompts
from megarl.rewards.sample import Score
from megarl.trainer.stages.scoring import Scored, join_scores


def prompts(*uids, source="megarl/arithmetic"):
    sources = [source] * len(uids) if isinstance(source, str) else source
    columns = {
        "uid": list(uids),
        "data_source": sources,
        "ground_truth": [f"truth of {uid}" for uid in uids],
        "extra_info": ["{}"] * len(uids),
        "prompt_ids": [[number + 1] for number in range(len(uids))],
    }
    return pa.table(columns, schema=PROMPT_SCHEMA)


def answer(requests, lengths=None):
    """Trajectories of `requests` whose responses have these lengths (1, 2, 3, ... if None)."""
    lengths = range(1, requests.num_rows + 1) if lengths is None else lengths
    generations = [
        Generation(uid, np.arange(length), np.full(length, -1.0), "stop", 1)
        for uid, length in zip(requests["uid"].to_pylist(), lengths, strict=True)
    ]
    return build_trajectories(requests, generations)


def score(uid, value, pred=None, **numbers):
    """A Score; a value of None means that the reward failed."""
    notes = {} if pred is None else {"pred": pred}
    return Score(uid, value, numbers, notes, None if value is not None else f"ValueError: of {uid}", 0.1)


def scored(groups, source="megarl/arithmetic", preds=None, lengths=None, **numbers) -> Scored:
    """`groups`: by prompt uid, the scores of its responses, equally many for each. `preds` and each of `numbers`: one value a response."""
    n = len(next(iter(groups.values())))
    requests = expand_prompts(prompts(*groups, source=source), n)
    values = [value for group in groups.values() for value in group]
    found = {}
    for row, uid in enumerate(requests["uid"].to_pylist()):
        own = {name: column[row] for name, column in numbers.items()}
        found[uid] = score(uid, values[row], None if preds is None else preds[row], **own)
    return join_scores(answer(requests, lengths), found)


class FakeRun:
    """A run that keeps its messages, with a folder for reports of failures."""

    def __init__(self, folder):
        self.folder, self.said = folder, []

    def say(self, text):
        self.said.append(text)


class FakeScorer:
    """A scorer that calls a function on each sample, and answers in the reverse order of submission."""

    def __init__(self, function):
        self.function, self.batches = function, []

    def submit(self, samples):
        self.batches.append(list(samples))

    def collect(self, meanwhile=None, uids=None):
        samples = [sample for batch in self.batches for sample in batch]
        wanted = [sample for sample in samples if uids is None or sample.uid in uids]
        self.batches = [[sample for sample in samples if sample not in wanted]]
        return {sample.uid: self.function(sample) for sample in reversed(wanted)}


class FakeTokenizer:
    """A tokenizer in which each token is a word: its number."""

    def batch_decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(map(str, row)) for row in ids]


def games(*sessions, prompt="a", scores=None, **numbers) -> Scored:
    """Sessions of one prompt, each given as its players' letters, such as "bw": one trajectory a letter. Responses have 1, 2, 3, ... tokens.

    Args:
        scores: the score of each trajectory; None: the reward failed. numbers: further numbers of each trajectory.
    """
    uids = [
        trajectory_uid(f"{prompt}/{session}", number, None if letter == "-" else letter)
        for session, letters in enumerate(sessions)
        for number, letter in enumerate(letters)
    ]
    requests = expand_prompts(prompts(prompt), len(sessions))
    rows = [session for session, letters in enumerate(sessions) for _ in letters]
    table = answer(requested(requests, rows, uids))
    values = [1.0] * len(uids) if scores is None else scores
    found = {
        uid: score(uid, values[row], **{name: column[row] for name, column in numbers.items()})
        for row, uid in enumerate(uids)
    }
    return join_scores(table, found)
