"""Section `data`: prompts, their samplers, auxiliary texts, and validation sets with their own sampling."""

# Every default here is made by dataclasses.field, by `option` and `section`.
# ruff: noqa: RUF009

from dataclasses import dataclass, fields, replace
from typing import Any

from megarl.config.schema import option, optional_section, section
from megarl.config.schema.rollout import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class ValSetConfig:
    """One validation set; a key that is null is as in rollout.val_kwargs."""

    files: str | tuple[str, ...] = option(
        "Parquet or JSON lines files: a path, a glob, a URL that fsspec can open, or a list of them.",
        is_path=True,
    )
    max_samples: int | None = option(
        "The first so many rows of files; -1: all; null: data.val_max_samples (of an evaluation, data.max_samples).",
        None,
        ge=-1,
    )
    n: int | None = option("Responses a prompt; null: val_kwargs.n.", None, ge=1)
    temperature: float | None = option("0: greedy; null: that of val_kwargs.", None, ge=0)
    top_p: float | None = option(
        "Probability mass that is sampled from; null: that of val_kwargs.", None, gt=0, le=1
    )
    top_k: int | None = option(
        "Most probable tokens that are sampled from; -1: all; null: that of val_kwargs.", None, ge=-1
    )
    min_p: float | None = option("Null: that of val_kwargs.", None, ge=0, le=1)
    repetition_penalty: float | None = option("Null: that of val_kwargs.", None, gt=0, le=2)
    frequency_penalty: float | None = option("Null: that of val_kwargs.", None, ge=-2, le=2)
    presence_penalty: float | None = option("Null: that of val_kwargs.", None, ge=-2, le=2)
    pass_threshold: float | None = option("Score from which on an answer passes; null: val_kwargs'.", None)


def val_set_sampling(val_set: ValSetConfig, val_kwargs: SamplingConfig) -> SamplingConfig:
    """How a validation set is sampled: `val_kwargs`, where the set does not say otherwise."""
    own = {member.name: getattr(val_set, member.name) for member in fields(val_kwargs)}
    return replace(val_kwargs, **{name: value for name, value in own.items() if value is not None})


TRUNCATIONS = ("error", "left", "right", "middle")
REWARD_FN_KEY_HELP = (
    "Column of the data source, by which a reward rule is chosen. Rows may lack the column data_source where nothing is "
    "chosen by it: with reward.rule, custom_reward_function.path, or a reward model alone. They are then of the source unknown."
)
TOOLS_KEY_HELP = (
    "Column of a row's tools, a list of JSON schemas (or JSON text) that the chat template is given; null: rows have none. "
    "Parquet files may lack a column of the usual name, but not one that is named otherwise."
)
TEMPLATE_HELP = (
    "What the chat template is given besides the messages, for example enable_thinking: false, or tools: [...] for all "
    "rows. A row's own tools, and keywords in its column chat_template_kwargs, take their place."
)
ANSWER_KEY_HELP = (
    "Column of the ground truth, which rewards are given: a text, or what becomes JSON text. null: rows have none, and "
    "rewards are given an empty text. Rows may lack the column reward_model.ground_truth where a reward model alone scores."
)
SAMPLERS = ("curriculum", "random", "sequential")  # a plugin may register more


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """One of the data sets that training prompts are drawn from."""

    files: str | tuple[str, ...] = option("As data.train_files.", is_path=True)
    weight: float = option("Its share of the prompts, relative to the other weights.", gt=0)


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """The order in which an epoch goes through the training prompts."""

    name: str | None = option(
        "random: a new order each epoch; sequential: as in the files; curriculum: sorted by `key`; or what a plugin "
        "registers by this name; null: random with data.shuffle, else sequential.",
        None,
    )
    key: str | None = option(
        "curriculum: the number that is sorted by, smallest first: a key of extra_info, such as extra_info.difficulty, "
        "or prompt_length (tokens). Prompts of equal number come in random order.",
        None,
    )
    descending: bool = option("curriculum: largest first.", False)
    warm_fraction: float = option(
        "curriculum: such a part of each epoch's prompts comes sorted, the others after it in random order.",
        1.0,
        gt=0,
        le=1,
    )
    options: dict[str, Any] | None = option("What a sampler of a plugin reads.", None)


@dataclass(frozen=True, kw_only=True)
class PtxConfig:
    """Texts that the policy goes on learning while it is trained (actor_rollout_ref.actor.ptx_coef)."""

    files: str | tuple[str, ...] = option("As data.train_files of `megarl sft`.", is_path=True)
    batch_size: int = option("Examples beside each mini-batch of trajectories.", ge=1)
    max_length: int = option("Tokens of an example.", ge=1)
    truncation: str = option(
        "What happens to longer ones: refused, cut at their end, or (plain text) split into pieces.",
        "error",
        choices=("error", "right", "split"),
    )
    text_key: str | None = option("Column of plain text, all of whose tokens are learnt; null: chats.", None)
    prompt_key: str = option("Column of the prompt of a chat (with response_key).", "prompt")
    response_key: str | None = option(
        "Column of its response; null: the assistant's messages in the column messages.", None
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts."""

    train_files: str | tuple[str, ...] | None = option(
        "Parquet or JSON lines (.jsonl, .json) files: a path, a glob or a URL that fsspec can open (s3://, gs://, hf://, "
        "https://, ...), or a list of them. Required, or mixture.",
        None,
        is_path=True,
    )
    mixture: dict[str, MixtureConfig] | None = option(
        "Several data sets by name instead of train_files. Every sequence of prompts has of each its share by weight to "
        "less than two prompts; each data set goes through epochs of its own. An epoch of the run is as many prompts as "
        "all of them have rows.",
        None,
        formula="share of i = weight_i / sum of weights",
    )
    val_files: str | tuple[str, ...] | None = option(
        "The same for validation; null: no validation.", None, is_path=True
    )
    train_max_samples: int = option("The first so many rows of train_files; -1: all.", -1, ge=-1)
    val_max_samples: int = option(
        "The first so many rows of val_files, and of each of val_sets; -1: all.", -1, ge=-1
    )
    streaming: bool = option(
        "Read, check and tokenise training prompts when they are needed, with stream_window_rows of them in memory; false: "
        "all before the run. A wrong row then ends the run when it is met, and prompts that are filtered out make an "
        "epoch shorter than the number of steps that is planned for it.",
        False,
    )
    stream_window_rows: int = option(
        "streaming: rows that are in memory, and that are shuffled among each other. Which rows come together is new each "
        "epoch. Parquet files whose row groups have no more than a quarter as many rows are read fastest.",
        8192,
        ge=1,
    )
    sampler: SamplerConfig = section("The order of the training prompts.", SamplerConfig)
    tokenizer: str | None = option(
        "Another name of actor_rollout_ref.model.tokenizer_path; null: as that says.", None, is_path=True
    )
    prompt_key: str = option("Column of the prompt: chat messages, or a text (the user's message).", "prompt")
    ref_prompt_key: str | None = option(
        "Column of the prompt after which the reference judges responses, where it is told more than the policy, such as a solution; of at "
        "most max_prompt_length tokens, too; null: the policy's prompt.",
        None,
    )
    teacher_key: str | None = option(
        "actor_rollout_ref.teachers: column whose value names the teacher of a row (one of its sources); null: the data source (reward_fn_key).",
        None,
    )
    given_response_key: str | None = option(
        "Column of responses that are given: a text or the assistant's message, or several texts. Some prompts (on_policy_share) are not answered by "
        "the policy; it learns from these responses by the divergence from the reference alone. null: it answers all prompts.",
        None,
    )
    on_policy_share: float = option(
        "given_response_key: the probability with which the policy answers a prompt itself (GKD's lambda, arXiv:2306.13649; TRL's lmbda).",
        0.5,
        ge=0,
        le=1,
        formula="share E[D of the policy's own responses] + (1 - share) E[D of given ones]",
    )
    reward_fn_key: str = option(REWARD_FN_KEY_HELP, "data_source")
    answer_key: str | None = option(ANSWER_KEY_HELP, "reward_model.ground_truth")
    tools_key: str | None = option(TOOLS_KEY_HELP, "tools")
    apply_chat_template_kwargs: dict[str, Any] | None = option(TEMPLATE_HELP, None)
    return_raw_input_ids: bool = option(
        "Keep the chat messages beside the token ids (column messages of trajectories): what a reward model with another tokenizer is given.",
        False,
    )
    ptx: PtxConfig | None = optional_section(
        "Texts that the policy goes on learning, in a new order each epoch; with actor_rollout_ref.actor.ptx_coef."
    )
    train_batch_size: int = option("Prompts a step.", ge=1)
    gen_batch_size: int | None = option(
        "algorithm.filter_groups: prompts that are generated for at a time; null: train_batch_size.",
        None,
        ge=1,
    )
    val_sets: dict[str, ValSetConfig] | None = option(
        "More validation sets by name, each with its own sampling; their metrics are val/<name>/...", None
    )
    val_batch_size: int | None = option("Prompts that validation generates at a time; null: all.", None, ge=1)
    max_prompt_length: int = option("Tokens of a prompt, chat template included.", ge=1)
    max_response_length: int = option("Most tokens of a response.", ge=1)
    filter_overlong_prompts: bool = option("Leave prompts over max_prompt_length out.", False)
    truncation: str = option("What happens to those that are not left out.", "error", choices=TRUNCATIONS)
    shuffle: bool = option("A new order each epoch; sampler.name, where it is given, decides instead.", True)
    seed: int = option("Of that order.", 1, ge=0)
