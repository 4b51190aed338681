"""Converted checkpoints against Megatron's own loading and saving, on real ranks."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_model import make_tiny_model
from megarl.checkpoints.convert import compare, convert
from megarl.checkpoints.dcp import DCPReader
from megarl.models import MegatronPlace, megatron_pieces, read_model_config
from megarl.models.config import QWEN_HYBRIDS
from tests.checkpoints.convert import megatron

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen2_tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "deepseek_v3": {},
    "glm4_moe": {},
    "deepseek_v32": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {},
    "minimax_m2": {},
    "kimi_k2": {},
    "gpt_oss": {},
}
LAYOUTS = {
    "alone": (1, {}),
    "tp2pp2": (4, {"tp": 2, "pp": 2, "sp": True}),
    "pp2vpp2dp2": (4, {"pp": 2, "vpp": 2}),
    "tp2ep4": (4, {"tp": 2, "ep": 4, "sp": True}),
    "pp2ep2_uneven": (4, {"pp": 2, "ep": 2, "first_layers": 1}),
}
CASES = [
    ("llama", "alone"),
    ("llama", "tp2pp2"),
    ("qwen2", "pp2vpp2dp2"),
    ("qwen2_tied", "tp2pp2"),
    ("qwen3", "tp2pp2"),
    ("qwen3_moe", "alone"),
    ("qwen3_moe", "tp2ep4"),
    ("qwen3_next", "alone"),
    ("qwen3_5", "tp2pp2"),
    ("qwen3_5_moe", "tp2ep4"),
    ("qwen3_next", "tp2ep4"),
    ("qwen3_next", "pp2ep2_uneven"),
    ("deepseek_v3", "tp2pp2"),
    ("deepseek_v3", "pp2ep2_uneven"),
    ("glm4_moe", "pp2vpp2dp2"),
    ("deepseek_v32", "pp2ep2_uneven"),
    ("glm4_moe_lite", "tp2ep4"),
    ("glm_moe_dsa", "tp2ep4"),
    ("glm_moe_dsa", "pp2vpp2dp2"),
    ("kimi_k2", "tp2ep4"),
    ("minimax_m2", "tp2ep4"),
    ("minimax_m2", "pp2ep2_uneven"),
    ("gpt_oss", "tp2ep4"),
]


def make(folder, name: str, num_mtp_layers: int = 0) -> str:
    sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "vocab_size": 300}
    fields = {"family": name, **sizes, **FAMILIES[name], "num_mtp_layers": num_mtp_layers}
    return str(make_tiny_model(folder, ["one two"], **fields))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_megatron_loads_what_was_converted(ranks, tmp_path, family, layout):
    model = make(tmp_path / "hf", family)
    convert(model, str(tmp_path / "converted"), shard_bytes=100_000)
    world, sizes = LAYOUTS[layout]
    different = ranks.run(megatron.load, sizes, model, str(tmp_path / "converted" / "release"), world=world)
    assert different == [[]] * world


def round_trip(ranks, folder: Path, family: str, layout: str, stacked: bool | None = None) -> DCPReader:
    """Save the model with Megatron, convert the checkpoint back and compare the models; returns a reader of the checkpoint."""
    model = make(folder / "hf", family)
    world, sizes = LAYOUTS[layout]
    ranks.run(megatron.save, sizes, model, str(folder / "saved"), stacked, world=world)
    convert(str(folder / "saved"), str(folder / "back"), companions=model)
    compared = compare(model, str(folder / "back"))
    assert compared.equal and compared.num_equal > 20
    return DCPReader(folder / "saved")


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_what_megatron_saved_is_converted_back(ranks, tmp_path, family, layout):
    round_trip(ranks, tmp_path, family, layout)


@pytest.mark.parametrize(
    ("family", "layout", "stacked", "key", "shape"),
    [
        ("qwen2_tied", "tp2pp2", False, "decoder.layers.3.mlp.linear_fc2.weight", (64, 96)),
        ("qwen2_tied", "pp2vpp2dp2", True, "decoder.layers.mlp.linear_fc2.weight", (4, 64, 96)),
        ("qwen3_moe", "tp2ep4", False, "decoder.layers.3.mlp.experts.experts.linear_fc2.weight", (8, 64, 24)),
        ("qwen3_moe", "tp2ep4", True, "decoder.layers.mlp.experts.experts.linear_fc2.weight", (4, 8, 64, 24)),
    ],
)
def test_layers_may_be_stacked_or_numbered(ranks, tmp_path, family, layout, stacked, key, shape):
    saved = round_trip(ranks, tmp_path, family, layout, stacked)
    assert saved.tensors[key].shape == shape


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_checkpoint_has_the_tensors_and_objects_of_megatrons_own(ranks, tmp_path, family):
    model = make(tmp_path / "hf", family)
    ranks.run(megatron.save, {}, model, str(tmp_path / "saved"), world=1)
    convert(model, str(tmp_path / "converted"))
    saved, ours = (DCPReader(Path(tmp_path, name)) for name in ("saved", "converted/release"))
    facts = [
        {key: (tensor.shape, tensor.dtype) for key, tensor in read.tensors.items()} for read in (saved, ours)
    ]
    assert facts[0] == facts[1]
    assert set(saved.objects) <= set(ours.objects)
    # extra states of Transformer Engine's modules, which their stand-ins in torch do not have
    theirs = re.compile(
        r".*(norm|core_attention|experts\.linear_fc[12]|linear_(q|kv)_down_proj)\._extra_state/shard_[\d.]+_[\d.]+"
    )
    assert [key for key in set(ours.objects) - set(saved.objects) if not theirs.fullmatch(key)] == []


def test_megatron_finds_the_common_state_in_its_old_and_its_new_place(tmp_path):
    from megatron.core import dist_checkpointing

    folder = tmp_path / "converted" / "release"
    convert(make(tmp_path / "hf", "qwen3_moe"), str(tmp_path / "converted"))
    states = [dist_checkpointing.load_common_state_dict(str(folder))]
    (folder / "common.pt").unlink()
    states.append(dist_checkpointing.load_common_state_dict(str(folder)))
    assert states[0] == states[1]
    assert states[0]["content_metadata"]["non_homogeneous_layers"] is True
    assert (
        states[0]["checkpoint_version"] == 3.0
    )  # Megatron-LM reorders the rows of linear_qkv of versions below 2


@pytest.mark.parametrize(
    ("family", "num_layers"), [("deepseek_v3", 1), ("glm4_moe", 2), ("qwen3_next", 1), ("qwen3_5", 1)]
)
def test_megatron_loads_multi_token_prediction_layers(ranks, tmp_path, family, num_layers):
    model = make(tmp_path / "hf", family, num_layers)
    convert(model, str(tmp_path / "converted"))
    folder = str(tmp_path / "converted" / "release")
    ((parameters, left_over),) = ranks.run(megatron.load_with_mtp, model, folder, world=1)
    assert [key for key in left_over if "_extra_state" not in key] == []
    config, weights = read_model_config(model), load_file(f"{model}/model.safetensors")
    pieces = megatron_pieces(
        config,
        MegatronPlace(),
        layers=[list(range(config.num_layers))],
        first_stage=True,
        last_stage=True,
        mtp=True,
    )
    assert {piece.local for piece in pieces} == parameters.keys()
    later = "mtp." if family in QWEN_HYBRIDS else "model.layers.4."  # the first layer after the model's own
    assert sum(piece.tensor.startswith(later) for piece in pieces) > (20 if config.moe else 12)
    for piece in pieces:
        values = parameters[piece.local][piece.local_box.slices]
        assert torch.equal(values, weights[piece.tensor][piece.box.slices]), piece
