"""Hugging Face -> Megatron -> Hugging Face and -> SGLang, over a grid of layouts, on simulated ranks.

The oracle of SGLang's shards is written here from its documented fusions, not from the weight tables.
"""

import pytest
import torch
from safetensors.torch import load_file

from megarl.hybrid_engine import (
    ExportPlan,
    SyncPlan,
    load_hf_weights,
    megatron_layout,
    sglang_layout,
    write_hf_checkpoint,
    write_update,
)
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from tests.hybrid_engine.shards import apply_manifest, empty_shards, make_model

LAYOUTS = {
    "tp1": ParallelLayout(world=1),
    "tp2": ParallelLayout(world=2, tp=2),
    "tp4": ParallelLayout(world=4, tp=4),
    "pp4": ParallelLayout(world=4, pp=4),
    "tp2pp2": ParallelLayout(world=4, tp=2, pp=2),
    "pp2vpp2": ParallelLayout(world=2, pp=2, vpp=2),
    "tp2pp2vpp2dp2": ParallelLayout(world=8, tp=2, pp=2, vpp=2),
    "tp2cp2dp2": ParallelLayout(world=8, tp=2, cp=2),
}


def load_all(folder, config, parallel, head="lm"):
    ranks = empty_shards(megatron_layout(config, parallel, head))
    for rank, parameters in enumerate(ranks):
        load_hf_weights(str(folder), config, parallel, rank, parameters, head)
    return ranks


def expected_sglang(state, config, tp, rank):
    """SGLang's parameters on one rank, cut and fused by hand; the vocabulary without its padding rows."""

    def rows(name, count=tp, index=rank):
        return state[name].chunk(count, 0)[index]

    vocab = -(-config.vocab_size // 64) * 64 // tp
    replicas = max(1, tp // config.num_query_groups)
    out = {"model.norm.weight": state["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            out[name] = state[name][rank * vocab : (rank + 1) * vocab]
    for layer in range(config.num_layers):
        p = f"model.layers.{layer}."
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[p + norm] = state[p + norm]
        for kind in ("weight", "bias"):
            q, k, v = (f"{p}self_attn.{x}_proj.{kind}" for x in "qkv")
            if q in state:
                kv = (tp // replicas, rank // replicas)
                out[f"{p}self_attn.qkv_proj.{kind}"] = torch.cat([rows(q), rows(k, *kv), rows(v, *kv)])
        out[p + "self_attn.o_proj.weight"] = state[p + "self_attn.o_proj.weight"].chunk(tp, 1)[rank]
        gate_up = [rows(p + "mlp.gate_proj.weight"), rows(p + "mlp.up_proj.weight")]
        out[p + "mlp.gate_up_proj.weight"] = torch.cat(gate_up)
        out[p + "mlp.down_proj.weight"] = state[p + "mlp.down_proj.weight"].chunk(tp, 1)[rank]
    return out


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_export_gives_back_what_was_loaded_bit_for_bit(tmp_path, family, tied, name):
    state = make_model(tmp_path / "hf", family, tied=tied)
    config = read_model_config(str(tmp_path / "hf"))
    ranks = load_all(tmp_path / "hf", config, LAYOUTS[name])
    export = ExportPlan(config, LAYOUTS[name], torch.float32)
    collect = lambda shard: [export.pack(shard, rank, tensors) for rank, tensors in enumerate(ranks)]  # noqa: E731
    write_hf_checkpoint(str(tmp_path / "out"), str(tmp_path / "hf"), export, collect)

    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[tensor], state[tensor]) for tensor in state)
    assert read_model_config(str(tmp_path / "out")) == config


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("engine_tp", [1, 2, 8])
def test_sync_fills_the_engine_exactly(tmp_path, family, tied, name, engine_tp):
    state = make_model(tmp_path / "hf", family, tied=tied, layers=4)
    config = read_model_config(str(tmp_path / "hf"))
    ranks = load_all(tmp_path / "hf", config, LAYOUTS[name])
    sync = SyncPlan(config, LAYOUTS[name], engine_tp, torch.float32, bucket_bytes=20_000)
    assert len(sync.buckets) > 1
    engine = empty_shards(sglang_layout(config, engine_tp))
    written = 0
    for bucket in range(len(sync.buckets)):
        packets = [sync.pack(bucket, rank, tensors) for rank, tensors in enumerate(ranks)]
        manifests = write_update(tmp_path, sync, 1, bucket, packets)
        written += sum(apply_manifest(path, engine[rank]) for rank, path in enumerate(manifests))
    for rank in range(engine_tp):
        expected = expected_sglang(state, config, engine_tp, rank)
        present = {tensor: values for tensor, values in expected.items() if values.numel()}
        assert engine[rank].keys() == present.keys()
        for tensor, values in present.items():
            assert torch.equal(engine[rank][tensor], values), (rank, tensor)
    account = sync.account()
    assert written == account["bytes_total"]
    assert (
        account["bytes_max_per_rank"] <= -(-written // engine_tp) + 64 * 32 * 4 * 2
    )  # the vocabulary's last share


def test_a_slice_travels_in_the_engines_precision(tmp_path):
    make_model(tmp_path / "hf")
    config = read_model_config(str(tmp_path / "hf"))
    ranks = load_all(tmp_path / "hf", config, LAYOUTS["tp2"])
    sync = SyncPlan(config, LAYOUTS["tp2"], 1, torch.bfloat16, bucket_bytes=1 << 30)
    packets = [sync.pack(0, rank, tensors) for rank, tensors in enumerate(ranks)]
    (manifest,) = write_update(tmp_path, sync, 1, 0, packets)
    engine = empty_shards(sglang_layout(config, 1))[0]
    apply_manifest(manifest, engine)
    norm = ranks[0]["0:decoder.final_layernorm.weight"]
    assert torch.equal(engine["model.norm.weight"], norm.bfloat16().float())


def test_a_critic_loads_from_a_language_model_and_keeps_its_own_head(tmp_path):
    make_model(tmp_path / "hf", tied=False)
    config = read_model_config(str(tmp_path / "hf"))
    ranks = empty_shards(megatron_layout(config, LAYOUTS["pp4"], "value"))
    head = ranks[3]["0:value_head.weight"].fill_(7.0)
    for rank, parameters in enumerate(ranks):
        load_hf_weights(str(tmp_path / "hf"), config, LAYOUTS["pp4"], rank, parameters, "value")
    assert (head == 7.0).all()
    rest = [t for r in ranks for n, t in r.items() if "value_head" not in n]
    assert not any(torch.isnan(t).any() for t in rest)


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(tmp_path):
    folder = tmp_path / "hf"
    make_model(folder)
    config = read_model_config(str(folder))
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"intermediate_size": 48', '"intermediate_size": 40'))
    wrong = read_model_config(str(folder))
    ranks = empty_shards(megatron_layout(wrong, LAYOUTS["tp1"]))
    with pytest.raises(
        ValueError, match=r"mlp.gate_proj.weight has shape \(48, 32\), config.json makes it \(40, 32\)"
    ):
        load_hf_weights(str(folder), wrong, LAYOUTS["tp1"], 0, ranks[0])
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        load_hf_weights(str(folder), config, LAYOUTS["tp1"], 0, ranks[0])


def test_a_damaged_slice_is_named_and_nothing_is_written(tmp_path):
    make_model(tmp_path / "hf")
    config = read_model_config(str(tmp_path / "hf"))
    ranks = load_all(tmp_path / "hf", config, LAYOUTS["tp2"])
    export = ExportPlan(config, LAYOUTS["tp2"], torch.float32)
    packets = [export.pack(0, rank, tensors) for rank, tensors in enumerate(ranks)]
    packets[1].data[-1] ^= 1
    with pytest.raises(ValueError, match=r"from rank 1 arrived damaged"):
        write_hf_checkpoint(str(tmp_path / "out"), str(tmp_path / "hf"), export, lambda shard: packets)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_large_models_are_written_in_shards_with_an_index(tmp_path):
    state = make_model(tmp_path / "hf")
    config = read_model_config(str(tmp_path / "hf"))
    ranks = load_all(tmp_path / "hf", config, LAYOUTS["tp1"])
    export = ExportPlan(config, LAYOUTS["tp1"], torch.float32, shard_bytes=30_000)
    collect = lambda shard: [export.pack(shard, 0, ranks[0])]  # noqa: E731
    write_hf_checkpoint(str(tmp_path / "out"), str(tmp_path / "hf"), export, collect)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(export.shards) > 2
    again = load_all(tmp_path / "out", config, LAYOUTS["tp1"])
    assert all(torch.equal(again[0][name], tensor) for name, tensor in ranks[0].items())
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
