"""Adapters from Megatron's ranks into SGLang's slots, against slots that are filled by hand."""

import pytest
import torch

from megarl.config.schema.models import LoraConfig
from megarl.layout.grid import ParallelLayout
from megarl.models.lora import logical_adapters
from megarl.weight_sync.layouts import EngineLayout, megatron_adapters, megatron_layout, served_padding
from megarl.weight_sync.packets import CONVERT
from megarl.weight_sync.sync_plan import SyncPlan
from tests.weight_sync.shards import empty_shards, run_plan

RANK = 3
CASES = [
    ("qwen2", {}, ParallelLayout(world=4, tp=2, pp=2), EngineLayout(tp=2, num_engines=2)),
    ("qwen3", {}, ParallelLayout(world=2, pp=2), EngineLayout(tp=8)),
    ("llama", {"target_modules": ("q_proj", "v_proj", "down_proj")}, ParallelLayout(world=2, tp=2), EngineLayout(tp=1)),
    ("qwen2", {"shared_a": True}, ParallelLayout(world=2, tp=2), EngineLayout(tp=2)),
    ("llama", {"target_modules": ("model.layers.1.*",)}, ParallelLayout(world=2, pp=2), EngineLayout(tp=2)),
    ("qwen3_moe", {"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")},
     ParallelLayout(world=2, tp=2, ep=2), EngineLayout(tp=2, ep=2)),
]  # fmt: skip


def random_adapters(config, lora):
    """Random values of all adapters; adapters that share A have the same A."""
    generator, values = torch.Generator().manual_seed(1), {}
    for name, shape in logical_adapters(config, lora).items():
        values[name] = torch.randn(shape, generator=generator)
        if lora.shared_a and name.endswith("lora_A.weight"):
            for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
                for other in others:
                    if f".{other}." in name:
                        values[name] = values[name.replace(other, first)]
    return values


def expected_slots(values, hf, tp, rank):
    """SGLang's buffers (0.5.21): A of q, k and v stacked by rows; B with the weight's rows. NaN: not adapted."""
    replicas = max(1, tp // hf["num_key_value_heads"])
    key_value = (tp // replicas, rank // replicas)
    heads = hf["num_attention_heads"]
    dim = hf.get("head_dim") or hf["hidden_size"] // heads
    widths = {"q": heads * dim, "k": hf["num_key_value_heads"] * dim, "v": hf["num_key_value_heads"] * dim}
    widths |= {"gate": hf["intermediate_size"], "up": hf["intermediate_size"]}
    found = {}
    for layer in range(hf["num_hidden_layers"]):
        for fused, block, parts in (
            ("qkv_proj", "self_attn", ("q", "k", "v")),
            ("gate_up_proj", "mlp", ("gate", "up")),
        ):
            path, a, b = f"model.layers.{layer}.{block}.", [], []
            for part in parts:
                cut = key_value if part in "kv" else (tp, rank)
                name, rows = f"{path}{part}_proj", widths[part] // cut[0]
                first = cut[1] * rows
                a.append(
                    values.get(f"{name}.lora_A.weight", torch.full((RANK, hf["hidden_size"]), torch.nan))
                )
                whole = values.get(f"{name}.lora_B.weight", torch.full((widths[part], RANK), torch.nan))
                b.append(whole[first : first + rows])
            found |= {f"{path}{fused}.lora_A": torch.cat(a), f"{path}{fused}.lora_B": torch.cat(b)}
        for single in ("self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{single}"
            if f"{name}.lora_A.weight" in values:
                found[f"{name}.lora_A"] = values[f"{name}.lora_A.weight"].chunk(tp, 1)[rank]
                found[f"{name}.lora_B"] = values[f"{name}.lora_B.weight"]
    return {name: slot for name, slot in found.items() if not slot.isnan().all()}


def same(found, expected):
    """Equal within the shape of `found`, which ends with its last pieces; beyond it `expected` is NaN."""
    corner = expected[tuple(slice(size) for size in found.shape)]
    return torch.equal(found.nan_to_num(9.0), corner.nan_to_num(9.0)) and (
        int((~expected.isnan()).sum()) == int((~corner.isnan()).sum())
    )


@pytest.mark.parametrize(("family", "kind", "parallel", "engines"), CASES)
def test_every_slot_gets_its_adapters_and_no_more(tiny_model, family, kind, parallel, engines):
    model, lora = tiny_model(family), LoraConfig(rank=RANK, alpha=6, **kind)
    values = random_adapters(model.config, lora)
    source = megatron_adapters(megatron_layout(model.config, parallel), model.config, lora)
    trainer = empty_shards(source)
    for rank, tensors in enumerate(trainer):
        for tensor, box, local, place in source.pieces(rank):
            tensors[local][place.slices].copy_(values[tensor][box.slices])
        assert not any(tensor.isnan().any() for tensor in tensors.values())
    sync = SyncPlan(model.config, parallel, engines, torch.float32, 20_000, adapters=lora)
    engine = empty_shards(sync.adapter_plan.target)
    run_plan(sync.adapter_plan, trainer, engine)
    for rank in range(engines.num_ranks):
        expected = expected_slots(values, model.config.hf, engines.tp, rank % engines.tp)
        assert engine[rank].keys() == expected.keys()
        for name, slot in expected.items():
            assert same(engine[rank][name], slot), (rank, name)
        padding = served_padding(model.config, engines, rank, lora)
        for name, slot in expected.items():
            assert padding.pop(name, 0) == int(slot.isnan().sum()), name
        assert all(name.startswith("model.layers.") for name in padding)  # layers without adapters


def test_adapters_come_after_the_weights_and_are_counted_apart(tiny_model):
    model, lora = tiny_model("qwen2"), LoraConfig(rank=RANK)
    plain = SyncPlan(model.config, ParallelLayout(world=2, tp=2), EngineLayout(tp=2), torch.float32, 20_000)
    sync = SyncPlan(
        model.config, ParallelLayout(world=2, tp=2), EngineLayout(tp=2), torch.float32, 20_000, adapters=lora
    )
    assert sync.buckets[: sync.frozen] == plain.buckets
    names = set(logical_adapters(model.config, lora))
    adapters = [copy for bucket in sync.buckets[sync.frozen :] for copy in bucket]
    assert {copy.tensor for copy in adapters} == names
    nbytes = [0, 0]
    for copy in adapters:
        for rank in copy.target_ranks:
            nbytes[rank] += 4 * copy.box.numel
    assert sync.bytes_received(complete=False) == nbytes
    assert sync.bytes_received() == [a + b for a, b in zip(plain.bytes_received(), nbytes, strict=True)]
    assert sync.account(complete=False)["bytes_total"] == sum(nbytes)
    assert sync.account()["bytes_total"] == plain.account()["bytes_total"] + sum(nbytes)
    leaving, arriving = sync.shares()
    assert all(share.frozen == sync.frozen for share in (*leaving, *arriving))
    assert all(share.scaling == 1.0 for share in arriving)
    readings = {
        item.reading for share in leaving for specs in share.buckets for p in specs for item in p.slices
    }
    assert readings == {CONVERT}
