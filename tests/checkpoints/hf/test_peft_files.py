"""Folders of adapters that are refused: what they ask for, what they lack, what differs from section `lora`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from tests.checkpoints.hf.peft_folders import load, write_random

LORA, DORA = LoraConfig(rank=4, alpha=12), LoraConfig(rank=4, alpha=12, use_dora=True)
ONE = ParallelLayout(world=1)


@pytest.fixture
def adapter(tmp_path, tiny_model) -> tuple[Path, Path]:
    """A folder of adapters, and the model that it is of."""
    model = tiny_model("llama").folder
    write_random(model, LORA, tmp_path / "a")
    return tmp_path / "a", model


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=8, alpha=12), r"adapter_config.json has r=4, lora.rank is 8"),
        (
            LoraConfig(rank=4),
            r"multiplied with 3 \(lora_alpha=12, use_rslora=False\), with 1 by lora.alpha=4",
        ),
        (LoraConfig(rank=4, alpha=12, use_rslora=True), r"with 3 .*with 6 by .*lora.use_rslora=True"),
        (DORA, r"use_dora=False, lora.use_dora is True"),
        (
            LoraConfig(rank=4, alpha=12, target_modules=("q_proj",)),
            r"left over: model.layers.0.mlp.down_proj",
        ),
        (
            LoraConfig(rank=4, alpha=12, exclude_modules=("q_proj",)),
            r"left over: model.layers.0.self_attn.q_proj.lora_A.weight, .* and 2 more",
        ),
    ],
    ids=["rank", "alpha", "rslora", "dora", "target_modules", "exclude_modules"],
)
def test_what_differs_from_the_section_is_named_with_both_values(adapter, lora, message):
    with pytest.raises(ValueError, match=message):
        load(*adapter, lora, ONE)


def change(folder: Path, **keys: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "IA3"}, r"adapter_config.json: peft_type 'IA3' is not supported"),
        ({"r": 0}, r"adapter_config.json: r must be a whole number from 1 on, found 0"),
        ({"r": True}, r"r must be a whole number from 1 on, found True"),
        ({"lora_alpha": float("nan")}, r"lora_alpha must be a number above 0, found nan"),
        ({"lora_alpha": -12}, r"lora_alpha must be a number above 0, found -12"),
        ({"lora_alpha": "12"}, r"lora_alpha must be a number above 0, found '12'"),
        ({"use_rslora": "no"}, r"use_rslora must be true or false, found 'no'"),
        ({"modules_to_save": "score"}, r"modules_to_save must be a list of texts, found 'score'"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern must be an object"),
        (
            {"rank_pattern": {"q_proj": -8}},
            r"rank_pattern: q_proj must be a whole number from 1 on, found -8",
        ),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern lacks q_proj"),
        ({"alpha_pattern": {"q_(proj": 8}}, r"alpha_pattern: 'q_\(proj' is no regular expression"),
        (
            {"bias": "all", "use_qalora": True},
            r"not supported: bias='all', use_qalora=True",
        ),
        ({"init_lora_weights": "pissa"}, r"not supported: init_lora_weights='pissa'"),
        ({"rank_pattern": {"q_proj": 8}}, r"has r=4, by rank_pattern up to 8, lora.rank is 4"),
        (
            {"rank_pattern": {"q_proj": 2}},
            r"q_proj.lora_A.weight has shape \(4, 32\), it should be \(2, 32\)",
        ),
        ({"modules_to_save": ["embed_tokens"]}, r"modules_to_save=\['embed_tokens'\]"),
        ({"a_new_kind": True}, r"not supported: a_new_kind=True"),
    ],
)
def test_keys_that_ask_for_more_are_refused(adapter, keys, message):
    change(adapter[0], **keys)
    with pytest.raises(ValueError, match=message):
        load(*adapter, LORA, ONE)


def test_files_that_are_missing_or_damaged_are_named(adapter):
    folder, model = adapter
    file = folder / "adapter_model.safetensors"
    content, tensors = file.read_bytes(), load_file(file)
    name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    short = name.removeprefix("base_model.model.")

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            load(folder, model, LORA, ONE)

    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    refused(f"missing: {short}")
    save_file({**tensors, name: tensors[name][1:].contiguous()}, file)
    refused(rf"{short} has shape \(63, 4\), it should be \(64, 4\)")
    save_file({**tensors, name: tensors[name].to(torch.int8)}, file)
    refused(f"{short} is of type I8")
    save_file({**tensors, "model.q_proj.lora_A.weight": tensors[name].clone()}, file)
    refused(r"names begin with 'base_model.model.' in PEFT's format, found model.q_proj.lora_A")
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, file)
    refused(rf"adapter '{folder}': {short} has values that are no finite numbers")
    file.write_bytes(content[:-100])
    refused(r"adapter_model.safetensors is no complete safetensors file")
    file.rename(folder / "adapter_model.bin")
    refused(r"has no adapter_model.safetensors; adapter_model.bin is not read")
    (folder / "adapter_config.json").write_text("{")
    refused(r"adapter_config.json is not JSON")
    (folder / "adapter_config.json").write_text('["LORA"]')
    refused(r"adapter_config.json should hold a JSON object, found list")
    (folder / "adapter_config.json").unlink()
    refused(r"is no folder of adapters in PEFT's format: it has no adapter_config.json")
