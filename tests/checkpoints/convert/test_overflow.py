"""Values that another type does not hold are refused, and none that it does."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.tiny_model import make_tiny_model
from megarl.checkpoints.convert import convert
from megarl.checkpoints.convert.targets import narrow_into
from megarl.cli.main import main

NAME = "model.layers.1.mlp.up_proj.weight"


def with_value(folder: Path, value: float) -> str:
    """A model whose up projection has the value at one place."""
    make_tiny_model(folder, ["one two"], vocab_size=300, hidden_size=64)
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_value_beyond_float16_is_refused_with_its_tensor(tmp_path, to, capsys):
    model = with_value(tmp_path / "hf", -70_000.0)
    assert main(["convert", model, str(tmp_path / "out"), "--to", to, "--dtype", "float16"]) == 2
    assert (
        f"checkpoint {model}: {NAME} has values up to 70000, float16 holds none above 65504"
        in capsys.readouterr().err
    )
    assert os.listdir(tmp_path) == ["hf"]
    convert(model, str(tmp_path / "out"), to=to, dtype="bfloat16")


def test_what_rounds_to_the_largest_value_and_what_was_infinite_before_is_kept(tmp_path):
    model = with_value(tmp_path / "hf", 65_519.0)
    convert(model, str(tmp_path / "out"), to="hf", dtype="float16")
    assert load_file(tmp_path / "out" / "model.safetensors")[NAME][3, 5] == 65_504
    target = torch.zeros(3, dtype=torch.float16)
    narrow_into(target, torch.tensor([torch.inf, torch.nan, 2.0]), "here", "w")
    assert target[0].isinf() and target[1].isnan() and target[2] == 2
    with pytest.raises(ValueError, match=r"here: w has values up to 3.4e\+38, bfloat16 holds none above"):
        narrow_into(target.bfloat16(), torch.tensor([0.0, 3.4e38, 1.0]), "here", "w")
