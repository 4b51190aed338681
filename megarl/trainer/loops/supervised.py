"""The parts that SFT, reward models and DPO share: the model's ranks, validations, the best model, early stopping."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from megarl.checkpoints.hf.load import check_hf_weights
from megarl.cluster import ClusterSetup
from megarl.config import TuningConfig, check_models, position_warnings
from megarl.config.resolve import GLOBAL_POOL
from megarl.data.loader import TableLoader
from megarl.data.trajectories import ragged
from megarl.models import ModelConfig, read_model_config
from megarl.trainer.loops.driver import Driver, Metrics, epochs
from megarl.trainer.roles.adapters import check_adapters
from megarl.trainer.roles.model_roles import Role, say_layers, start_model, supervised_spec
from megarl.trainer.roles.roles import open_pools
from megarl.trainer.run.checkpoints import Checkpoints
from megarl.trainer.run.cluster_setup import pools_of
from megarl.trainer.run.export import FOLDER, export_hf
from megarl.trainer.run.facts import supervised_facts
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import open_run
from megarl.trainer.workers.dispatch import MicroBatching, plan_rows
from megarl.util.files import read_json_object, write_text

VAL_LOSS = "val/loss"
# By role, the class of its ranks and the head of its model.
WORKERS = {
    "sft": ("megarl.trainer.workers.supervised:SFTWorker", "lm"),
    "rm": ("megarl.trainer.workers.supervised:RMWorker", "value"),
    "dpo": ("megarl.trainer.workers.supervised:DPOWorker", "lm"),
}


@dataclass
class Progress:
    """Validation losses so far: the best one, and whether the run is to stop early.

    Attributes:
        patience: consecutive validations without a lower loss after which the run ends; None: it does not end early.
        min_delta: how much lower than `threshold` a loss must be to count for `patience`.
        best: the lowest loss; infinite before the first.
        threshold: the lowest one that counted.
        stale: validations since then.
    """

    patience: int | None
    min_delta: float
    best: float = float("inf")
    threshold: float = float("inf")
    stale: int = 0

    def observe(self, loss: float) -> bool:
        """Record a loss; returns whether it is the lowest so far (NaN never is)."""
        if loss < self.threshold - self.min_delta:
            self.threshold, self.stale = loss, 0
        else:
            self.stale += 1
        lowest = loss < self.best
        self.best = loss if lowest else self.best
        return lowest

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, which have no infinity."""
        return {
            "best": self.best if math.isfinite(self.best) else None,
            "threshold": self.threshold if math.isfinite(self.threshold) else None,
            "stale": self.stale,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.threshold = (
            math.inf if state[name] is None else state[name] for name in ("best", "threshold")
        )
        self.stale = state["stale"]

    @property
    def stop(self) -> bool:
        return self.patience is not None and self.stale >= self.patience


@dataclass(frozen=True)
class Ranks:
    """The model's ranks on all devices of a run of `num_steps` steps."""

    config: TuningConfig
    run: Run
    role: Role
    num_steps: int

    def call(
        self, method: str, rows: pa.Table, lengths: np.ndarray, *arguments: Any, pair_share: float = 0.0
    ) -> list[Any]:
        """Each rank's result of a method on its share of the rows.

        Args:
            lengths: tokens of the rows [rows].
            arguments: of the method, after the rows and each rank's share of them.
            pair_share: see `sequence_costs`.
        """
        run, role = self.run, self.role
        plan = plan_rows(lengths, role.layout, role.batching.max_tokens, pair_share=pair_share)
        return run.wait(role.group.call(method, run.put(rows), run.put(plan), *arguments))

    def export(self, folder: Path, **more: Any) -> str:
        """Write the model as a Hugging Face folder, completely or not at all; returns its path. `more`: of `export_hf`."""
        return export_hf(self.run, self.role.group, self.config.model, folder, **more)


def read_model(config: TuningConfig, head: str = "lm") -> ModelConfig:
    """The facts of the model that is trained, checked before anything is started.

    Raises:
        ValueError: its files do not fit each other, `head` or the configuration.
    """
    path, mtp = config.model.path, config.model.mtp
    model = read_model_config(path)
    check_models(config, model)
    check_adapters(config, model)
    check_hf_weights(path, model, head, mtp=mtp != "drop" and head == "lm", copies=mtp == "train")
    return model


def check_tokens(config: TuningConfig, model: ModelConfig, *tables: pa.Table | None) -> None:
    """Refuse examples with token ids that the model does not have. Tensor parallel ranks would take each for another rank's, without a word,
    and a GPU would end the process.

    Args:
        tables: `uid` and `input_ids`, of one or several texts a row; None: there is none.

    Raises:
        ValueError: names the first such example.
    """
    for table in filter(None, tables):
        if pc.max(pc.list_flatten(table["input_ids"], recursive=True)).as_py() < model.vocab_size:
            continue
        for uid, texts in zip(table["uid"], table["input_ids"], strict=True):
            token = int(np.hstack(texts.as_py()).max())
            if token >= model.vocab_size:
                raise ValueError(
                    f"example {uid} has the token {token}, and the model in {config.model.path} has {model.vocab_size:,} tokens (vocab_size in "
                    f"its config.json): the tokenizer in {config.model.tokenizer_path} has more; take one that fits the model, or a model "
                    "whose embedding has a row for each token"
                )


def end_notes(
    config: TuningConfig, model: ModelConfig, texts: pa.Table, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """A note for the user if no text ends with a token at which engines stop: behind the learnt end they would go on to the longest response.

    Args:
        texts: `input_ids`, up to the last learnt token. Ones of data.max_length tokens may have been cut, and do not count.
    """
    ids, offsets = ragged(texts, "input_ids")
    last, ends = ids[offsets[1:] - 1][np.diff(offsets) < config.data.max_length], _end_tokens(config, model)
    if not len(last) or np.isin(last, ends).any():
        return []
    token = int(np.bincount(last).argmax())
    return [
        f"Warning: examples end with token {token} ({tokenizer.convert_ids_to_tokens(token)!r}), and none with an end token of the model in "
        f"{config.model.path} ({', '.join(map(str, ends)) or 'it has none'}): engines would not end responses there; put it into eos_token_id "
        "of generation_config.json in that folder, which the exported model takes over, or give rollout.stop_token_ids later"
    ]


def _end_tokens(config: TuningConfig, model: ModelConfig) -> list[int]:
    """The tokens at which SGLang ends responses: those of config.json and of generation_config.json."""
    file = Path(config.model.path).expanduser() / "generation_config.json"
    sources = [model.hf, model.fields, *([read_json_object(file)] if file.is_file() else [])]
    found = [source.get("eos_token_id") for source in sources]
    each = (token for one in found for token in (one if isinstance(one, list) else [one]))
    return sorted({token for token in each if token is not None})


@contextmanager
def open_ranks(
    config: TuningConfig,
    cluster_setup: ClusterSetup | None,
    role: str,
    model: ModelConfig,
    counts: tuple[int, int | None],
    steps_of_epoch: int,
    notes: Sequence[str],
    **arguments: Any,
) -> Iterator[Ranks]:
    """A run, and the model's ranks on all of its devices.

    Args:
        role: a key of `WORKERS`.
        counts: of training and validation examples; None: there is no validation.
        notes: lines about the data, to be printed.
        arguments: of the ranks' class, in addition to `spec`.
    """
    num_steps = config.trainer.total_training_steps or config.trainer.total_epochs * steps_of_epoch
    facts, (worker, head) = supervised_facts(config, model, *counts), WORKERS[role]
    with open_run(config, num_steps, cluster_setup, facts=facts) as run:
        for line in (*position_warnings(config, model), *notes):
            run.say(line)
        open_pools(run, pools_of(config))
        spec = supervised_spec(config, head, num_steps)
        with run.status("starting the model's ranks"):
            batching = MicroBatching(config.data.train_batch_size, config.max_token_len_per_gpu, None)
            started = start_model(run, role, worker, GLOBAL_POOL, {"spec": spec, **arguments}, batching)
            run.wait(started.group.started)
        say_layers(run, started.group, run.pools[GLOBAL_POOL])
        yield Ranks(config, run, replace(started, batching=batching), num_steps)


def validation_metrics(found: dict[str, float]) -> dict[str, float]:
    """Metrics of held-out examples, "loss" among them, under the names that a step reports."""
    return {VAL_LOSS: found["loss"], **{f"val/{name}": found[name] for name in found if name != "loss"}}


def run_steps(
    ranks: Ranks,
    loader: TableLoader,
    update: Callable[[pa.Table], Metrics],
    validate: Callable[[], Metrics] | None,
    export: Callable[[Path], str] | None = None,
) -> str:
    """Make all remaining steps; returns the folder of the model after the last one.

    Also saves checkpoints, as the trainer's keys say, and the best model so far as `best/hf`.

    Args:
        update: makes one optimizer step on a batch; returns its metrics.
        validate: metrics of held-out examples, `val/loss` among them; None: there are no such examples.
        export: as `Ranks.export`; None: that method itself.
    """
    run, trainer, num_steps, export = ranks.run, ranks.config.trainer, ranks.num_steps, export or ranks.export
    progress = Progress(trainer.early_stop_patience, trainer.early_stop_min_delta)
    groups, parts = {"model": ranks.role.group}, {"data": loader, "progress": progress}
    checkpoints = Checkpoints(run, trainer, groups, parts, lambda phase: nullcontext(), export)
    batches = epochs(loader)

    def work(step: int, metrics: Metrics) -> None:
        with run.timed("update"):
            metrics |= update(next(batches))

    # Before the step's checkpoint, which has `progress`: a run that continues from it knows the best loss.
    def made(step: int, metrics: Metrics) -> None:
        if VAL_LOSS not in metrics:
            return
        if progress.observe(metrics[VAL_LOSS]) and trainer.save_best:
            save_best(run, step, metrics, export)
        if progress.stop:
            run.say(
                f"step {step}: the last {progress.stale} validations had no {VAL_LOSS} under {progress.threshold:.6g} by "
                f"trainer.early_stop_min_delta={trainer.early_stop_min_delta:g}: the run ends early"
            )

    driver = Driver(
        run,
        num_steps,
        validate=None if validate is None else lambda step: validate(),
        test_freq=trainer.test_freq,
        made=made,
        checkpoints=checkpoints,
        stopped=lambda: progress.stop,
    )
    driver.drive(range(checkpoints.resume() + 1, num_steps + 1), work)
    return export(run.folder / FOLDER)


def save_best(run: Run, step: int, metrics: dict[str, float], export: Callable[[Path], str]) -> None:
    """Write the model as `best/hf` in the run folder, and its step and metrics into `best/best.json`."""
    folder = run.folder / "best"
    # It would describe another model while this one is written.
    (folder / "best.json").unlink(missing_ok=True)
    run.say(f"step {step}: the lowest {VAL_LOSS} so far, {metrics[VAL_LOSS]:.6g}")
    export(folder / FOLDER)
    found = {"step": step, **{name: value for name, value in metrics.items() if name.startswith("val/")}}
    write_text(folder / "best.json", json.dumps(found, indent=2) + "\n")
