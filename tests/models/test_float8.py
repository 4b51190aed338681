"""Blocks that share a scale, and layouts that cut no blocks."""

from typing import Any

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from examples.tiny_model import make_tiny_model
from megarl.layout.grid import ParallelLayout, layers_of
from megarl.models import MegatronPlace, float8, megatron_pieces, read_model_config
from megarl.models.float8 import FP8, base_weights, check_base_block, dequantise, in_blocks, quantise
from megarl.models.lora import linear_weights


def in_float8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales as the code under test makes them."""
    values = torch.empty(weight.shape, dtype=FP8)
    scales = torch.empty(in_blocks(weight.shape, block))
    quantise(weight, block, values, scales)
    return values, scales


@pytest.mark.parametrize("shape", [(8, 12), (7, 10), (1, 1), (3000, 700)])
def test_each_block_has_the_scale_of_its_largest_element(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    values, scales = in_float8(weight, (4, 6))
    found = dequantise(values, scales, (4, 6), torch.float32)
    for row in range(0, shape[0], max(4, shape[0] // 40 // 4 * 4)):
        for column in range(0, shape[1], max(6, shape[1] // 20 // 6 * 6)):
            part = weight[row : row + 4, column : column + 6]
            scale = part.abs().max() / 448
            assert scales[row // 4, column // 6] == scale
            assert torch.equal(
                found[row : row + 4, column : column + 6], (part / scale).to(FP8).float() * scale
            )


def test_dequantise_is_transformers_own():
    torch.manual_seed(0)
    values = torch.randn(48, 64).to(FP8)
    scales = torch.rand(3, 2)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
    assert torch.equal(dequantise(values, scales, (16, 32), torch.float32), expected)
    inside = dequantise(values[20:37, 40:], scales[1:, 1:], (16, 32), torch.float32, (4, 8))
    assert torch.equal(inside, expected[20:37, 40:])


def test_zeros_stay_zeros() -> None:
    values, scales = in_float8(torch.zeros(5, 5), (4, 4))
    assert torch.equal(dequantise(values, scales, (4, 4), torch.bfloat16), torch.zeros(5, 5).bfloat16())


def test_values_become_the_model_type_after_the_product() -> None:
    """Scales in bfloat16 would be rounded before the product."""
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
    values, scales = in_float8(weight, (4, 4))
    exact = dequantise(values, scales, (4, 4), torch.float32)
    assert torch.equal(dequantise(values, scales, (4, 4), torch.bfloat16), exact.bfloat16())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Experts of 24 rows, heads of 16, an MLP of 96."""
    folder = tmp_path_factory.mktemp("float8")
    make_tiny_model(
        folder, ["a"], vocab_size=300, hidden_size=64, ffn_hidden_size=96, num_layers=2, family="deepseek_v3"
    )
    return str(folder)


def test_blocks_that_shards_cut_are_refused(folder: str) -> None:
    config = read_model_config(folder)
    check_base_block(config, ParallelLayout(world=1), 8)
    with pytest.raises(ValueError, match=r"lora.base_block=128: .*experts.*up_proj.*lora.base_block=8 fits"):
        check_base_block(config, ParallelLayout(world=1), 128)
    with pytest.raises(ValueError, match=r"lora.base_block=8: .*lora.base_block=4 fits"):
        check_base_block(config, ParallelLayout(world=2, tp=2, sp=True, etp=2), 8)


def test_deepseek_v3_has_its_own_blocks_in_usual_layouts() -> None:
    config = read_model_config("recipes/models/deepseek-v3")
    for sizes in ({"tp": 8, "ep": 8}, {"tp": 16, "ep": 4, "etp": 2}):
        check_base_block(config, ParallelLayout(world=64, sp=True, **sizes), 128)


def test_all_linear_weights_of_a_rank(folder: str) -> None:
    """Projections that a layer fuses are one matrix."""
    config, layout = read_model_config(folder), ParallelLayout(world=2, tp=2, sp=True, ep=2)
    pieces = megatron_pieces(
        config,
        MegatronPlace(2, 0, 2, 0, 1, 0),
        layers=layers_of(layout, config.num_layers, 0),
        first_stage=True,
        last_stage=True,
    )
    found = base_weights(pieces, linear_weights(config))
    assert found["0:decoder.layers.0.mlp.linear_fc1.weight"] == (96, 64)  # half of gate and half of up
    assert found["0:decoder.layers.1.mlp.experts.linear_fc1.weight3"] == (48, 64)
    assert found["0:decoder.layers.1.self_attention.linear_proj.weight"] == (64, 48)
    assert not [name for name in found if "router" in name or "embedding" in name or "output_layer" in name]


@pytest.mark.parametrize(("device", "strips"), [("cpu", 4), ("meta", 1)])
def test_a_weight_that_is_not_on_a_cpu_is_made_in_few_kernels(
    device: str, strips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on torch's device "meta" stand for a GPU's, where a kernel over a small strip is done before the next one is started."""
    seen = []
    spread = float8._spread

    def counted(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size, *start: Any) -> torch.Tensor:
        seen.append(tuple(shape))
        return torch.empty(shape, device=device) if device == "meta" else spread(scales, block, shape, *start)

    monkeypatch.setattr(float8, "_spread", counted)
    values = torch.zeros(2048, 2048, device=device).to(FP8)
    dequantise(values, torch.ones(16, 16, device=device), (128, 128), torch.bfloat16)
    assert len(seen) == strips and sum(rows for rows, _ in seen) == 2048
