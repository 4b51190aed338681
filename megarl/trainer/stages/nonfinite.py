"""Numbers of a step that are not finite: where they first appear, and whether the run stops or skips the step.

Guarantees:
- After the first such number no weight, optimizer state, schedule or coefficient changes in that step. Earlier updates of the step
  stay.
- The step's trajectories, with all columns computed by then, are saved in `failures/step-<n>.parquet`, from which `megarl replay`
  repeats the learning part.
- A reward that fails or returns a number that is not finite does not count: it costs its sample alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from megarl.cluster import WorkerFailed
from megarl.cluster.report import FOLDER
from megarl.data.files import write_parquet
from megarl.data.trajectories import ragged
from megarl.trainer.run.run import Run
from megarl.trainer.stages.advantages import Controls

# Columns in the order in which a step makes them.
GENERATED = ("rollout_log_probs", "score", "baseline_score", "overlong_penalty")
COMPUTED = ("old_log_probs", "ref_log_probs", "full_kl", "values")
LEARNT_FROM = ("rollout_is_weights", "token_level_rewards", "advantages", "returns")

Answers = Sequence[tuple[str, Sequence[Any]]]
"""For each call of a role's ranks: the role, and the result of each rank (`RowColumns` or None)."""


class NotFinite(RuntimeError):
    """A number of a step is not finite. `batch`: its trajectories with the columns computed by then."""

    def __init__(self, what: str, batch: pa.Table) -> None:
        super().__init__(what)
        self.batch = batch


def require_finite(batch: pa.Table, names: Sequence[str], answers: Answers = ()) -> None:
    """Check the columns that are present.

    Args:
        names: columns in the order in which they were computed.
        answers: the results of the ranks that computed them; empty: the controller did.

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
    """Turn a rank's FloatingPointError into a NotFinite of the batch that it was given."""
    try:
        yield
    except WorkerFailed as failure:
        if failure.kind != FloatingPointError.__name__:
            raise
        raise NotFinite(f"{failure.role}: {failure.message}", batch) from failure


@contextmanager
def finite_step(
    run: Run, on_nonfinite: str, controls: Controls, step: int, metrics: dict[str, float], save: bool = True
) -> Iterator[None]:
    """Handle a number of a step that is not finite: by `trainer.on_nonfinite` it ends the run, or only the step.

    With `skip` the metric training/skipped is 1 for such a step, else 0, and `controls` are restored to their state before it.

    Args:
        save: whether the trajectories are saved; a replay has read them from a file.

    Raises:
        NotFinite: the run is to end; names the number, the file of the trajectories, and the command that replays the step.
    """
    before, skips = controls.state_dict(), on_nonfinite == "skip"
    try:
        yield
    except NotFinite as found:
        message = f"step {step}: {found}"
        if save:
            message += f"\n{_save_trajectories(run.folder, found.batch, step)}"
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
    """Save the trajectories of a step that is not trained on; returns text with their path."""
    path = folder / FOLDER / f"step-{step:06d}.parquet"
    try:
        path.parent.mkdir(exist_ok=True)
        write_parquet(batch, path)
    except OSError as error:  # the non-finite number matters more
        return f"its trajectories could not be written: {error}"
    text = f"its trajectories: {path}"
    if "score" not in batch.column_names:
        return text
    return f"{text}\nonce more: megarl replay {folder} --step {step} --trajectories {path}"
