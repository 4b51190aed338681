"""The keys of `megarl sft`."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.
# ruff: noqa: RUF009

from dataclasses import dataclass

from megarl.config.options import option, section
from megarl.config.tuning_sections import TuningConfig, TuningDataConfig


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
