"""Rows of prompts for tests, and where their real inputs lie: beside a developer's checkout, not in it."""

from pathlib import Path
from typing import Any

import pytest

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
