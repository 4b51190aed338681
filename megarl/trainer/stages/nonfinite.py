"""Numbers of a step that are not finite: where they first appear, and what becomes of the step.

Guarantees:
- From the first one on nothing is trained: no weight, no optimizer state, no schedule and no coefficient changes any more
  in that step. Updates of the step that were made before it stay.
- The step's trajectories, with all that was computed of them, are in `failures/step-<n>.parquet`, from which `megarl replay`
  does the training part again.
- What costs a sample by itself is no such number: a reward that fails, or returns none that is finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from megarl.cluster import WorkerFailed
from megarl.cluster.failures.report import FOLDER
from megarl.config import TrainConfig
from megarl.data.files import write_parquet
from megarl.data.trajectories import ragged
from megarl.trainer.stages.advantages import Controls

if TYPE_CHECKING:
    from megarl.trainer.run.run import Run

# Columns in the order in which a step makes them.
GENERATED = ("rollout_log_probs", "score", "baseline_score", "overlong_penalty")
COMPUTED = ("old_log_probs", "ref_log_probs", "full_kl", "values")
LEARNT_FROM = ("rollout_is_weights", "token_level_rewards", "advantages", "returns")

Answers = Sequence[tuple[str, Sequence[Any]]]
"""Of each call of a role's ranks: the role, and what each rank returned (`RowColumns` or None)."""


class NotFinite(RuntimeError):
    """A number of a step is not finite. `batch`: its trajectories, with the columns that were there by then."""

    def __init__(self, what: str, batch: pa.Table) -> None:
        super().__init__(what)
        self.batch = batch


def require_finite(batch: pa.Table, names: Sequence[str], answers: Answers = ()) -> None:
    """Look through columns, as far as they are there.

    Args:
        names: in the order in which the columns were made.
        answers: from which they came, where ranks computed them.

    Raises:
        NotFinite: names the first such column and trajectory, and the rank that computed it.
    """
    for name in (name for name in names if name in batch.column_names):
        rows, values = _not_finite(batch, name)
        if len(rows):
            row, distinct = int(rows[0]), len(np.unique(rows))
            raise NotFinite(
                f"{name} of trajectory {batch['uid'][row]} is {values[0]}{_computed_by(answers, name, row)}; it is not "
                f"finite in {distinct} of {batch.num_rows} trajectories",
                batch,
            )


def _not_finite(batch: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The row of each value of a column that is not finite, and the values."""
    if pa.types.is_list(batch.schema.field(name).type):
        flat, offsets = ragged(batch, name)
        bad = np.flatnonzero(~np.isfinite(flat))
        return np.searchsorted(offsets, bad, side="right") - 1, flat[bad]
    values = batch[name].to_numpy()
    bad = np.flatnonzero(~np.isfinite(values))
    return bad, values[bad]


def _computed_by(answers: Answers, name: str, row: int) -> str:
    for role, results in answers:
        for rank, part in enumerate(results):
            if part is not None and name in part[1] and row in part[0]:
                return f", computed by {role} rank {rank}"
    return ""


@contextmanager
def rank_errors_as_not_finite(batch: pa.Table) -> Iterator[None]:
    """A rank's FloatingPointError is one of the batch that it was given."""
    try:
        yield
    except WorkerFailed as failure:
        if failure.kind != FloatingPointError.__name__:
            raise
        raise NotFinite(f"{failure.role}: {failure.message}", batch) from failure


@contextmanager
def finite_step(
    run: Run, config: TrainConfig, controls: Controls, step: int, metrics: dict[str, float]
) -> Iterator[None]:
    """What a number that is not finite does to a step: by `trainer.on_nonfinite` it ends the run, or only the step.

    With `skip` the metric training/skipped is 1 for such a step, else 0, and `controls` are as they were before it.

    Raises:
        NotFinite: the run is to end; says what was found, where the trajectories are, and how to go through it again.
    """
    before, skips = controls.state_dict(), config.trainer.on_nonfinite == "skip"
    try:
        yield
    except NotFinite as found:
        message = f"step {step}: {found}\n{_save_trajectories(run.folder, found.batch, step)}"
        if not skips:
            advice = "trainer.on_nonfinite=skip goes on with the next step"
            raise NotFinite(f"{message}\n{advice}", found.batch) from found
        controls.load_state_dict(before)
        run.say(f"Warning: the rest of the step is left out (trainer.on_nonfinite=skip): {message}")
        metrics["training/skipped"] = 1.0
    else:
        if skips:
            metrics["training/skipped"] = 0.0


def _save_trajectories(folder: Path, batch: pa.Table, step: int) -> str:
    """Write the trajectories of a step that is not trained on; says where they are."""
    path = folder / FOLDER / f"step-{step:06d}.parquet"
    try:
        path.parent.mkdir(exist_ok=True)
        write_parquet(batch, path)
    except OSError as error:  # what was found matters more
        return f"its trajectories could not be written: {error}"
    text = f"its trajectories: {path}"
    if "score" not in batch.column_names:
        return text
    return f"{text}\nonce more: megarl replay {folder} --step {step} --trajectories {path}"
