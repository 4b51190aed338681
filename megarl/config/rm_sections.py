"""The keys of `megarl rm`."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.
# ruff: noqa: RUF009

from dataclasses import dataclass

from megarl.config.options import option, section
from megarl.config.sections import TrainedModelConfig
from megarl.config.tuning_sections import TuningConfig, TuningDataConfig, TuningTrainerConfig

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
