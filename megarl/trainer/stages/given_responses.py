"""Trajectories of responses that are given in the data, learnt from in place of the policy's own (GKD, arXiv:2306.13649).

The objective is lambda E[D(x, y), y by the policy] + (1 - lambda) E[D(x, y), y given], D the divergence from the reference at each token.
TRL's GKDTrainer 1.16.0 draws one of the two for each batch; here it is drawn for each prompt: the expectation is the same, and most steps have
some of both.

Guarantees, each asserted by a test:
- Which prompts are drawn depends on the data's seed and the step alone, so that a resumed run draws the same.
- A given response has no part in a reward, an advantage, the policy loss, an entropy bonus, or a metric of rollouts; its tokens count in the
  losses' denominators, since a step's loss is a mean over all of them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from megarl.config import DataConfig, TrainConfig
from megarl.config.checks.given_responses import loss_problems
from megarl.data.trajectories import (
    GIVEN,
    GIVEN_RESPONSES,
    SCORED_MASK,
    Generation,
    append_column,
    build_trajectories,
    expand_prompts,
    list_lengths,
    ragged,
    take,
)
from megarl.trainer.stages.step_scores import STEP_SCORES

_DRAWS = 0x6B1D  # sets these draws apart from others of the same seed


def draw_given(prompts: pa.Table, data: DataConfig, step: int, n: int) -> tuple[pa.Table, pa.Table | None]:
    """The prompts that the policy answers in a step, and n trajectories of given responses to each of the others (None: there are none).

    Args:
        n: responses to a prompt; if fewer are given, they are repeated.

    Raises:
        ValueError: the prompts have no given responses.
    """
    if data.given_response_key is None:
        return prompts, None
    if GIVEN_RESPONSES not in prompts.column_names:
        raise ValueError(
            f"data.given_response_key={data.given_response_key}: the prompts have no column {GIVEN_RESPONSES!r}; give rows with their "
            "responses, or leave it out"
        )
    draws = np.random.default_rng([data.seed, step, _DRAWS]).random(prompts.num_rows)
    given = draws >= data.on_policy_share
    own = prompts.take(np.flatnonzero(~given)).drop_columns([GIVEN_RESPONSES])
    chosen = prompts.take(np.flatnonzero(given))
    return own, given_trajectories(chosen, data.max_response_length, n, step) if chosen.num_rows else None


def given_trajectories(prompts: pa.Table, max_response_length: int, n: int, step: int) -> pa.Table:
    """n trajectories of the given responses to each of some prompts, with a `score` of 0."""
    requests = expand_prompts(prompts, n)
    responses = prompts[GIVEN_RESPONSES].to_pylist()
    generations = []
    for row, uid in enumerate(requests["uid"].to_pylist()):
        texts = responses[row // n]
        ids = texts[row % n % len(texts)]
        reason = "length" if len(ids) == max_response_length else "stop"
        generations.append(Generation(uid, ids, np.zeros(len(ids), np.float32), reason, step))
    return append_column(build_trajectories(requests, generations), "score", np.zeros(requests.num_rows))


def check_given(table: pa.Table, config: TrainConfig) -> None:
    """ValueError: the trajectories, of another run for example, have given responses, and the actor's loss cannot learn from these."""
    if GIVEN not in table.column_names:
        return
    problems = list(loss_problems(config, "trajectories with given responses"))
    if problems:
        raise ValueError("\n".join(problems))


def own_rows(table: pa.Table) -> pa.Table:
    """The trajectories whose responses are the policy's, without the column GIVEN."""
    return table if GIVEN not in table.column_names else split_given(table)[0]


def split_given(table: pa.Table) -> tuple[pa.Table, pa.Table, np.ndarray]:
    """Trajectories of the policy's responses and of given ones, both without the column GIVEN, and which rows are given [rows]."""
    given = table[GIVEN].to_numpy()
    plain = table.drop_columns([GIVEN])
    return take(plain, np.flatnonzero(~given)), take(plain, np.flatnonzero(given)), given


def join_given(own: pa.Table, given: pa.Table, is_given: np.ndarray) -> pa.Table:
    """The inverse of `split_given`; columns that the policy's trajectories have gained since are filled with neutral values."""
    if not own.num_rows:
        return given.append_column(GIVEN, pa.array(is_given))
    filled = with_columns_of(given, own.schema)
    order = np.argsort(np.concatenate([np.flatnonzero(~is_given), np.flatnonzero(is_given)]))
    joined = take(pa.concat_tables([own, filled]), order)
    return joined.append_column(GIVEN, pa.array(is_given))


def with_columns_of(given: pa.Table, schema: pa.Schema) -> pa.Table:
    """Trajectories of given responses with the columns of scored ones, in their order, filled with 0, no scored steps, all tokens live."""
    columns = []
    for field in schema:
        if field.name in given.column_names:
            columns.append(given[field.name])
        elif field.name == STEP_SCORES:
            columns.append(pa.array(["[]"] * given.num_rows, field.type))
        elif pa.types.is_list(field.type):
            mask, offsets = ragged(given, "response_mask")
            values = mask if field.name == SCORED_MASK else np.zeros(len(mask))
            flat = pa.array(values.astype(field.type.value_type.to_pandas_dtype()))
            columns.append(
                pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), flat).cast(field.type)
            )
        else:
            assert pa.types.is_floating(field.type), f"{field.name} has type {field.type}"
            columns.append(pa.array(np.zeros(given.num_rows), field.type))
    return pa.table(columns, schema=schema)


def given_metrics(table: pa.Table) -> dict[str, float]:
    """The share of a step's trajectories whose responses are given, and these responses' mean length; {}: there are none."""
    if GIVEN not in table.column_names:
        return {}
    _, given, is_given = split_given(table)
    return {
        "given/share": float(is_given.mean()),
        "given/response_length/mean": float(list_lengths(given, "response_ids").mean()),
    }
