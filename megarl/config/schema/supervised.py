"""Sections and commands of supervised training, which fits one Megatron model to examples: SFT, reward models, DPO."""

# Every default here is made by dataclasses.field, by `option` and `section`.
# ruff: noqa: RUF009

from dataclasses import dataclass
from typing import Any

from megarl.config.schema import option, section
from megarl.config.schema.data import TEMPLATE_HELP, TOOLS_KEY_HELP
from megarl.config.schema.models import MegatronConfig, OptimConfig, TrainedModelConfig
from megarl.config.schema.run import DEFAULT_LOGGERS, LOGGER_HELP, LOGGERS, RunConfig, TimeoutConfig


@dataclass(frozen=True, kw_only=True)
class _TuningTrainerKeys(RunConfig):
    experiment_name: str = option("Second folder of the default run folder.", "sft")
    total_epochs: int = option("Passes over the data.", 1, ge=1)
    test_freq: int = option("Validate every so many steps, and after the last; -1: never.", -1, ge=-1)
    save_best: bool = option(
        "The model of the lowest val/loss is written into <run folder>/best/hf, whole or not at all, whenever a validation "
        "is the best so far; best/best.json beside it says of which step it is, and its metrics.",
        False,
    )
    early_stop_patience: int | None = option(
        "The run ends after so many validations in a row without a lower val/loss; null: never.", None, ge=1
    )
    early_stop_min_delta: float = option(
        "How much lower than the lowest one so far it must be for that.", 0.0, ge=0
    )
    logger: tuple[str, ...] = option(LOGGER_HELP, DEFAULT_LOGGERS, choices=LOGGERS)
    seed: int = option("Of everything that has no seed of its own.", 1, ge=0)
    ray_address: str | None = option("A running Ray cluster; null: one is started.", None)


@dataclass(frozen=True, kw_only=True)
class TuningTrainerConfig(TimeoutConfig, _TuningTrainerKeys):
    """The run."""


@dataclass(frozen=True, kw_only=True)
class TuningDataConfig:
    """Where examples come from, and how many a step has."""

    train_files: str | tuple[str, ...] = option(
        "Parquet or JSON lines files: a path, a glob, a URL that fsspec can open, or a list of them.",
        is_path=True,
    )
    val_files: str | tuple[str, ...] | None = option(
        "The same for validation; null: no validation.", None, is_path=True
    )
    max_length: int = option("Tokens of an example's text, chat template included.", ge=1)
    train_batch_size: int = option("Examples a step.", ge=1)
    tools_key: str | None = option(TOOLS_KEY_HELP, "tools")
    apply_chat_template_kwargs: dict[str, Any] | None = option(TEMPLATE_HELP, None)
    shuffle: bool = option("A new order each epoch.", True)
    seed: int = option("Of that order.", 1, ge=0)


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """A model that is fitted to examples, and the run that does it."""

    data: TuningDataConfig = section("Examples.")
    model: TrainedModelConfig = section("The model that is trained.")
    optim: OptimConfig = section("The optimizer.")
    megatron: MegatronConfig = section("The layout.", MegatronConfig)
    max_token_len_per_gpu: int | None = option(
        "Tokens of a micro-batch; null: as many as the memory of GPUs holds by the formulas of `megarl plan memory`, elsewhere "
        "4 of the longest texts (of what is compared, pairs of them), up to 16384 tokens.",
        None,
        ge=1,
    )
    trainer: TuningTrainerConfig = section("The run.", TuningTrainerConfig)


@dataclass(frozen=True, kw_only=True)
class SFTDataConfig(TuningDataConfig):
    """Examples."""

    truncation: str = option(
        "What happens to longer ones: refused, cut at their end, or (plain text) split into pieces of max_length tokens, "
        "each of which begins with the last token of the one before, so that every token is learnt once.",
        "error",
        choices=("error", "right", "split"),
    )
    prompt_key: str = option("Column of the prompt (with response_key).", "prompt")
    response_key: str | None = option(
        "Column of the response; null: the assistant's messages in the column messages.", None
    )
    text_key: str | None = option(
        "Column of plain text instead of chats: all its tokens are learnt, and no chat template is used.",
        None,
    )
    append_eos: bool = option(
        "text_key: the tokenizer's end token is put after each text, where the text does not end with it.",
        True,
    )


@dataclass(frozen=True, kw_only=True)
class SFTConfig(TuningConfig):
    """`megarl sft`: supervised fine-tuning."""

    data: SFTDataConfig = section("Examples.")


HEAD_INITS = ("zeros", "normal")
NORMALIZATIONS = ("none", "mean", "mean_std")


@dataclass(frozen=True, kw_only=True)
class RMModelConfig(TrainedModelConfig):
    """The model that the reward model begins as: a policy, or a reward model."""

    head_init: str = option(
        "The scalar head's first weights, where the folder has none (score.weight): zeros, with which every reward begins "
        "as 0, or normal, of standard deviation 0.02.",
        "zeros",
        choices=HEAD_INITS,
    )


@dataclass(frozen=True, kw_only=True)
class RMDataConfig(TuningDataConfig):
    """Preferences: a row has a prompt and either two responses, one of them preferred, or several that are ranked."""

    truncation: str = option(
        "What happens to longer ones: refused, cut at their end (as reward_model.max_length does in PPO), or the whole row "
        "is left out.",
        "error",
        choices=("error", "right", "drop"),
    )
    prompt_key: str = option(
        "Column of the prompt: chat messages, or a text (the user's message). Rows without it have whole chats as responses.",
        "prompt",
    )
    chosen_key: str = option(
        "Column of the preferred response: a text, or messages (those that follow the prompt, or the whole chat).",
        "chosen",
    )
    rejected_key: str = option("Column of the other one.", "rejected")
    margin_key: str | None = option(
        "Column of a number by which the reward of the better response of each pair of the row should at least be greater "
        "(Llama 2, arXiv:2307.09288, eq. 2); null: 0.",
        None,
        formula="-log sigmoid(r_better - r_worse - margin)",
    )
    responses_key: str = option(
        "Column of several responses, a list of what chosen_key may have; a row with it needs no chosen and rejected.",
        "responses",
    )
    ranks_key: str = option("Column of their ranks, smaller is better; equal ones form no pair.", "ranks")
    scores_key: str = option("Column of their scores instead, greater is better.", "scores")
    end_at_eos: bool = option(
        "Texts end with the end token of their last message, as trajectories of a policy do; false: with all that the chat "
        "template writes after it, as for a reward model whose tokenizer is not the policy's (reward_model.model.input_tokenizer).",
        True,
    )
    normalize: str = option(
        "What is subtracted from rewards, and what they are divided by, so that those of reference answers have mean 0 "
        "(InstructGPT, arXiv:2203.02155, appendix C), with mean_std also standard deviation 1. It is written into "
        "reward_normalization.json of the exported folder, which PPO's reward model honours.",
        "mean",
        choices=NORMALIZATIONS,
        formula="(r - mean) / std",
    )
    normalize_files: str | tuple[str, ...] | None = option(
        "Files of the reference answers, with prompts as in train_files; null: the best answers of the training data.",
        None,
        is_path=True,
    )
    normalize_response_key: str | None = option(
        "Column of the answer in normalize_files; null: rows as in train_files, of which the best answers are taken.",
        None,
    )
    normalize_max_samples: int = option("The first so many of them; -1: all.", 1000, ge=-1)


@dataclass(frozen=True, kw_only=True)
class RMTrainerConfig(TuningTrainerConfig):
    """The run."""

    experiment_name: str = option("Second folder of the default run folder.", "rm")


@dataclass(frozen=True, kw_only=True)
class RMConfig(TuningConfig):
    """`megarl rm`: a reward model from preferences (Bradley-Terry, all pairs of a ranking in one forward pass)."""

    data: RMDataConfig = section("Preferences.")
    model: RMModelConfig = section("The model that is trained.")
    trainer: RMTrainerConfig = section("The run.", RMTrainerConfig)


DPO_LOSSES = ("sigmoid", "ipo", "simpo", "orpo", "kto")


@dataclass(frozen=True, kw_only=True)
class DPODataConfig(TuningDataConfig):
    """Preferences, as `megarl rm` reads them, or for kto responses with labels and pairs; the last messages, the assistant's, are learnt from."""

    truncation: str = option(
        "What happens to longer ones: refused, or the whole row is left out.",
        "error",
        choices=("error", "drop"),
    )
    prompt_key: str = option("As data.prompt_key of `megarl rm`.", "prompt")
    chosen_key: str = option("As data.chosen_key of `megarl rm`.", "chosen")
    rejected_key: str = option("Column of the other response.", "rejected")
    responses_key: str = option("As data.responses_key of `megarl rm`.", "responses")
    ranks_key: str = option("Column of their ranks, smaller is better; equal ones form no pair.", "ranks")
    scores_key: str = option("Column of their scores instead, greater is better.", "scores")
    response_key: str = option("kto: column of a row's one response, as chosen_key.", "completion")
    label_key: str = option("kto: column that says whether it is desirable, true or false.", "label")


@dataclass(frozen=True, kw_only=True)
class DPOLossConfig:
    """The loss."""

    beta: float = option(
        "sigmoid, ipo, kto: how strongly the policy is held to the reference, which is the model before the run; simpo: the scale of the difference; orpo: weight "
        "of the odds ratio beside the likelihood of the better response.",
        0.1,
        gt=0,
        formula="-log sigmoid(beta h), h = log pi/pi_ref(better) - log pi/pi_ref(worse)",
    )
    loss_type: str = option(
        "sigmoid: DPO (arXiv:2305.18290, equation 7); ipo: (h - 1 / (2 beta))^2 (arXiv:2310.12036, equation 17). Without a reference, of log-probs "
        "that are means over tokens: simpo (arXiv:2405.14734, whose betas are 2 to 10); orpo (arXiv:2403.07691). Of responses that are each desirable "
        "or not: kto (arXiv:2402.01306), which takes one more forward pass over a batch before each step.",
        "sigmoid",
        choices=DPO_LOSSES,
        formula="simpo: -log sigmoid(beta (m_better - m_worse) - gamma); orpo: -m_better - beta log sigmoid(o_better - o_worse), o = m - log(1 - exp m); "
        "kto: 1 - sigmoid(beta (r - z)) of desirable responses, 1 - sigmoid(beta (z - r)) of others, r = log pi/pi_ref, z = max(0, mean r of "
        "the batch's prompts with responses to other prompts)",
    )
    gamma: float = option("simpo: by how much the better response should lead.", 0.0, ge=0)
    label_smoothing: float = option(
        "sigmoid: the part of the labels that is taken for wrong.", 0.0, ge=0, lt=0.5
    )
    desirable_weight: float = option("kto: weight of the losses of desirable responses.", 1.0, gt=0)
    undesirable_weight: float = option("kto: of undesirable ones.", 1.0, gt=0)


@dataclass(frozen=True, kw_only=True)
class DPOTrainerConfig(TuningTrainerConfig):
    """The run."""

    experiment_name: str = option("Second folder of the default run folder.", "dpo")


@dataclass(frozen=True, kw_only=True)
class DPOConfig(TuningConfig):
    """`megarl dpo`: a policy from preferences, without a reward model and without rollouts."""

    data: DPODataConfig = section("Preferences.")
    dpo: DPOLossConfig = section("The loss.", DPOLossConfig)
    trainer: DPOTrainerConfig = section("The run.", DPOTrainerConfig)


def learns_rankings(config: TuningConfig) -> bool:
    """Whether an example is several texts that are compared with each other."""
    return isinstance(config, RMConfig) or (isinstance(config, DPOConfig) and config.dpo.loss_type != "kto")
