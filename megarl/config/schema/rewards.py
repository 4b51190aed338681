"""Sections that say where scores come from."""

# Every default here is made by dataclasses.field, by `option` and `section`.
# ruff: noqa: RUF009

from dataclasses import dataclass
from typing import Any

from megarl.config.schema import option, optional_section, section
from megarl.config.schema.models import NO_OTHER_STRATEGY, MegatronConfig

# The rules of megarl.rewards.registry; a plugin may add others.
RULES = (
    "gsm8k",
    "gsm8k_flexible",
    "math",
    "math_dapo",
    "code",
    "multiple_choice",
    "exact_match",
    "search_r1",
    "llm_judge",
)

STEP_REWARDS = ("each", "min", "product", "last")


@dataclass(frozen=True, kw_only=True)
class CustomRewardConfig:
    """A reward function of the user's."""

    path: str | None = option(
        "A .py file; null: the rule that belongs to each row's data_source.", None, is_path=True
    )
    name: str = option("The function in it, plain or async.", "compute_score")
    reward_kwargs: dict[str, Any] | None = option("Further keyword arguments that it gets.", None)


@dataclass(frozen=True, kw_only=True)
class CodeRewardConfig:
    """The rule `code`: programs of the model, run against tests in a sandbox."""

    time_limit: float = option(
        "Seconds of processor time for a test, rounded up; of the clock it may take twice as long.", 5.0, gt=0
    )
    memory_mb: int = option("MiB of memory that a program may have.", 512, ge=64)
    isolation: str = option(
        "What keeps programs apart from this machine. namespaces: they see no file but Python's own, and no process. "
        "seccomp: the kernel refuses what they could harm with (writing files, sockets, processes), but files that this "
        "user may read can be read. auto: namespaces where the system allows them, else seccomp.",
        "auto",
        choices=("auto", "namespaces", "seccomp"),
    )


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """The rule `llm_judge`: a model behind an OpenAI-compatible API grades the response."""

    base_url: str | None = option("The API, for example http://localhost:30000/v1.", None)
    model: str | None = option("The model's name there.", None)
    api_key_env: str | None = option("The environment variable that holds the key; null: none is sent.", None)
    prompt: str = option(
        "What the judge is asked; {prompt}, {response} and {ground_truth} are replaced.",
        "Grade a response to a problem.\n\nProblem:\n{prompt}\n\nReference answer:\n{ground_truth}\n\nResponse:\n"
        "{response}\n\nThink briefly, then end with one line `Score: x`, where x is a number from 0 (wrong) to 1 (right).",
    )
    pattern: str = option(
        "A regular expression; the first group of its last match in the judge's answer is the score.",
        r"(?i)score(?:\W*[^\w.-])?(-?\d*\.?\d+)",
    )
    max_score: float = option("The score is divided by this.", 1.0, gt=0)
    temperature: float = option("Of the judge's sampling.", 0.0, ge=0)
    max_tokens: int = option("Most tokens of its answer.", 512, ge=1)
    timeout: float = option("Seconds for one request.", 60.0, gt=0)
    num_retries: int = option(
        "Further attempts after no connection, no answer in time, status 408, 409, 429 or 5xx; the n-th waits 2^(n-1) s, "
        "or as long as the server says.",
        3,
        ge=0,
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rule rewards, and the processes that they and a reward function of one's own run in."""

    rule: str | None = option(
        "The rule for all rows; null: the rule that belongs to each row's data_source.", None
    )
    gsm8k_rule_reward: bool = option("The same as rule=gsm8k.", False)
    timeout: float = option("Seconds for one sample; one that takes longer fails.", 120.0, gt=0)
    num_workers: int | None = option(
        "Processes that compute rewards; null: a quarter of the processor cores, from 2 to 16.", None, ge=1
    )
    max_concurrency: int = option(
        "Async reward functions (the judge is one) that run at a time, in all processes together.", 32, ge=1
    )
    math_time_limit: float = option(
        "Seconds of processor time for comparing two formulas (rules math and math_dapo); what takes longer is wrong.",
        5.0,
        gt=0,
    )
    code: CodeRewardConfig = section("The rule code.", CodeRewardConfig)
    judge: JudgeConfig = section("The rule llm_judge.", JudgeConfig)


@dataclass(frozen=True, kw_only=True)
class RewardModelPathConfig:
    """The reward model's weights."""

    path: str | None = option(
        "Folder of a Hugging Face model for sequence classification with one label (its weight score.weight), "
        "or its id on the Hub. Its scores are shifted and scaled as reward_normalization.json in it says, if it is there. With "
        "step_separator also one for token classification with two labels, as TRL's PRMTrainer writes it.",
        None,
        is_path=True,
    )
    input_tokenizer: str | None = option(
        "Folder of the policy's tokenizer, where the reward model has another one or another chat template: responses "
        "are decoded with the former, and the chat is rendered and tokenised anew with the tokenizer in path. "
        "null: it is given the policy's token ids.",
        None,
        is_path=True,
    )
    trust_remote_code: bool = option("Run Python code that comes with its tokenizer.", False)


@dataclass(frozen=True, kw_only=True)
class OverlongBufferConfig:
    """Soft punishment of long responses (DAPO, arXiv:2503.14476, equation 13); of training's, not of validation's."""

    enable: bool = option("Take a penalty off the scores of long responses.", False)
    len: int = option(
        "Last tokens of data.max_response_length, over which the penalty grows linearly from 0.", 1, ge=1
    )
    penalty_factor: float = option(
        "The penalty of a response of data.max_response_length tokens.",
        1.0,
        ge=0,
        formula="penalty_factor * max(0, tokens - (max_response_length - len)) / len",
    )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A model on Megatron that scores trajectories."""

    enable: bool = option("Score trajectories with the model.", False)
    strategy: str = option("What runs it.", "megatron", choices=("megatron",), refused=NO_OTHER_STRATEGY)
    model: RewardModelPathConfig = section("Its weights.", RewardModelPathConfig)
    weight: float = option(
        "Of the model's score.", 1.0, formula="score = weight * model + rule_weight * rule"
    )
    rule_weight: float = option(
        "Of the score by rules, or by the reward function of one's own; 0: these are not asked.", 0.0
    )
    step_separator: str | None = option(
        "Text that ends each step of a response, such as two line breaks: the model scores every step. null: it scores the text, at its end.",
        None,
    )
    step_reward: str = option(
        "With step_separator, what the scores of a response's steps become. each: rewards at the ends of their steps; the estimators add up "
        "what comes after a token. min (Math-Shepherd, arXiv:2312.08935), product (arXiv:2305.20050), last: the model's one score of the "
        "trajectory.",
        "each",
        choices=STEP_REWARDS,
    )
    micro_batch_size_per_gpu: int | None = option("Trajectories of a micro-batch.", None, ge=1)
    max_token_len_per_gpu: int | None = option(
        "Tokens of a micro-batch; null here and in the key before: as the actor's, and at least max_length.",
        None,
        ge=1,
    )
    max_length: int | None = option(
        "Tokens of a chat that the model reads, the end of a longer one is cut off; null: those of the longest trajectory.",
        None,
        ge=1,
    )
    megatron: MegatronConfig | None = optional_section("The layout; null: the actor's.")
    resource_pool: str | None = option("Where it lives; null: with the actor.", None)
    overlong_buffer: OverlongBufferConfig = section(
        "Punishment of long responses, with or without a model.", OverlongBufferConfig
    )
