"""Rows and token ids of prompts for tests, and the place of their real inputs, which is outside of a checkout."""

from pathlib import Path
from typing import Any

import pytest

from megarl.data.tokenizer import encode_texts, render_text

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def shared_data(name: str) -> Path:
    """Folder of a real input, or a skipped test where it is not there."""
    folder = SHARED_DATA / name
    if not folder.is_dir():
        pytest.skip(f"real data is not on this machine: {folder} does not exist")
    return folder


def prompt_row(text: str = "Tom has 3 pens.", truth: str = "7", **changes: Any) -> dict[str, Any]:
    """A row of a prompt file, with other columns or values as given."""
    row = {
        "data_source": "megarl/arithmetic",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": 4, "answer": "#### 7"},
    }
    return {**row, **changes}


def render_prompt(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Token ids of a prompt: the messages by the chat template, then the assistant's turn opened."""
    return encode_texts(tokenizer, [render_text(tokenizer, messages, add_generation_prompt=True)])[0]
