"""The inputs of a run, read before any process starts: data, tokenizer, model facts, reward. So mistakes are found early."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megarl.algorithms.advantages import ESTIMATORS
from megarl.algorithms.policy_loss import POLICY_LOSSES
from megarl.checkpoints.hf.load import check_hf_weights
from megarl.config import (
    DataConfig,
    TrainConfig,
    check_models,
    needs_rules,
    plays_turns,
    position_warnings,
    reference_key,
    taught_references,
)
from megarl.config.schema.commands import TrainerConfig
from megarl.data.loader import BatchLoader
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.models import ModelConfig, read_model_config
from megarl.rewards.processes.scorer import Scorer
from megarl.trainer.roles.adapters import check_adapters
from megarl.trainer.run.facts import Facts, data_text, model_text
from megarl.trainer.stages.prompt_data import (
    held_out_prompts,
    may_lack,
    read_prompts,
    training_prompts,
    training_reading,
)
from megarl.trainer.stages.reward_model import RewardModelInputs, load_reward_model
from megarl.trainer.stages.scoring import check_prompts
from megarl.trainer.stages.validation import ValidationSet
from megarl.trainer.workers.ptx import load_ptx
from megarl.util.plugins import load_plugins


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a run that concern its models. `warnings`: text for the user before the run."""

    tokenizer: PreTrainedTokenizerBase
    model: ModelConfig
    reward_model: RewardModelInputs | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class TrainInputs(ModelInputs):
    """The inputs of `megarl train`.

    Attributes:
        ptx: batches of the auxiliary language-model loss; None: there is none.
        num_steps: rollout steps of the run, each of which trains on data.train_batch_size prompts.
        num_filtered: prompts of training and validation that were dropped as too long.
    """

    loader: BatchLoader
    ptx: BatchLoader | None
    validation: tuple[ValidationSet, ...]
    num_steps: int
    num_filtered: int

    def facts(self, model_path: str, data: DataConfig) -> Facts:
        """The facts that a run prints at its start."""
        epochs = self.num_steps / steps_of_epoch(self.loader, data.train_batch_size)
        found = {
            "model": model_text(model_path, self.model),
            "data": f"{data_text(data.train_files, self.loader.num_rows, 'prompts')}, {epochs:.3g} epochs",
        }
        if self.validation:
            number = sum(held_out.prompts.num_rows for held_out in self.validation)
            found["validation"] = data_text(data.val_files or "data.val_sets", number, "prompts")
        return found


def load_model_inputs(config: TrainConfig) -> ModelInputs:
    """Read and check the models of a run before they are started.

    Raises:
        ValueError: names the key or file that is wrong.
    """
    model_path = config.actor_rollout_ref.model
    check_names(config)
    model = read_model_config(model_path.path)
    critic = read_model_config(config.critic.model.path) if config.critic is not None else None
    reward = read_model_config(config.reward_model.model.path) if config.reward_model.enable else None
    taught = taught_references(config)
    teachers = {role: read_model_config(section.model.path) for role, section in taught.items()}
    check_models(config, model, critic, reward, teachers)
    check_adapters(config, model, critic)
    mtp = model_path.mtp
    check_hf_weights(model_path.path, model, mtp=mtp != "drop", copies=mtp == "train")
    if critic is not None:
        check_hf_weights(config.critic.model.path, critic, "value")
    tokenizer = load_tokenizer(model_path.tokenizer_path, model_path.trust_remote_code)
    for role, section in taught.items():
        teacher = section.model.path
        check_hf_weights(teacher, teachers[role])
        other = load_tokenizer(teacher, model_path.trust_remote_code)
        check_teacher(tokenizer, other, teacher, f"{reference_key(role)}.model.path")
    reward_model = load_reward_model(config.reward_model, tokenizer) if config.reward_model.enable else None
    return ModelInputs(tokenizer, model, reward_model, tuple(position_warnings(config, model, critic)))


def check_teacher(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, teacher: str, key: str
) -> None:
    """ValueError: the teacher that `key` names, whose tokenizer is `other`, has other tokens: its log-probs would belong to other texts."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    differing = sorted((number, token) for token, number in ours.items() if theirs.get(token) != number)
    if differing:
        number, token = differing[0]
        there = theirs.get(token)
        raise ValueError(
            f"{key}: {teacher} has another tokenizer than the policy: {len(differing):,} of {len(ours):,} tokens "
            f"differ, such as {token!r}, which is {number} here and {'not' if there is None else there} there; a teacher must have the "
            "policy's tokens, with their numbers"
        )


def load_train_inputs(config: TrainConfig, scorer: Scorer) -> TrainInputs:
    """Read everything that `megarl train` needs; `scorer` must have a reward for every data source.

    Raises:
        ValueError: names the key, file or row that is wrong.
    """
    data, models = config.data, load_model_inputs(config)
    tokenizer, optional = models.tokenizer, may_lack(config)
    plays = plays_turns(config.actor_rollout_ref.rollout)

    def check(prompts: pa.Table) -> None:
        # An environment or an agent may give all scores; what it does not score then costs the sample, and the run if that is all of a step.
        if needs_rules(config) and not plays:
            check_prompts(scorer, prompts)

    def dataset(files: str | tuple[str, ...], max_samples: int) -> PromptDataset:
        read = read_prompts(data, files, tokenizer, max_samples, may_lack=optional, several_turns=plays)
        check(read.table)
        return read

    further = training_reading(config)
    loader, num_filtered = training_prompts(data, tokenizer, check, optional, several_turns=plays, **further)
    val_kwargs = config.actor_rollout_ref.rollout.val_kwargs
    held_out = held_out_prompts(data, data.val_max_samples, val_kwargs, dataset)
    return TrainInputs(
        **vars(models),
        loader=loader,
        ptx=load_ptx(config, tokenizer),
        validation=tuple(ValidationSet(name, read.table, how) for name, read, how in held_out),
        num_steps=num_training_steps(config.trainer, loader, data.train_batch_size),
        num_filtered=num_filtered + sum(read.num_filtered for _, read, _ in held_out),
    )


def num_training_steps(trainer: TrainerConfig, loader: BatchLoader, batch_size: int) -> int:
    """The rollout steps of a run over the prompts of `loader`; `batch_size`: prompts of a step."""
    return trainer.total_training_steps or trainer.total_epochs * steps_of_epoch(loader, batch_size)


def steps_of_epoch(loader: BatchLoader, batch_size: int) -> int:
    return max(1, loader.num_rows // batch_size)


def check_names(config: TrainConfig) -> None:
    """ValueError for an estimator or a policy loss that neither megarl nor one of `plugins` has, with all names."""
    load_plugins(config.plugins)
    for registry, name in (
        (ESTIMATORS, config.algorithm.adv_estimator),
        (POLICY_LOSSES, config.actor_rollout_ref.actor.policy_loss.loss_mode),
    ):
        _ = registry[name]
