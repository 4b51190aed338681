"""The keys of `megarl dpo`."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.
# ruff: noqa: RUF009

from dataclasses import dataclass

from megarl.config.options import option, section
from megarl.config.tuning_sections import TuningConfig, TuningDataConfig, TuningTrainerConfig

DPO_LOSSES = ("sigmoid", "ipo")


@dataclass(frozen=True, kw_only=True)
class DPODataConfig(TuningDataConfig):
    """Preferences, as those of `megarl rm`; learnt from are the last messages, the assistant's, of the compared chats."""

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


@dataclass(frozen=True, kw_only=True)
class DPOLossConfig:
    """The loss."""

    beta: float = option(
        "How dear it is to leave the reference, which is the model before the run.",
        0.1,
        gt=0,
        formula="-log sigmoid(beta h), h = log pi/pi_ref(better) - log pi/pi_ref(worse)",
    )
    loss_type: str = option(
        "sigmoid: DPO (arXiv:2305.18290, equation 7); ipo: (h - 1 / (2 beta))^2 (arXiv:2310.12036, equation 17).",
        "sigmoid",
        choices=DPO_LOSSES,
    )
    label_smoothing: float = option(
        "sigmoid: the part of the labels that is taken for wrong.", 0.0, ge=0, lt=0.5
    )


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
