"""What SGLang answers at the end of an update, where a rank's weights are no longer those that it took."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megarl.weight_sync import after_update
from megarl.weight_sync.receiver import RECEIVER


@dataclass
class Answer:
    success: bool
    message: str


@pytest.fixture
def others(monkeypatch):
    """What another rank finds."""
    found = {"problem": None}
    monkeypatch.setattr(after_update, "every_rank", lambda mine, group: [mine, found])
    return found


def updater(problem):
    model = torch.nn.Module()
    setattr(model, RECEIVER, SimpleNamespace(verify_again=lambda: problem))
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return SimpleNamespace(tp_worker=worker, tp_cpu_group=None)


def test_an_update_that_changed_nothing_is_answered_as_it_was(others):
    answer = Answer(True, "Success")
    assert after_update.verified(answer, updater(None), None) is answer


def test_any_rank_that_finds_other_weights_makes_it_a_refusal(others):
    others["problem"] = "w has changed"
    found = after_update.verified(Answer(True, "Success"), updater(None), None)
    assert found == Answer(False, "w has changed (TP rank 1)")
    refused = Answer(False, "no session")
    assert after_update.verified(refused, updater("v has changed"), None) is refused
