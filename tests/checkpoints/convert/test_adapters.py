"""Adapters in Megatron's distributed checkpoints: saved in one layout, loaded in another, converted."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_model import make_tiny_model
from megarl.checkpoints.convert import compare, convert
from megarl.checkpoints.dcp import DCPReader, DCPWriter
from megarl.checkpoints.hf.adapters import (
    AdapterExport,
    adapter_layout,
    adapter_tensors,
    load_adapters,
    write_adapter_config,
    write_peft_adapter,
)
from megarl.checkpoints.hf.export import Bundle
from megarl.checkpoints.hf.load import load_hf_weights
from megarl.cli.main import main
from megarl.config.schema.models import LoraConfig
from megarl.layout import Box
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import local_parameters
from megarl.megatron.checkpoint.checkpoint import fill
from megarl.megatron.checkpoint.places import Item, adapter_places, model_places, weight_items
from megarl.megatron.lora.lora import attach_adapters
from megarl.models import read_model_config
from megarl.models.lora import IN_CHECKPOINTS, logical_adapters
from megarl.models.table import VALUE_HEAD
from tests.checkpoints.convert import megatron
from tests.checkpoints.hf.peft_folders import PREFIX, write_random
from tests.ranks import RankPool


def _items(rank: int, chunks: list[Any], model: str, layout: ParallelLayout, lora: LoraConfig) -> list[Item]:
    """The rank's weights, and the adapters that are attached to them."""
    config = read_model_config(model)
    items = weight_items(model_places(chunks, config.vocab_size), local_parameters(chunks))
    attach_adapters(chunks, config, layout, lora)
    places = adapter_places(adapter_layout(config, layout, lora).pieces(rank), logical_adapters(config, lora))
    return items + weight_items(places, local_parameters(chunks))


def _parts(
    rank: int, world: int, sizes: dict[str, Any], model: str, adapter: str, lora: LoraConfig
) -> list[Item]:
    """A rank's part of a model and of adapters in PEFT's format."""
    layout, config = ParallelLayout(world=world, **sizes), read_model_config(model)
    chunks = megatron.build(rank, world, sizes, model)
    load_hf_weights(model, config, layout, rank, local_parameters(chunks))
    items = _items(rank, chunks, model, layout, lora)
    load_adapters(adapter, config, lora, layout, rank, local_parameters(chunks))
    return [item._replace(tensor=item.tensor.detach().clone()) for item in items]


def _save(
    ranks: RankPool,
    world: int,
    sizes: dict[str, Any],
    model: str,
    adapter: str,
    lora: LoraConfig,
    folder: str,
) -> None:
    """Write a checkpoint of the model and the adapters."""
    parts = {}
    for items in ranks.run(_parts, sizes, model, adapter, lora, world=world):
        parts |= {(item.key, item.box): item for item in items}
    os.makedirs(folder)
    writer = DCPWriter(Path(folder))
    writer.write_file(
        (item.key, item.shape, item.box, item.tensor.view(item.box.size)) for item in parts.values()
    )
    writer.finish()
    Path(folder, "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    write_adapter_config(Path(folder), read_model_config(model), lora, model)


def _load(
    rank: int, world: int, sizes: dict[str, Any], model: str, lora: LoraConfig, folder: str
) -> tuple[list[str], Bundle]:
    """Load a checkpoint into new adapters; returns the weights that differ from the model's, and the adapters packed."""
    layout, config = ParallelLayout(world=world, **sizes), read_model_config(model)
    chunks = megatron.build(rank, world, sizes, model)
    expected = {name: torch.full_like(tensor, torch.nan) for name, tensor in local_parameters(chunks).items()}
    load_hf_weights(model, config, layout, rank, expected)
    items = _items(rank, chunks, model, layout, lora)
    local = local_parameters(chunks)
    for name in local.keys() - expected.keys():
        local[name].data.fill_(torch.nan)
    fill(DCPReader(Path(folder)), items)
    different = [name for name, tensor in expected.items() if not torch.equal(local[name], tensor)]
    return different, AdapterExport(config, layout, lora, torch.float32).pack(0, rank, local)


@pytest.mark.parametrize(
    ("family", "lora", "saved", "loaded"),
    [
        (
            "qwen2",
            LoraConfig(rank=2, alpha=8, use_dora=True),
            (4, {"tp": 2, "sp": True, "pp": 2}),
            (2, {"pp": 2, "vpp": 2}),
        ),
        ("qwen3_moe", LoraConfig(rank=2), (4, {"tp": 2, "sp": True, "ep": 2, "etp": 2}), (4, {"ep": 4})),
        pytest.param(
            "deepseek_v3",
            LoraConfig(rank=2, expert_groups=4, shared_a=True),
            (4, {"pp": 2, "ep": 2}),
            (2, {"tp": 2, "sp": True}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["qwen2", "qwen3_moe", "deepseek_v3"],
)
def test_adapters_saved_in_one_layout_are_loaded_in_another(ranks, tmp_path, family, lora, saved, loaded):
    sizes = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    model = str(make_tiny_model(tmp_path / "hf", ["one two"], family=family, **sizes))
    adapter, folder = str(tmp_path / "adapter"), str(tmp_path / "saved")
    write_random(model, lora, adapter)
    _save(ranks, *saved, model, adapter, lora, folder)

    results = ranks.run(_load, loaded[1], model, lora, folder, world=loaded[0])
    assert [different for different, _ in results] == [[]] * loaded[0]
    plan = AdapterExport(
        read_model_config(model), ParallelLayout(world=loaded[0], **loaded[1]), lora, torch.float32
    )
    write_peft_adapter(str(tmp_path / "again"), model, plan, [bundle for _, bundle in results])
    assert compare(adapter, str(tmp_path / "again")).equal

    convert(folder, str(tmp_path / "converted"), to="peft", companions=model)
    assert compare(adapter, str(tmp_path / "converted")).equal
    done = convert(folder, str(tmp_path / "base"), companions=model)
    assert done.left_out[0] == "adapters (--to peft writes them)"
    assert compare(model, str(tmp_path / "base")).equal
    verified = compare(model, folder, companions=model)
    assert verified.equal and verified.not_compared == (f"adapters (--to peft writes them) of {folder}",)
    check_mistakes(tmp_path, folder, model)


def test_a_value_head_comes_with_its_adapters(tmp_path):
    """Else a reward model's adapters would be loaded with a head of random numbers."""
    sizes = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    model = str(make_tiny_model(tmp_path / "hf", ["one two"], family="qwen2", **sizes))
    config, lora, folder = read_model_config(model), LoraConfig(rank=2), tmp_path / "saved"
    shapes = adapter_tensors(config, lora, "value")
    expected = {name: torch.randn(shape) for name, shape in shapes.items()}
    keys = {name: "value_head.weight" if name == VALUE_HEAD else IN_CHECKPOINTS + name for name in expected}
    folder.mkdir()
    writer = DCPWriter(folder)
    writer.write_file(
        (keys[name], shapes[name], Box.whole(shapes[name]), tensor) for name, tensor in expected.items()
    )
    writer.finish()
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    write_adapter_config(folder, config, lora, model, "value")

    done = convert(str(folder), str(tmp_path / "converted"), to="peft", companions=model)
    assert done.num_tensors == len(expected)
    found = load_file(tmp_path / "converted" / "adapter_model.safetensors")
    assert found.keys() == {PREFIX + name for name in expected}
    assert all(torch.equal(found[PREFIX + name], tensor) for name, tensor in expected.items())


def check_mistakes(tmp_path: Path, folder: str, model: str) -> None:
    """Errors name what cannot be converted to adapters, and a refused conversion leaves no files."""
    out = str(tmp_path / "out")
    assert main(["convert", folder, out, "--to", "peft", "--hf", model, "--dtype", "bfloat16"]) == 0
    tensors = compare(str(tmp_path / "adapter"), out)
    assert tensors.num_equal == 0 and not tensors.only_in_a
    with pytest.raises(ValueError, match=r"has no adapters: --to peft takes those of a Megatron checkpoint"):
        convert(model, str(tmp_path / "no"), to="peft")
    with pytest.raises(ValueError, match=r"--merge makes a model of an adapter, --to peft takes"):
        convert(folder, str(tmp_path / "no"), to="peft", companions=model, adapter=out)
    Path(folder, "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"has adapters, but no adapter_config.json that says what they are"):
        convert(folder, str(tmp_path / "no"), to="peft", companions=model)
    assert not (tmp_path / "no").exists()
