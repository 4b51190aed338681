"""`megarl doctor model`, and what megarl reports before a run about a model of an unknown type."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.cli.main import main
from megarl.doctor.computation import check_computation
from megarl.models import read_model_config
from tests.fixtures.tiny_models import as_type


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", ["two words"], hidden_size=64, num_layers=2, family="llama")


@pytest.fixture
def said(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], tuple[int, str]]:
    """Exit code and output of the command, in one line."""
    monkeypatch.setenv("COLUMNS", "400")

    def run(folder: Path) -> tuple[int, str]:
        code = main(["doctor", "model", str(folder)])
        return code, " ".join(capsys.readouterr().out.split())

    return run


def test_a_model_that_can_be_trained(said: Callable[[Path], tuple[int, str]], llama: Path) -> None:
    code, text = said(llama)
    assert code == 0 and "0 failures" in text
    assert "llama, 2 layers of 64" in text and "21 tensors, those of the config" in text


def test_a_type_without_a_family_that_computes_the_same(
    said: Callable[[Path], tuple[int, str]], llama: Path
) -> None:
    code, text = said(as_type(llama, "mistral", "MistralForCausalLM"))
    assert code == 0
    assert "mistral is read as Llama's architecture; small models of both have the same logits" in text


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}, "type 'longrope' is not supported"),
        ("num_hidden_layers", 3, "model.layers.2.self_attn.q_proj.weight is missing"),
        ("model_type", "granite", "'granite' is not supported"),
        ("model_type", "unheard_of", "does not know it, so that nothing tells what it computes"),
    ],
)
def test_the_field_or_tensor_by_which_it_cannot_be_trained(
    said: Callable[[Path], tuple[int, str]], llama: Path, field: str, value: object, told: str
) -> None:
    file = llama / "config.json"
    more = {"residual_multiplier": 0.2} if value == "granite" else {}
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value, **more}))
    code, text = said(llama)
    assert code == 1 and told in text and "1 failures" in text


def test_a_folder_without_a_tokenizer_or_without_anything(
    said: Callable[[Path], tuple[int, str]], llama: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (llama / name).unlink()
    code, text = said(llama)
    assert code == 1 and "holds no tokenizer" in text
    assert said(tmp_path / "nothing")[0] == 1
    assert "is not a folder" in said(tmp_path / "nothing")[1]


def test_one_folder_is_asked_for(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "model"]) == 2
    assert "megarl doctor model takes one folder, found 0" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_same_fields_and_weights_may_compute_something_else(tmp_path: Path, family: str) -> None:
    """Helium has Llama's fields and weights but rotates neighbouring dimensions; Mistral has no biases, whatever the files have."""
    folder = make_tiny_model(tmp_path / "model", ["two words"], hidden_size=64, num_layers=2, family=family)
    kind, told = (
        ("helium", "computes something else")
        if family == "llama"
        else ("mistral", "does not have the folder's")
    )
    config = read_model_config(str(as_type(folder, kind, "")))
    with pytest.raises(ValueError, match=told):
        check_computation(config)
