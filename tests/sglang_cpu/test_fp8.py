"""A real SGLang engine with float8 blocks on the CPU, against Hugging Face with the dequantised weights."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from examples.tiny_model import make_tiny_model
from megarl.rollout.engine import EngineConfig
from tests.rollout.manifests import Slices, rank_slices
from tests.rollout.planned import assert_as_planned
from tests.rollout.runner import EngineProcess
from tests.rollout.sender import sync_slices
from tests.rollout.sglang.test_families import assert_serves

TP, EP, BLOCK, SCALES = 2, 2, 16, "_scale_inv"
KEPT = ("norm", "embed_tokens", "lm_head", "mlp.gate.")


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float8 values, scales = amax / 448 of each block, and values * scales."""
    values, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), []
    product = torch.empty_like(weight)
    for row in range(0, weight.shape[0], BLOCK):
        scales.append([])
        for column in range(0, weight.shape[1], BLOCK):
            here = slice(row, row + BLOCK), slice(column, column + BLOCK)
            scale = weight[here].abs().max() / 448
            values[here] = (weight[here] / scale).to(torch.float8_e4m3fn)
            product[here] = values[here].float() * scale
            scales[-1].append(scale)
    return values, torch.tensor(scales), product


def quantised_slices(folder: Path, plain: Path) -> list[Slices]:
    """The slices that the engine's ranks take of the model in `folder`; its dequantised weights are written to `plain`."""
    shutil.copytree(folder, plain)
    config, state = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    scales, products = {}, dict(state)
    for name in [name for name in state if not any(part in name for part in KEPT)]:
        state[name], scales[name], products[name] = quantise(state[name])
    save_file(products, plain / "model.safetensors", metadata={"format": "pt"})
    in_blocks = copy.deepcopy(config)
    in_blocks.q_lora_rank //= BLOCK
    both = []
    for rank in range(TP):
        slices = rank_slices(state, config, TP, rank, EP)
        for name, local, start, value in rank_slices(scales, in_blocks, TP, rank, EP).entries:
            slices.entries.append((name + SCALES, local + SCALES, start, value))
        both.append(slices)
    return both


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model with latent attention, whose second low-rank projection ends within a block; experts, dense and shared ones."""
    sizes = {"initializer_range": 0.2, "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 16}
    return make_tiny_model(
        tmp_path / "model",
        ["some text"],
        family="deepseek_v3",
        vocab_size=330,
        hidden_size=64,
        num_layers=2,
        ffn_hidden_size=96,
        max_position_embeddings=128,
        fields=sizes,
    )


def test_answers_as_hugging_face_with_the_weights_multiplied_out(folder, tmp_path):
    config = EngineConfig(
        str(folder),
        tensor_parallel_size=TP,
        expert_parallel_size=EP,
        fp8_block=(BLOCK, BLOCK),
        max_num_seqs=8,
        max_total_tokens=1024,
    )
    slices = quantised_slices(folder, tmp_path / "plain")
    engine = EngineProcess(config, tmp_path / "engine.log").start()
    try:
        sync_slices(engine, tmp_path / "sync", slices, version=1)
        assert_serves(engine, tmp_path / "plain")
        assert_as_planned(engine)
    finally:
        engine.close()
