"""Megatron shards written as a Hugging Face folder."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from megarl.checkpoints.hf.export import ExportPlan, write_hf_checkpoint
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from tests.weight_sync.fusions import single_experts
from tests.weight_sync.shards import load_all, make_model, quantise

ONE, TWO = ParallelLayout(world=1), ParallelLayout(world=2, tp=2)


def export(source, target, layout, dtype=torch.float32, ranks=None, **options):
    """Load the model in a layout and write it again; returns the plan."""
    plan = ExportPlan(read_model_config(str(source)), layout, dtype, **options)
    ranks = ranks or load_all(source, layout)
    collect = lambda shard: [plan.pack(shard, rank, tensors) for rank, tensors in enumerate(ranks)]  # noqa: E731
    write_hf_checkpoint(str(target), str(source), plan, collect)
    return plan


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen2",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "minimax_m2",
        "gpt_oss",
    ],
)
@pytest.mark.parametrize(
    ("layout", "mtp"),
    [
        pytest.param(layout, mtp, id=f"{name}-{mtp}", marks=() if often else pytest.mark.slow)
        for layout, name, mtp, often in (
            (ONE, "tp1", False, True),
            (ONE, "tp1", True, False),
            (ParallelLayout(world=4, tp=2, pp=2), "tp2pp2", False, True),
            (ParallelLayout(world=4, tp=2, pp=2), "tp2pp2", True, False),
            (ParallelLayout(world=8, tp=2, pp=2, vpp=2), "tp2pp2vpp2dp2", False, False),
            (ParallelLayout(world=8, tp=2, pp=2, vpp=2), "tp2pp2vpp2dp2", True, True),
        )
    ],
)
def test_what_was_loaded_comes_back_bit_for_bit(tmp_path, tiny_model, family, layout, mtp):
    model = tiny_model(family)
    export(model.folder, tmp_path / "out", layout, mtp=mtp)
    written = load_file(tmp_path / "out" / "model.safetensors")
    if not model.config.num_mtp_layers:
        assert written.keys() == load_file(model.folder / "model.safetensors").keys()
    written = single_experts(written)
    expected = model.state if mtp else model.decoder
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[tensor], expected[tensor]) for tensor in expected)
    again = read_model_config(str(tmp_path / "out"))
    assert again.num_mtp_layers == (model.config.num_mtp_layers if mtp else 0)
    if mtp:
        assert again == model.config


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_vision_tower_comes_along_as_it_is(tmp_path, tiny_model, family):
    """In a folder with a vision tower the language model's tensors have another prefix, and all experts of a layer are one tensor."""
    model = tiny_model(family, vision=True)
    (model.folder / "preprocessor_config.json").write_text("{}")
    ranks = load_all(model.folder, TWO)
    for rank in ranks:
        for tensor in rank.values():
            tensor += 1
    export(model.folder, tmp_path / "out", TWO, ranks=ranks, mtp=True)
    expected = load_file(model.folder / "model.safetensors")
    written = {
        name: tensor
        for file in (tmp_path / "out").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert written.keys() == expected.keys()
    assert sum(name.startswith("model.visual.") for name in written) > 10
    for name, tensor in written.items():
        trained = not name.startswith(("model.visual.", "mtp."))
        assert torch.equal(tensor, expected[name] + 1 if trained else expected[name]), name
    assert read_model_config(str(tmp_path / "out")) == model.config
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    loaded, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert torch.equal(loaded.lm_head.weight, written["lm_head.weight"])


def test_a_vision_tower_without_weights_is_refused(tmp_path, tiny_model):
    source = shutil.copytree(tiny_model("qwen3_5", vision=True).folder, tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    text = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    save_file(text, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"config\.json has a vision tower .* and there are no weights of it"
    ):
        export(source, tmp_path / "out", ONE)
    assert not (tmp_path / "out").exists()


def test_kept_prediction_layers_repeat_the_trained_embedding(tmp_path, tiny_model):
    model = tiny_model("deepseek_v3")
    ranks = load_all(model.folder, TWO)
    for rank in ranks:
        rank["0:embedding.word_embeddings.weight"] += 1
    export(model.folder, tmp_path / "out", TWO, ranks=ranks, mtp=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.4.embed_tokens.weight"):
        assert torch.equal(written[name], model.state["model.embed_tokens.weight"] + 1)
    unchanged = "model.layers.4.mlp.experts.3.up_proj.weight"
    assert torch.equal(written[unchanged], model.state[unchanged])


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next", "qwen3_5"])
def test_trained_prediction_layers_are_exported(tmp_path, tiny_model, family):
    model, layout = tiny_model(family), ParallelLayout(world=4, tp=2, pp=2)
    ranks = load_all(model.folder, layout, mtp=True)
    for rank in ranks:
        for tensor in rank.values():
            tensor += 1
    export(model.folder, tmp_path / "out", layout, ranks=ranks, mtp=True, mtp_trained=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == model.state.keys()
    assert all(torch.equal(written[name], model.state[name] + 1) for name in written)


def test_a_float8_model_is_written_as_one_in_bfloat16(tmp_path, tiny_model):
    source = shutil.copytree(tiny_model("deepseek_v3", dtype="bfloat16").folder, tmp_path / "hf")
    means = quantise(source, (16, 16))
    export(source, tmp_path / "out", TWO, torch.bfloat16, mtp=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == means.keys()
    for name, values in means.items():
        float32 = name.endswith("e_score_correction_bias")
        assert written[name].dtype == (torch.float32 if float32 else torch.bfloat16), name
        assert torch.equal(written[name], values.to(written[name].dtype)), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in written.items() if name in loaded)


def test_a_damaged_slice_is_named_and_nothing_is_written(tmp_path):
    make_model(tmp_path / "hf")
    plan = ExportPlan(read_model_config(str(tmp_path / "hf")), TWO, torch.float32)
    bundles = [plan.pack(0, rank, tensors) for rank, tensors in enumerate(load_all(tmp_path / "hf", TWO))]
    bundles[1].data[-1] ^= 1
    with pytest.raises(ValueError, match=r"from rank 1 arrived damaged"):
        write_hf_checkpoint(str(tmp_path / "out"), str(tmp_path / "hf"), plan, lambda shard: bundles)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_large_models_are_written_in_shards_with_an_index(tmp_path):
    state = make_model(tmp_path / "hf")
    plan = export(tmp_path / "hf", tmp_path / "out", ONE, shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(plan.shards) > 2
    again, before = load_all(tmp_path / "out", ONE), load_all(tmp_path / "hf", ONE)
    assert all(torch.equal(again[0][name], tensor) for name, tensor in before[0].items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
