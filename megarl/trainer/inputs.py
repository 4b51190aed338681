"""What a run reads before it starts anything: data, tokenizer, model facts, reward. Errors come early and cheap."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from megarl.config import CustomRewardConfig, TrainConfig, check_models
from megarl.data.prompts import PromptDataset, PromptLoader
from megarl.data.tokenizer import load_tokenizer
from megarl.hybrid_engine import check_hf_weights
from megarl.models import ModelConfig, read_model_config
from megarl.rewards.custom import load_reward_function
from megarl.rewards.registry import RewardFunction, reward_functions


@dataclass(frozen=True)
class TrainInputs:
    """`num_steps` counts rollout steps of the run; `reward` is None where data sources have their rules.

    `num_filtered` prompts, of training and validation, were left out as too long.
    """

    tokenizer: PreTrainedTokenizerBase
    model: ModelConfig
    loader: PromptLoader
    validation: pa.Table | None
    reward: RewardFunction | None
    num_steps: int
    num_filtered: int


def load_train_inputs(config: TrainConfig) -> TrainInputs:
    """Read everything that `megarl train` needs.

    Raises:
        ValueError: names the key, file or row that is wrong.
    """
    data, model_path = config.data, config.actor_rollout_ref.model
    model = read_model_config(model_path.path)
    critic = read_model_config(config.critic.model.path) if config.critic is not None else None
    check_models(config, model, critic)
    check_hf_weights(model_path.path, model, mtp=model_path.mtp == "keep")
    if critic is not None:
        check_hf_weights(config.critic.model.path, critic, "value")
    tokenizer = load_tokenizer(model_path.tokenizer_path, model_path.trust_remote_code)
    reward = load_reward(config.custom_reward_function)

    def dataset(files: str | tuple[str, ...]) -> PromptDataset:
        read = PromptDataset(
            [files] if isinstance(files, str) else list(files),
            tokenizer,
            max_prompt_length=data.max_prompt_length,
            prompt_key=data.prompt_key,
            truncation=data.truncation,
            filter_overlong_prompts=data.filter_overlong_prompts,
        )
        reward_functions(read.table["data_source"].to_pylist(), reward)
        return read

    training = dataset(data.train_files)
    loader = PromptLoader(training, data.train_batch_size, data.shuffle, data.seed)
    num_steps = config.trainer.total_training_steps or config.trainer.total_epochs * len(loader)
    validation = dataset(data.val_files) if data.val_files is not None else None
    return TrainInputs(
        tokenizer=tokenizer,
        model=model,
        loader=loader,
        validation=None if validation is None else validation.table,
        reward=reward,
        num_steps=num_steps,
        num_filtered=training.num_filtered + (0 if validation is None else validation.num_filtered),
    )


def load_reward(config: CustomRewardConfig) -> RewardFunction | None:
    """The user's reward function, or None where each data source has its rule."""
    if config.path is None:
        return None
    return load_reward_function(config.path, config.name)
