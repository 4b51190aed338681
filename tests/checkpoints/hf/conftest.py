"""A fixture for tests of adapters' folders."""

import pytest
from peft import PeftModel


@pytest.fixture(autouse=True)
def no_model_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep PEFT from writing a README.md next to adapters: it takes longer than the adapters themselves, and no test reads it."""
    monkeypatch.setattr(PeftModel, "create_or_update_model_card", lambda self, folder: None)
