"""Reading checkpoints: folders that are refused, value heads, float8, layers that are dropped."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from megarl.checkpoints.hf.load import HFReader, check_hf_weights, load_hf_weights
from megarl.layout import Box, make_plan
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.weight_sync.layouts import hf_layout, megatron_layout
from tests.weight_sync.shards import (
    PROJECTIONS,
    TinyModel,
    empty_shards,
    load_all,
    make_model,
    quantise,
    run_plan,
)

ONE = ParallelLayout(world=1)


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_critic_loads_from_a_language_model_and_keeps_its_own_head(tmp_path):
    make_model(tmp_path / "hf", tied=False)
    config, layout = read_model_config(str(tmp_path / "hf")), ParallelLayout(world=4, pp=4)
    ranks = empty_shards(megatron_layout(config, layout, "value"))
    head = ranks[3]["0:value_head.weight"].fill_(7.0)
    for rank, parameters in enumerate(ranks):
        load_hf_weights(str(tmp_path / "hf"), config, layout, rank, parameters, "value")
    assert (head == 7.0).all()
    rest = [t for r in ranks for n, t in r.items() if "value_head" not in n]
    assert not any(torch.isnan(t).any() for t in rest)


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path):
    folder = tmp_path / "hf"
    make_model(folder)
    config = read_model_config(str(folder))
    change_config(folder, intermediate_size=40)
    wrong = read_model_config(str(folder))
    ranks = empty_shards(megatron_layout(wrong, ONE))
    with pytest.raises(
        ValueError, match=r"mlp.gate_proj.weight has shape \(48, 32\), config.json makes it \(40, 32\)"
    ):
        load_hf_weights(str(folder), wrong, ONE, 0, ranks[0])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        load_hf_weights(str(folder), config, ONE, 0, ranks[0])


def test_every_missing_or_left_over_expert_is_named(tmp_path, tiny_model):
    folder = shutil.copytree(tiny_model("qwen3_moe").folder, tmp_path / "hf")

    def change(tensors):
        tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = tensors.pop(
            "model.layers.1.mlp.experts.7.up_proj.weight"
        )

    change_tensors(folder, change)
    with pytest.raises(
        ValueError, match=r"experts\.7\.up_proj\.weight is missing; .*experts\.8.* is not a tensor"
    ):
        check_hf_weights(str(folder), read_model_config(str(folder)))


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(world=1),
        ParallelLayout(world=4, tp=4, ep=2, etp=2),
        ParallelLayout(world=4, pp=2, ep=2, first_layers=1),
    ],
    ids=["one", "tp4ep2etp2", "pp2ep2"],
)
@pytest.mark.parametrize(
    ("family", "block"),
    [
        *(("deepseek_v3", block) for block in ((16, 16), (12, 20), (128, 128))),
        pytest.param("deepseek_v32", (16, 16), marks=pytest.mark.slow),
        ("deepseek_v32", (12, 20)),
        pytest.param("deepseek_v32", (128, 128), marks=pytest.mark.slow),
        ("minimax_m2", (16, 16)),
        pytest.param("minimax_m2", (128, 128), marks=pytest.mark.slow),
    ],
)
def test_float8_weights_are_read_as_what_they_stand_for(tmp_path, tiny_model, family, block, layout):
    """Three block sizes: no shard's edge cuts a block, most shards' edges cut blocks, and blocks are larger than tensors."""
    folder = shutil.copytree(tiny_model(family, dtype="bfloat16").folder, tmp_path / "hf")
    torch.manual_seed(0)
    means = quantise(folder, block)
    config = read_model_config(str(folder))
    assert config.fp8_block == block
    check_hf_weights(str(folder), config, mtp=True)
    ranks, written = load_all(folder, layout), empty_shards(hf_layout(config))
    run_plan(make_plan(megatron_layout(config, layout), hf_layout(config)), ranks, written)
    for name, values in written[0].items():
        assert torch.equal(values, means[name].float()), name
    zero = written[0]["model.layers.0.self_attn.o_proj.weight"][: block[0], : block[1]]
    assert (zero == 0).all()


COMPRESSED = {  # as in GLM-4.5-FP8
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                **{"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                **{"dynamic": False, "group_size": None, "observer": "minmax"},
            },
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
}


def compress(folder: Path) -> dict[str, torch.Tensor]:
    """Have compressed-tensors write a checkpoint's projections in float8 with a scale for each row; returns all weights as it decompresses them."""
    group = COMPRESSED["config_groups"]["group_0"]
    scheme = QuantizationScheme.model_validate({**group, "format": "float-quantized"})
    written, means = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(PROJECTIONS):
            written[name] = means[name] = tensor
            continue
        tensor[0] *= 50  # makes the scales differ
        scales = tensor.float().abs().amax(1, keepdim=True).div(448).to(tensor.dtype)
        compressed = FloatQuantizationCompressor.compress({"weight": tensor, "weight_scale": scales}, scheme)
        written[name], written[name + "_scale"] = compressed["weight"], compressed["weight_scale"]
        means[name] = FloatQuantizationCompressor.decompress(compressed, scheme)["weight"]
    assert written[name].dtype == torch.bfloat16 and torch.float8_e4m3fn in {
        t.dtype for t in written.values()
    }
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, quantization_config=COMPRESSED)
    return means


@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(world=1), ParallelLayout(world=4, tp=4, ep=2, etp=2)],
    ids=["one", "tp4ep2etp2"],
)
def test_float8_weights_with_a_scale_for_each_row_are_what_compressed_tensors_makes_of_them(
    tmp_path: Path, tiny_model: Callable[..., TinyModel], layout: ParallelLayout
) -> None:
    """A model of GLM-4.7's family in bfloat16: values are rounded once, as in the library."""
    folder = shutil.copytree(tiny_model("glm4_moe", dtype="bfloat16").folder, tmp_path / "hf")
    means, config = compress(folder), read_model_config(str(folder))
    assert config.scaled_channels and config.fp8_block is None
    check_hf_weights(str(folder), config, mtp=True)
    ranks, written = load_all(folder, layout), empty_shards(hf_layout(config))
    run_plan(make_plan(megatron_layout(config, layout), hf_layout(config)), ranks, written)
    for name, values in written[0].items():
        assert torch.equal(values.to(means[name].dtype), means[name]), name
    with HFReader(str(folder)) as reader:
        assert reader.dtype("model.layers.0.self_attn.o_proj.weight") == torch.bfloat16


def test_what_else_compressed_tensors_may_have_done_is_refused(
    tmp_path: Path, tiny_model: Callable[..., TinyModel]
) -> None:
    folder = shutil.copytree(tiny_model("glm4_moe", dtype="bfloat16").folder, tmp_path / "hf")
    compress(folder)
    group = COMPRESSED["config_groups"]["group_0"]
    for change, told in (
        ({"format": "pack-quantized"}, "format='pack-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: config field format="),
        ({"config_groups": {}}, "lacks num_bits, type, strategy"),
        *(
            (
                {"config_groups": {"group_0": {**group, "weights": {**group["weights"], key: value}}}},
                f"{key}={value!r}",
            )
            for key, value in (
                *(("strategy", "block"), ("num_bits", 4), ("type", "int")),
                *(("symmetric", False), ("dynamic", True)),
            )
        ),
    ):
        change_config(folder, quantization_config={**COMPRESSED, **change})
        with pytest.raises(ValueError, match=re.escape(told)):
            read_model_config(str(folder))
    change_config(folder, quantization_config=COMPRESSED)
    name = "model.layers.1.self_attn.o_proj.weight"
    change_tensors(folder, lambda tensors: tensors.pop(name + "_scale"))
    with pytest.raises(ValueError, match=rf"{name} is in float8, but {name}_scale is missing"):
        check_hf_weights(str(folder), read_model_config(str(folder)))


def test_float8_values_are_rounded_to_the_parameters_type_only_once(tmp_path, tiny_model):
    folder = shutil.copytree(tiny_model("qwen3").folder, tmp_path / "hf")
    means = quantise(folder, (16, 16))
    config = read_model_config(str(folder))
    parameters = {
        name: tensor.bfloat16() for name, tensor in empty_shards(megatron_layout(config, ONE))[0].items()
    }
    load_hf_weights(str(folder), config, ONE, 0, parameters)
    found = parameters["0:decoder.layers.2.mlp.linear_fc2.weight"]
    assert torch.equal(found, means["model.layers.2.mlp.down_proj.weight"].bfloat16())


def test_scales_that_are_missing_or_without_a_weight_are_named(tmp_path, tiny_model):
    folder = shutil.copytree(tiny_model("qwen3").folder, tmp_path / "hf")
    quantise(folder, (16, 16))
    config = read_model_config(str(folder))
    first, second = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1))

    def change(tensors):
        del tensors[first + "_scale_inv"]
        tensors[second + "_scale_inv"] = torch.ones(3, 3)
        tensors["model.norm.weight_scale_inv"] = torch.ones(1)

    change_tensors(folder, change)
    with pytest.raises(ValueError) as error:
        check_hf_weights(str(folder), config)
    assert f"{first} is in float8, but {first}_scale_inv is missing" in str(error.value)
    assert f"{second}_scale_inv has shape (3, 3), config.json makes it (2, 4)" in str(error.value)
    assert "model.norm.weight_scale_inv is there, but model.norm.weight is not in float8" in str(error.value)
    change_config(folder, quantization_config=None)
    with pytest.raises(ValueError, match=r"_scale_inv is there, but config\.json says of no quantisation"):
        check_hf_weights(str(folder), read_model_config(str(folder)))


@pytest.mark.parametrize(
    ("family", "projection"),
    [
        ("glm4_moe", "model.layers.4.eh_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("qwen3_5", "mtp.fc.weight"),
    ],
)
def test_prediction_layers_may_be_missing_unless_they_are_wanted(tmp_path, tiny_model, family, projection):
    folder = shutil.copytree(tiny_model(family).folder, tmp_path / "hf")
    config = read_model_config(str(folder))
    assert config.num_mtp_layers == 1
    check_hf_weights(str(folder), config, mtp=True)
    change_tensors(folder, lambda tensors: tensors.pop(projection))
    check_hf_weights(str(folder), config)
    with pytest.raises(ValueError, match=rf"{re.escape(projection)} is missing"):
        check_hf_weights(str(folder), config, mtp=True)


def test_what_prediction_layers_repeat_must_be_the_models_own(tmp_path, tiny_model):
    folder = shutil.copytree(tiny_model("deepseek_v3").folder, tmp_path / "hf")
    config, name = read_model_config(str(folder)), "model.layers.4.shared_head.head.weight"
    with HFReader(str(folder)) as reader:
        reader.check_mtp_copies(config)
    change_tensors(folder, lambda tensors: tensors[name][7, 3].add_(1))
    with HFReader(str(folder)) as reader:
        reader.check(config, "lm", mtp=True)
        with pytest.raises(ValueError, match=rf"{name} should be equal to lm_head\.weight, but is not"):
            reader.check_mtp_copies(config)
    check_hf_weights(str(folder), config, mtp=True)  # this check reads no values
    with pytest.raises(ValueError, match="should be equal to"):
        check_hf_weights(str(folder), config, mtp=True, copies=True)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with HFReader(str(folder)) as reader:
        reader.check(config, "lm", mtp=True)
        reader.check_mtp_copies(config)


def test_a_box_is_read_alone(tiny_model):
    model = tiny_model("qwen2")
    name = "model.layers.1.mlp.down_proj.weight"
    with HFReader(str(model.folder)) as reader:
        assert torch.equal(reader.read(name, Box((3, 5), (2, 7))), model.state[name][3:5, 5:12])
        assert reader.dtype(name) == torch.float32
