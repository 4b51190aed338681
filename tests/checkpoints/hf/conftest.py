"""What tests of adapters' folders share."""

import pytest
from peft import PeftModel


@pytest.fixture(autouse=True)
def no_model_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT writes a README.md beside adapters, which takes longer than these, and which nothing here reads."""
    monkeypatch.setattr(PeftModel, "create_or_update_model_card", lambda self, folder: None)
