"""The Python API, for scripts and notebooks: give prompts, collect trajectories, update the policy, step by step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from ray import cloudpickle
from transformers import PreTrainedTokenizerBase

from megarl.config import DataConfig, TrainConfig, check_config, needs_rules, plays_turns
from megarl.config.loading.hub import fetch_models
from megarl.config.problems import key_advice
from megarl.data.files import DataFile, find
from megarl.data.loader import BatchLoader, HasTable, TableFeed
from megarl.data.prompts import ANSWER_KEY, PromptReader, Row
from megarl.data.samplers import make_sampler
from megarl.data.trajectories import PROMPT_SCHEMA
from megarl.rewards.processes.scorer import Scorer, make_scorer
from megarl.trainer.loops.driver import LearningState, Metrics, epochs
from megarl.trainer.loops.ppo import collect, learn
from megarl.trainer.roles.roles import start_roles
from megarl.trainer.roles.types import Roles
from megarl.trainer.run.export import ADAPTER_FOLDER, export_hf
from megarl.trainer.run.facts import model_text
from megarl.trainer.run.preemption import ending_at_once
from megarl.trainer.run.run import Run
from megarl.trainer.run.start import open_run
from megarl.trainer.run.timeline import STEP
from megarl.trainer.stages.groups import Groups
from megarl.trainer.stages.inputs import ModelInputs, load_model_inputs
from megarl.trainer.stages.prompt_data import reading, training_reading
from megarl.trainer.stages.reward_model import score_weights
from megarl.trainer.stages.scoring import Rewards, check_prompts
from megarl.trainer.workers.ptx import load_ptx
from megarl.util.plugins import load_plugins

DATA_SOURCE = "python"  # the data source of prompts that name none
MOST_KEPT = 8  # lists of prompts whose positions are kept: a program may also make new prompts for each call


Prompts: TypeAlias = Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]] | pa.Table | HasTable


class PromptSupply:
    """Batches of the program's prompts; the same prompts given again continue after their last batch, also if others came between."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        check: Callable[[pa.Table], None],
        several_turns: bool = False,
        further: Mapping[str, Any] | None = None,
    ) -> None:
        """`check`: raises a ValueError for prompts that the run cannot use; `several_turns`, `further`: see `read_prompts`."""
        self._further = dict(further or {})
        self._data, self._tokenizer, self._check = data, tokenizer, check
        self._several_turns = several_turns
        self._given: Any = None
        self._digest: str | None = None  # of the last given prompts
        self._loader: BatchLoader | None = None  # None: there are fewer prompts than a batch has
        self._batches: Iterator[pa.Table] = iter(())
        # Both of all prompts that were given, by their digest; the last ones are at the end.
        self._known: dict[str, tuple[BatchLoader | None, Iterator[pa.Table]]] = {}
        self._resumed: dict[str, Any] = {}  # the loaded state
        self._positions: dict[str, Any] = {}  # in it, by the digest of prompts that have not been given yet

    def batches(self, prompts: Prompts) -> Iterator[pa.Table]:
        """Batches without end, each of `data.gen_batch_size` (or else train_batch_size) prompts.

        Fewer prompts than a batch are repeated within it.

        Raises:
            ValueError: no prompts, or a wrong one, by its number.
        """
        if isinstance(prompts, str | Mapping):  # a list of it would be one of its letters, or of its keys
            raise ValueError(f"prompts: found one {type(prompts).__name__}; give a list of prompts, [prompt]")
        if not isinstance(prompts, pa.Table) and not hasattr(prompts, "table"):
            prompts = list(prompts)
        if not _same(prompts, self._given):
            table = self._table(prompts)
            digest = _digest(table)
            if digest != self._digest:
                self._begin(table, digest)
            # A copy, so that later changes of the caller's list, and of chats and rows in it, are noticed.
            self._given = deepcopy(prompts) if isinstance(prompts, list) else prompts
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        """The digest of the last prompts and the position in them, and the positions in others by their digests, as JSON values; empty before
        the first prompts."""
        if self._digest is None:
            return self._resumed
        known = {
            digest: loader.state_dict() if loader is not None else None
            for digest, (loader, _) in self._known.items()
        }
        position = known.pop(self._digest)
        others = [*self._positions.items(), *known.items()][1 - MOST_KEPT :]
        return {"prompts": self._digest, "position": position, "others": dict(others)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position when prompts are given that have one."""
        assert self._digest is None, "prompts were given already"
        self._resumed = state
        self._positions = dict(state.get("others", {}))  # checkpoints of earlier versions have none
        if "prompts" in state:
            self._positions[state["prompts"]] = state["position"]

    def report(self, uids: Sequence[str], scores: np.ndarray) -> None:
        """Give an adaptive sampler the scores [trajectories] of the prompts with these uids."""
        if self._loader is not None:
            self._loader.report(uids, scores)

    def _table(self, prompts: Prompts) -> pa.Table:
        data = self._data
        if isinstance(prompts, pa.Table) or hasattr(prompts, "table"):
            table = prompts if isinstance(prompts, pa.Table) else prompts.table
            missing = [name for name in PROMPT_SCHEMA.names if name not in table.column_names]
            if missing:
                raise ValueError(
                    f"prompts: the table lacks the columns {', '.join(missing)} of a prompt table, such as a "
                    "PromptDataset's; give rows as a list of dicts instead (table.to_pylist())"
                )
        else:
            keywords = reading(data, self._several_turns) | self._further
            reader = PromptReader(self._tokenizer, may_lack=(ANSWER_KEY,), **keywords)
            file = DataFile("prompts")
            rows = [
                Row(file, number, f"prompt:{number}", _row(number, prompt, data))
                for number, prompt in enumerate(prompts)
            ]
            table = reader.table(rows)
            reader.errors.raise_if_any()
        if not table.num_rows:
            raise ValueError("prompts: there are none (or all are longer than data.max_prompt_length)")
        self._check(table)
        return table

    def _begin(self, table: pa.Table, digest: str) -> None:
        """Go on with other prompts than before where they ended last, or at the position that was saved with them; else at their beginning."""
        self._known[digest] = self._known.pop(digest) if digest in self._known else self._open(table, digest)
        self._digest, (self._loader, self._batches) = digest, self._known[digest]
        for earlier in [*self._known][:-MOST_KEPT]:
            del self._known[earlier]

    def _open(self, table: pa.Table, digest: str) -> tuple[BatchLoader | None, Iterator[pa.Table]]:
        """The loader and the batches of prompts that this process has not been given."""
        data = self._data
        size = data.gen_batch_size or data.train_batch_size
        if table.num_rows < size:
            return None, _repeated(table, size)
        loader = BatchLoader(TableFeed(table, make_sampler(data.sampler, data.shuffle), data.seed), size)
        if self._positions.get(digest) is not None:
            loader.load_state_dict(self._positions.pop(digest))
        return loader, epochs(loader)


def _repeated(table: pa.Table, size: int) -> Iterator[pa.Table]:
    """Batches of `size` rows from fewer rows, which repeat."""
    batch = pa.concat_tables([table] * -(-size // table.num_rows)).slice(0, size)
    while True:
        yield batch.combine_chunks()


def _digest(table: pa.Table) -> str:
    """SHA-256 of a prompt table's rows."""
    digest = hashlib.sha256()
    for batch in table.select(PROMPT_SCHEMA.names).combine_chunks().to_batches():
        digest.update(batch.replace_schema_metadata().serialize())
    return digest.hexdigest()


def _same(prompts: Prompts, given: Any) -> bool:
    if isinstance(prompts, list):
        return isinstance(given, list) and prompts == given
    return prompts is given


def _row(number: int, prompt: Any, data: DataConfig) -> dict[str, Any]:
    """A prompt as a row of a prompt file with the columns that `data` names; its values are checked by the reader.

    A dict may have its ground truth as `ground_truth`, whatever data.answer_key is.

    Raises:
        ValueError: a dict that has no prompt.
    """
    row = dict(prompt) if isinstance(prompt, Mapping) else {data.prompt_key: prompt}
    if find(row, data.prompt_key) is None:
        raise ValueError(
            f"prompts: number {number} is a dict without {data.prompt_key!r} (keys: {', '.join(map(str, row))}); "
            "name it so, or set data.prompt_key"
        )
    if find(row, data.reward_fn_key) is None:
        row[data.reward_fn_key] = DATA_SOURCE
    if data.answer_key is not None and find(row, data.answer_key) is None and "ground_truth" in row:
        row[data.answer_key] = row["ground_truth"]
    return row


RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class TrainingData:
    """The trajectories of a step, scored, with the version of the weights that generated them."""

    groups: Groups
    version: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def table(self) -> pa.Table:
        """A row a trajectory: token ids, masks, log-probs, `score`, `weight_version`, ..."""
        return self.groups.batch()


class DataCollector:
    """Generates and scores trajectories with the newest weights; `Trainer.collect_data` is its `collect`.

    Attributes:
        version: calls of `collect` so far, which is the version of the weights in the engines.
        learnt: the call whose trajectories the policy was updated with last; those of others may only have been looked at.
    """

    def __init__(
        self, config: TrainConfig, run: Run, roles: Roles, models: ModelInputs, scorer: Scorer
    ) -> None:
        self._config, self._run, self._roles, self._scorer = config, run, roles, scorer
        self._rewards = Rewards(
            run, scorer, models.tokenizer, *score_weights(config.reward_model), models.reward_model
        )
        self.supply = PromptSupply(
            config.data,
            models.tokenizer,
            self._check,
            several_turns=plays_turns(config.actor_rollout_ref.rollout),
            further=training_reading(config),
        )
        self.version = self.learnt = 0

    def collect(self, prompts: Prompts) -> TrainingData:
        """Trajectories for the next `data.train_batch_size` of the prompts, with the weights as they are now.

        Args:
            prompts: texts, chats (lists of {role, content}), dicts with `prompt` and the fields of its reward (`ground_truth`,
                `data_source`, `extra_info`), or a prompt table. The same prompts given again continue where the last call
                ended, in a new order after each pass over all of them (`data.shuffle`).

        Raises:
            ValueError: an invalid prompt, named by its number; a data source without a reward.
        """
        batches = self.supply.batches(prompts)
        self.version += 1
        self._scorer.give_up()  # samples of a call that failed, or that was interrupted: their prompts may come again
        run = self._run
        run.seconds.clear()
        with run.timed(STEP, {"step": self.version, "half": "collect"}):
            groups, metrics = collect(self._config, batches, run, self._roles, self._rewards, self.version)
        self.supply.report(*groups.prompt_scores())
        return TrainingData(groups, self.version, metrics, dict(run.seconds))

    def state_dict(self) -> dict[str, Any]:
        """The position in the prompts, and the calls so far, as JSON values."""
        return {**self.supply.state_dict(), "collected": self.version}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the calls of a saved state, the last of which the policy was updated with."""
        self.supply.load_state_dict(state)
        self.version = self.learnt = state.get("collected", 0)  # checkpoints of earlier versions have none

    def _check(self, table: pa.Table) -> None:
        if needs_rules(self._config) and not plays_turns(self._config.actor_rollout_ref.rollout):
            check_prompts(self._scorer, table)


class Trainer:
    """A run: its processes start with it and end with `close`, or at the end of its `with` block.

    Until then SIGTERM and SIGUSR1 end the program (SystemExit, code 75: to be started again), unless it has handlers for them.

    It continues from a checkpoint as `trainer.resume_mode` says (auto: from the newest in its run folder, if there is one).

    Attributes:
        step: updates so far, including those before the checkpoint.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        actor_model: str | Path | None = None,
        critic_model: str | Path | None = None,
        reward_fn: RewardFunction | None = None,
        **unknown: Any,
    ) -> None:
        """
        Args:
            config: of `make_trainer_config` or `load_config`.
            actor_model: folder or Hub id of the policy; None: as the configuration says.
            critic_model: the same for the critic's first weights; None: the configuration's, or the policy's.
            reward_fn: `f(data_source, solution_str, ground_truth, extra_info)`, plain or async, returns a number, or a dict
                with "score" whose other numbers become metrics; None: as the configuration says. It runs in processes
                of its own, and objects that it refers to are pickled with it.

        Raises:
            ValueError: all mistakes in the configuration, the models and the checkpoint to continue from, before anything is
                started.
        """
        for name in unknown:
            raise ValueError(f"Trainer({name}=...): {key_advice(name) or 'there is no such argument'}")
        # All checks that need no process come first.
        config = _with_models(config, actor_model, critic_model)
        _refuse_keys_of_the_loop(config)
        config = check_config(config, data_files=False)
        if reward_fn is not None and not needs_rules(config):
            raise ValueError(
                "reward_fn: its scores would count nothing beside the reward model's; give reward_model.rule_weight, or "
                "leave it out"
            )
        load_plugins(config.plugins)
        self.config = fetch_models(config)
        num_steps = self.config.trainer.total_training_steps
        assert num_steps is not None, "make_trainer_config sets it, _with_models checks it"
        function = None if reward_fn is None else cloudpickle.dumps(reward_fn)
        told_to_end = "ending; started again, the program goes on from its last checkpoint, if there is one"
        with ExitStack() as stack:  # closes everything opened so far if a later part fails
            stack.enter_context(ending_at_once(told_to_end, keep_handlers=True))
            scorer = stack.enter_context(make_scorer(self.config, function))
            models = load_model_inputs(self.config)
            facts = {"model": model_text(self.config.actor_rollout_ref.model.path, models.model)}
            self._run = stack.enter_context(
                open_run(self.config, total_steps=num_steps, facts=facts, signals=False)
            )
            self._run.show_rewards(scorer)
            for warning in models.warnings:
                self._run.say(warning)
            self._roles = start_roles(self.config, self._run, models.model, num_steps)
            self.collector = DataCollector(self.config, self._run, self._roles, models, scorer)
            ptx, parts = load_ptx(self.config, models.tokenizer), {"prompts": self.collector}
            self._state = LearningState.start(self.config, self._run, self._roles, num_steps, ptx, parts)
            self._driver = self._state.driver(self.config, self._run, self._roles)
            self.step = self._state.checkpoints.resume()
            self.collector.version = self.collector.learnt = max(self.collector.version, self.step)
            # From here on `close` ends the run.
            stack.push(self._finish)
            self._stack = stack.pop_all()

    def collect_data(self, prompts: Prompts) -> TrainingData:
        """Generate and score trajectories; see `DataCollector.collect`."""
        return self.collector.collect(prompts)

    def update_policy(self, data: TrainingData) -> dict[str, float]:
        """Train critic and policy on trajectories; returns the step's metrics, and `reward`, their mean score (NaN of a
        step that was left out, see trainer.on_nonfinite). Saves a checkpoint if one is due (trainer.save_freq, save_minutes).

        Raises:
            ValueError: the trajectories are not those of the newest weights.
            OSError: the checkpoint could not be written, and trainer.on_save_error says stop.
        """
        if data.version != self.collector.version or data.version == self.collector.learnt:
            raise ValueError(
                f"update_policy: data of collect_data number {data.version}, of which there were "
                f"{self.collector.version}; the policy is updated once with what was collected last"
            )
        run, roles = self._run, self._roles
        self.collector.learnt = data.version
        self.step = step = self.step + 1

        def work(step: int, metrics: Metrics) -> pa.Table:
            run.seconds.update(data.seconds)
            metrics |= data.metrics
            batch, learnt = learn(
                self.config,
                run,
                roles,
                data.groups.batch(),
                self._state.controls,
                step,
                self._state.ptx_batches,
            )
            metrics |= learnt
            return batch

        metrics = self._driver.make(step, work)
        return {"reward": metrics.get("critic/score/mean", math.nan), **metrics}

    @property
    def stop(self) -> str | None:
        """Why training should end here, by `health.early_stop`; None: it may continue."""
        return self._state.monitor.stop

    def save(self, folder: str | Path) -> str:
        """Write the policy as a Hugging Face model, whole or not at all; returns the folder's path. A model that is there is replaced.

        With LoRA its weights are merged, and the adapters are written into its folder `adapter`, in PEFT's format.

        Raises:
            ValueError: the folder has something else than a model, all of which would be gone.
        """
        path = Path(folder).expanduser()
        _refuse_other_content(path)
        with self._roles.memory.held("export"):
            model = self.config.actor_rollout_ref.model
            return export_hf(self._run, self._roles.actor.group, model, path, path / ADAPTER_FOLDER)

    def save_checkpoint(self) -> Path | None:
        """Save the state that training continues from (models, optimizers, schedules, random numbers, the position in the prompts), as
        `checkpoints/step-<n>` in the run folder; returns that, or None if it failed and trainer.on_save_error says continue.

        Raises:
            ValueError: nothing was trained so far, or trajectories were collected that the policy was not updated with.
            OSError: it could not be written; older ones stay as they were.
        """
        if not self.step or self.collector.version != self.collector.learnt:
            raise ValueError(
                f"save_checkpoint: {self.step} updates with the data of {self.collector.version} collect_data calls; a "
                "checkpoint is saved after update_policy, before the next collect_data"
            )
        return self._state.checkpoints.save(self.step)

    def close(self) -> None:
        """End every process of the run, after a checkpoint that is still being written; a second call does nothing."""
        self._stack.close()

    def _finish(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._state.checkpoints.finish()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _refuse_other_content(folder: Path) -> None:
    """ValueError: there is a file or a folder of this name that is neither empty nor a model's."""
    is_model = (folder / "config.json").is_file()
    if folder.exists() and not is_model and not (folder.is_dir() and not any(folder.iterdir())):
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:3]) if folder.is_dir() else "a file"
        raise ValueError(
            f"save: {folder} is no model's folder (found: {found}), and a saved model replaces the folder with all that it has; name "
            "a new one"
        )


def _refuse_keys_of_the_loop(config: TrainConfig) -> None:
    """ValueError for keys that only `megarl train` reads."""
    data, trainer = config.data, config.trainer
    given = {
        "data.train_files": data.train_files,
        "data.mixture": data.mixture,
        "data.val_files": data.val_files,
        "data.val_sets": data.val_sets,
        "data.streaming": data.streaming,
        "trainer.test_freq": trainer.test_freq != -1,
        "trainer.max_run_minutes": trainer.max_run_minutes is not None,
        "trainer.best_metric": trainer.best_metric is not None,
        "trainer.max_restarts": trainer.max_restarts != 0,
        "trainer.val_before_train": trainer.val_before_train,
        "trainer.eval_mode": trainer.eval_mode != "blocking",
        "trainer.mode": trainer.mode != "sync",
        "trainer.rollout_only": trainer.rollout_only,
        "trainer.train_only": trainer.train_only,
    }
    names = [name for name, value in given.items() if value]
    if names:
        raise ValueError(
            f"{', '.join(names)}: only `megarl train` reads them; a Trainer is given its prompts (collect_data), and the program "
            "says what else is done; leave them out"
        )


def _with_models(
    config: TrainConfig, actor_model: str | Path | None, critic_model: str | Path | None
) -> TrainConfig:
    """The configuration with the models that were given."""
    for name, model in (("actor_model", actor_model), ("critic_model", critic_model)):
        if model is not None and not isinstance(model, str | Path):
            raise ValueError(
                f"{name} must be the folder of a Hugging Face model or its id on the Hub, found {type(model).__name__}: "
                "megarl builds Megatron's shards from the files; model.save_pretrained(folder) writes them"
            )
    policy, critic = config.actor_rollout_ref, config.critic
    if actor_model is not None:
        policy = replace(policy, model=replace(policy.model, path=str(Path(actor_model).expanduser())))
    if not policy.model.path:
        raise ValueError("actor_model is required: the folder of a Hugging Face model, or its id on the Hub")
    if critic_model is not None:
        if critic is None:
            raise ValueError(
                f"critic_model: algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic"
            )
        critic = replace(critic, model=replace(critic.model, path=str(Path(critic_model).expanduser())))
    if config.trainer.total_training_steps is None:
        raise ValueError(
            "trainer.total_training_steps is required: the updates of the run, over which schedules go"
        )
    return replace(config, actor_rollout_ref=policy, critic=critic)
