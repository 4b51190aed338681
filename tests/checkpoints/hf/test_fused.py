"""gpt-oss's checkpoints: experts of a layer in one tensor, and their published form in MXFP4."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.checkpoints.hf.export import ExportPlan, write_hf_checkpoint
from megarl.checkpoints.hf.load import HFReader, check_hf_weights
from megarl.layout import Box
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from tests.weight_sync.shards import load_all

LAYOUTS = {"one": ParallelLayout(world=1), "tp2ep4": ParallelLayout(world=4, tp=2, ep=4)}


@pytest.fixture(scope="module")
def published(tmp_path_factory, tiny_model) -> tuple[Path, Path]:
    """A folder whose experts are in MXFP4, and a folder with the values that transformers makes of them. Widths of 64: two scales a row."""
    model = tiny_model("gpt_oss", fields={"hidden_size": 64, "intermediate_size": 64})
    folder, plain = (tmp_path_factory.mktemp("mxfp4") / name for name in ("packed", "plain"))
    for copy in (folder, plain):
        shutil.copytree(model.folder, copy)
    generator = torch.Generator().manual_seed(3)
    packed, values = {}, {}
    for name, tensor in load_file(model.folder / "model.safetensors").items():
        packed[name] = values[name] = tensor.to(torch.bfloat16)
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        del packed[name]
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(115, 125, shape, generator=generator, dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    for to, tensors in ((folder, packed), (plain, values)):
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    return folder, plain


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mxfp4_is_read_as_transformers_reads_it(published, layout):
    folder = published[0]
    check_hf_weights(str(folder), read_model_config(str(folder)))
    packed, values = (load_all(path, LAYOUTS[layout]) for path in published)
    for found, expected in zip(packed, values, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_slices_begin_anywhere_in_a_group_of_values(published):
    folder, plain = published
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    with HFReader(str(folder)) as packed, HFReader(str(plain)) as values:
        assert packed.dtype(name) == torch.bfloat16 and packed.shape(name) == (64, 64)
        for box in (Box((3, 5), (7, 20)), Box((0, 31), (64, 2)), Box((63, 60), (1, 4))):
            assert torch.equal(packed.read(name, box), values.read(name, box))


def test_export_of_mxfp4_is_bfloat16_in_files_of_whole_layers(published, tmp_path):
    """A file has all experts of a tensor, even where they exceed the allowed size of a file."""
    folder, plain = published
    plan = ExportPlan(read_model_config(str(folder)), LAYOUTS["one"], torch.bfloat16, shard_bytes=20_000)
    (rank,) = load_all(folder, LAYOUTS["one"])
    write_hf_checkpoint(str(tmp_path / "out"), str(folder), plan, lambda shard: [plan.pack(shard, 0, rank)])
    written: dict[str, torch.Tensor] = {}
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    for file in files:
        written |= load_file(file)
    expected = load_file(plain / "model.safetensors")
    assert len(files) > 4 and written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_mxfp4_without_scales_is_refused(published, tmp_path):
    folder = shutil.copytree(published[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    lost = "model.layers.2.mlp.experts.down_proj_scales"
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"down_proj_blocks .* should be MXFP4's .* found none"):
        check_hf_weights(str(folder), read_model_config(str(folder)))
