"""Where the real inputs for tests lie: beside a developer's checkout, not in it."""

from pathlib import Path

import pytest

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def shared_data(name: str) -> Path:
    """Folder of a real input, or a skipped test where it is not there."""
    folder = SHARED_DATA / name
    if not folder.is_dir():
        pytest.skip(f"real data is not on this machine: {folder} does not exist")
    return folder
