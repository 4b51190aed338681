"""Section `data` of `megarl train`."""

# Every default here is made by dataclasses.field, inside of `option` and its kin.

from dataclasses import dataclass

from megarl.config.options import option

TRUNCATIONS = ("error", "left", "right", "middle")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts."""

    train_files: str | tuple[str, ...] = option("Parquet files: a path, a glob, or a list.", is_path=True)
    val_files: str | tuple[str, ...] | None = option(
        "The same for validation; null: no validation.", None, is_path=True
    )
    prompt_key: str = option("Column of the chat messages.", "prompt")
    train_batch_size: int = option("Prompts a step.", ge=1)
    val_batch_size: int | None = option("Prompts that validation generates at a time; null: all.", None, ge=1)
    max_prompt_length: int = option("Tokens of a prompt, chat template included.", ge=1)
    max_response_length: int = option("Most tokens of a response.", ge=1)
    filter_overlong_prompts: bool = option("Leave prompts over max_prompt_length out.", False)
    truncation: str = option("What happens to those that are not left out.", "error", choices=TRUNCATIONS)
    shuffle: bool = option("A new order each epoch.", True)
    seed: int = option("Of that order.", 1, ge=0)
