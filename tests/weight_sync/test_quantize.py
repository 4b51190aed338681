"""Weights in float8: their values and scales, and their sync into an engine."""

import pytest
import torch

from megarl.layout import Box
from megarl.layout.grid import ParallelLayout
from megarl.models import logical_tensors
from megarl.weight_sync.layouts import EngineLayout, megatron_layout, sglang_layout
from megarl.weight_sync.quantize import (
    FP8,
    SCALES,
    block_scales,
    is_quantised,
    read_scales,
    read_values,
    with_scales,
)
from megarl.weight_sync.sync_plan import P2P, SHARED_MEMORY, SyncPlan
from tests.weight_sync.fusions import Rank, expected_sglang
from tests.weight_sync.shards import empty_shards, load_all
from tests.weight_sync.transfer import Transfer


def plain_quantise(weight, block):
    """(values, scales) block by block, as arXiv 2412.19437 describes it: scale = amax / 448."""
    rows, columns = (-(-extent // step) for extent, step in zip(weight.shape, block, strict=True))
    values, scales = torch.empty(weight.shape, dtype=FP8), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            amax = weight[part].float().abs().max()
            scales[row, column] = amax / 448 if amax > 0 else 1.0
            values[part] = (weight[part].float() / scales[row, column]).to(FP8)
    return values, scales


def bits(tensor):
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (7, 130)])
def test_values_and_scales(shape, dtype):
    block = (128, 128)
    weight = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    weight[:128, :128] = 0  # 0 / 0 would be NaN
    expected, scales = plain_quantise(weight, block)
    values, found = torch.empty(shape, dtype=FP8), torch.empty(scales.shape)
    read_values(weight, Box.whole(shape), block, values)
    read_scales(weight, Box.whole(tuple(scales.shape)), block, found)
    assert torch.equal(found, scales) and torch.equal(bits(values), bits(expected))
    wide = found.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    error = (values.float() * wide - weight.float()).abs()
    # e4m3 has 3 bits after the leading one; its smallest step is 2**-9 times the scale
    assert bool((error <= weight.float().abs() / 16 + wide * 2**-10).all())


@pytest.mark.parametrize(
    "box", [((0, 0), (5, 7)), ((3, 2), (20, 13)), ((16, 8), (16, 8)), ((31, 17), (2, 2))]
)
def test_a_part_of_a_block_has_the_scale_of_all_of_it(box):
    block, shape = (8, 4), (33, 19)
    weight, box = torch.randn(shape, generator=torch.Generator().manual_seed(2)), Box(*box)
    values = torch.empty(box.size, dtype=FP8)
    read_values(weight, box, block, values)
    assert torch.equal(bits(values), bits(plain_quantise(weight, block)[0][box.slices]))


def test_weights_so_small_that_their_scale_vanishes_are_no_nan():
    weight = torch.full((4, 4), 1e-44)
    values = torch.empty((4, 4), dtype=FP8)
    read_values(weight, Box.whole((4, 4)), (4, 4), values)
    assert values.float().abs().max() == 0
    assert block_scales(weight, (4, 4)) == 1


def test_what_is_quantised():
    p = "model.layers.3."
    yes = ("self_attn.q_proj.weight", "self_attn.kv_a_proj_with_mqa.weight", "mlp.gate_proj.weight",
           "mlp.experts.17.down_proj.weight", "mlp.shared_experts.up_proj.weight")  # fmt: skip
    no = ("self_attn.q_proj.bias", "mlp.gate.weight", "mlp.gate.e_score_correction_bias", "input_layernorm.weight",
          "self_attn.q_a_layernorm.weight")  # fmt: skip
    assert all(is_quantised(p + name) for name in yes) and not any(is_quantised(p + name) for name in no)
    assert not is_quantised("lm_head.weight") and not is_quantised("model.embed_tokens.weight")


UNEVEN = ParallelLayout(world=4, tp=2, pp=2, ep=2, first_layers=1)
CASES = [
    ("qwen2", ParallelLayout(world=4, tp=2, pp=2), EngineLayout(tp=2), (4, 4)),
    ("qwen3_moe", ParallelLayout(world=4, ep=4), EngineLayout(tp=4, ep=2), (4, 8)),
    ("deepseek_v3", UNEVEN, EngineLayout(tp=2, ep=2), (2, 4)),
    ("deepseek_v32", UNEVEN, EngineLayout(tp=2, ep=2), (2, 4)),
]


# Transports carry any bytes, so each transport is tested with two of the models only.
@pytest.mark.parametrize(
    ("family", "parallel", "engines", "block", "transport"),
    [(*case, transport) for case, transport in zip(CASES, (SHARED_MEMORY, P2P) * 2, strict=True)],
)
def test_an_engine_in_float8(tiny_model, tmp_path, family, parallel, engines, block, transport):
    model = tiny_model(family)
    sync = SyncPlan(
        model.config, parallel, engines, torch.bfloat16, 20_000, transport=transport, fp8_block=block
    )
    layout = with_scales(sglang_layout(model.config, engines), logical_tensors(model.config), block)
    engine = empty_shards(layout)
    quantised = {name: plain_quantise(t, block) for name, t in model.decoder.items() if is_quantised(name)}
    others = {
        name: t if name.endswith("correction_bias") or ".indexer.k_norm." in name else t.bfloat16()
        for name, t in model.decoder.items()
    }
    expected, scales = (
        [
            expected_sglang(
                {**others, **{name: pair[index] for name, pair in quantised.items()}},
                model.config.hf,
                Rank(rank, engines.tp, engines.ep),
            )
            for rank in range(engines.tp)
        ]
        for index in (0, 1)
    )
    for rank, tensors in enumerate(engine):
        for name in list(tensors):
            tensors[name] = tensors[name].to(
                torch.float32 if name.endswith(SCALES) else expected[rank][name].dtype
            )
    trainer = load_all(model.folder, parallel)
    transfer = Transfer(sync, trainer, engine, tmp_path)
    _, received = transfer.run(1)
    for rank in range(engines.tp):
        wanted = dict(expected[rank])
        wanted |= {name + SCALES: scales[rank][name] for name, t in expected[rank].items() if t.dtype == FP8}
        assert engine[rank].keys() == wanted.keys()
        for name, values in wanted.items():
            assert torch.equal(bits(engine[rank][name]), bits(values.contiguous())), (rank, name)
        assert received[rank].bytes_written == sum(values.nbytes for values in wanted.values())
    transfer.close()


def test_about_half_the_bytes_travel(tiny_model):
    config = tiny_model("qwen3_moe").config
    sizes = {name: torch.Size(shape).numel() for name, shape in logical_tensors(config).items()}
    quantised = sum(size for name, size in sizes.items() if is_quantised(name))
    plan = SyncPlan(
        config, ParallelLayout(world=4, ep=4), EngineLayout(1), torch.bfloat16, 20_000, fp8_block=(4, 16)
    )
    # a byte for each value, and 4 for each scale of 64 values
    assert plan.account()["bytes_total"] == quantised + quantised // 16 + 2 * (
        sum(sizes.values()) - quantised
    )


def test_a_shard_that_cuts_a_block_is_refused_by_name(tiny_model):
    config = tiny_model("qwen2").config
    layout = with_scales(
        megatron_layout(config, ParallelLayout(world=2, tp=2)), logical_tensors(config), (8, 8)
    )
    with pytest.raises(
        ValueError,
        match=r"fp8: Megatron rank \d holds rows .* of model.layers.0.self_attn.k_proj.weight from 8 of .*, which cuts",
    ):
        layout.pieces(1)
