"""A frozen base in float8 has the same results, bit for bit, as the same values in the model's own type."""

import gc
import json
import multiprocessing
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.tiny_model import make_tiny_model
from megarl import platform
from megarl.config.schema.models import LoraConfig
from megarl.gpu_test.slices import weight_by_torch
from megarl.layout.grid import ParallelLayout
from megarl.megatron.build import local_parameters, wrap_for_training
from megarl.megatron.heads.outputs import lm_head
from megarl.megatron.lora import fp8_base
from megarl.megatron.lora.lora import attach_adapters
from megarl.megatron.lora.merged import ExactWeights, MergedParameters
from megarl.megatron.offload import weights_of
from megarl.megatron.optimizer import build_optimizer
from megarl.megatron.step import train_step
from megarl.models import read_model_config
from megarl.models.float8 import FP8, SCALES
from tests.megatron.lora.test_lora import STEADY
from tests.megatron.parity import VOCAB, batches, load_model, loss_of
from tests.ranks import RankPool

BLOCK = 8
LORA = LoraConfig(rank=4, alpha=16, base_dtype="float8", base_block=BLOCK)
DORA = LoraConfig(rank=4, alpha=16, base_dtype="float8", base_block=BLOCK, use_dora=True)


def in_blocks(
    weight: torch.Tensor, scale_of: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """(float8 values, scales) of a matrix, computed block by block."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    values, scales = torch.empty(weight.shape, dtype=FP8), torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            at = tuple(slice(n * BLOCK, (n + 1) * BLOCK) for n in (row, column))
            scales[row, column] = scale_of(weight[at])
            values[at] = (weight[at] / scales[row, column]).to(FP8)
    return values, scales


def exact(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = scales.repeat_interleave(BLOCK, 0)[: len(values)].repeat_interleave(BLOCK, 1)
    return values.float() * wide[:, : values.shape[1]]


def is_linear(name: str) -> bool:
    return "proj" in name and name.endswith("weight")


@pytest.fixture(scope="module")
def folders_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str, str]]:
    """From a family to three folders: a model, the model after quantising and dequantising, and the model in float8.

    The last one's scales are powers of two, as in DeepSeek-V3.1: quantising again would choose other scales.
    """

    @cache
    def make(family: str) -> tuple[str, str, str]:
        plain, rounded, blocks = (tmp_path_factory.mktemp(name) for name in ("plain", "rounded", "blocks"))
        for folder in (plain, rounded, blocks):
            make_tiny_model(
                folder,
                ["two words"],
                vocab_size=VOCAB,
                hidden_size=64,
                ffn_hidden_size=96,
                num_layers=2,
                family=family,
                fields={"initializer_range": 0.1}
                | ({} if family == "qwen2" else {"moe_intermediate_size": 32}),
            )
        tensors = load_file(plain / "model.safetensors")
        changed, stored = dict(tensors), dict(tensors)
        for name in filter(is_linear, tensors):
            changed[name] = exact(*in_blocks(tensors[name], lambda part: part.abs().max() / 448))
            values, scales = in_blocks(
                tensors[name], lambda part: 2 ** (part.abs().max() / 300).log2().ceil()
            )
            stored |= {name: values, name + SCALES: scales}
        save_file(changed, rounded / "model.safetensors", metadata={"format": "pt"})
        save_file(stored, blocks / "model.safetensors", metadata={"format": "pt"})
        how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
        config = json.loads((blocks / "config.json").read_text())
        (blocks / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
        return str(plain), str(rounded), str(blocks)

    return make


def load(folder: str, layout: ParallelLayout, rank: int, block: int | None, **options: Any) -> list:
    return load_model(rank, folder, layout, base_block=block, **options)[1]


def _train(
    rank: int,
    world: int,
    folder: str,
    lora: LoraConfig,
    sizes: dict[str, Any],
    block: int | None,
    options: dict,
) -> tuple[list, dict[str, torch.Tensor]]:
    """Loss and gradient norm of two steps, and all tensors with adapters merged."""
    layout = ParallelLayout(world=world, **sizes)
    chunks = load(folder, layout, rank, block, **options)
    attach_adapters(chunks, read_model_config(folder), layout, lora)
    for name, tensor in local_parameters(chunks).items():
        if ".lora.b" in name:
            tensor.fill_(0.01)
    chunks = wrap_for_training(chunks)
    optimizer, scheduler = build_optimizer(chunks, STEADY)
    head = lm_head(vocab_size=VOCAB, chunk_tokens=16)
    history = []
    for _ in range(2):
        result = train_step(chunks, optimizer, scheduler, batches(layout), head, loss_of)
        history.append((result.stats["loss"], result.grad_norm))
    merged = MergedParameters(chunks)
    # The inputs from which kernels compute the weights give the same bits.
    assert all(torch.equal(weight_by_torch(one), merged[key]) for key, one in merged.computed().items())
    return history, {name: merged[name].detach().clone() for name in merged}


CASES = {
    "dense": ("qwen2", LORA, 1, {}, {}),
    "dense, recomputed": ("qwen2", LORA, 2, {"pp": 2}, {"recompute_granularity": "full"}),
    "experts": ("deepseek_v3", LORA, 2, {"tp": 2, "sp": True, "ep": 2, "etp": 1}, {}),
    "DoRA, bfloat16": ("deepseek_v3", DORA, 2, {"tp": 2, "sp": True, "etp": 2}, {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("name", CASES)
def test_computes_what_its_values_compute(
    ranks: RankPool, folders_of: Callable[[str], tuple[str, str, str]], name: str
) -> None:
    family, lora, world, sizes, options = CASES[name]
    plain, rounded, _ = folders_of(family)
    found = ranks.run(_train, plain, lora, sizes, BLOCK, options, world=world)
    expected = ranks.run(_train, rounded, lora, sizes, None, options, world=world)
    for (history, tensors), (wanted, weights) in zip(found, expected, strict=True):
        assert history == wanted and tensors.keys() == weights.keys()
        assert not [key for key in weights if not torch.equal(tensors[key], weights[key])]
    (unrounded, _), *_ = ranks.run(_train, plain, lora, sizes, None, options, world=world)
    assert unrounded != found[0][0], "rounding must show"


def _stored(rank: int, world: int, folder: str, block: int | None) -> dict[str, torch.Tensor]:
    layout = ParallelLayout(world=world, tp=2, sp=True, ep=2)
    chunks = load(folder, layout, rank, block)
    tensors = local_parameters(chunks)
    exact_tensors = ExactWeights(tensors, chunks)
    computed = exact_tensors.computed()
    assert set(computed) == {name for name, tensor in tensors.items() if tensor.dtype == FP8}
    assert all(torch.equal(weight_by_torch(one), exact_tensors[key]) for key, one in computed.items())
    found = {name: exact_tensors[name].clone() for name in exact_tensors}
    if block is not None:
        assert {name for name, tensor in tensors.items() if tensor.dtype == FP8}
        weights = weights_of(chunks)
        weights.offload()
        assert weights.device_bytes() == 0
        weights.reload()
        assert not [name for name in exact_tensors if not torch.equal(exact_tensors[name], found[name])]
    return found


def test_blocks_of_a_checkpoint_are_taken_as_they_are(
    ranks: RankPool, folders_of: Callable[[str], tuple[str, str, str]]
) -> None:
    """Blocks are not quantised again, which would change them. They leave the device and come back unchanged."""
    _, _, folder = folders_of("deepseek_v3")
    expected = ranks.run(_stored, folder, None, world=2)  # float32, like the checkpoint's values
    for tensors, wanted in zip(ranks.run(_stored, folder, BLOCK, world=2), expected, strict=True):
        assert tensors.keys() == wanted.keys()
        assert not [name for name in wanted if not torch.equal(tensors[name], wanted[name])]


def _memory(rank: int, world: int, folder: str) -> dict[str, float]:
    """Bytes of linear weights, and how many matrices exist unquantised at the same time: while the model is built
    (including embedding and head), and in training."""
    layout = ParallelLayout(world=world)
    made: list[tuple[weakref.ref, int]] = []
    most = {"building": 0, "training": 0}
    original = fp8_base.dequantise_all

    def count(weight: torch.Tensor, phase: str, number: int = 1) -> None:
        made.append((weakref.ref(weight.untyped_storage()), number))
        there = {reference(): number for reference, number in made if reference() is not None}
        most[phase] = max(most[phase], sum(there.values()))

    def dequantise_all(*args: Any) -> torch.Tensor:
        weights = original(*args)
        count(weights, "training", len(weights))
        return weights

    def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.dtype == torch.bfloat16 and parameter.dim() == 2:
            count(parameter, "building")

    hook = torch.nn.modules.module.register_module_parameter_registration_hook(register)
    chunks = load(folder, layout, rank, BLOCK, dtype=torch.bfloat16)
    hook.remove()
    made.clear()
    attach_adapters(chunks, read_model_config(folder), layout, LORA)
    held = {name: tensor for name, tensor in local_parameters(chunks).items() if tensor.dtype == FP8}
    elements = sum(tensor.numel() for tensor in held.values())
    size = sum(
        tensor.untyped_storage().nbytes() + local_parameters(chunks)[name + SCALES].untyped_storage().nbytes()
        for name, tensor in held.items()
    )
    del held
    chunks = wrap_for_training(chunks)
    optimizer, scheduler = build_optimizer(chunks, STEADY)
    gc.collect()
    fp8_base.dequantise_all = dequantise_all
    try:
        head = lm_head(vocab_size=VOCAB, chunk_tokens=16)
        train_step(chunks, optimizer, scheduler, batches(layout), head, loss_of)
    finally:
        fp8_base.dequantise_all = original
    return {"bytes per element": size / elements, **most}


def test_one_layer_at_a_time(ranks: RankPool, folders_of: Callable[[str], tuple[str, str, str]]) -> None:
    """A byte per element and a scale per block; in forward and backward passes at most one layer's weights are unquantised."""
    (dense,) = ranks.run(_memory, folders_of("qwen2")[0], world=1)
    assert dense["bytes per element"] == 1 + 4 / BLOCK**2
    assert dense["training"] == 1
    assert dense["building"] <= 4, "embedding, head and what is being made; not the 8 of the layers"
    (experts,) = ranks.run(_memory, folders_of("qwen3_moe")[0], world=1)
    assert experts["training"] == 8, "the experts of one layer"


class KeepingProduct(torch.autograd.Function):
    """x W^T. Like Transformer Engine's layers with a norm it keeps the parameter itself, in addition to the saved tensor."""

    kept: torch.nn.Parameter

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.weight = KeepingProduct.kept = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ ctx.saved_tensors[0], None


class KeepingLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KeepingProduct.apply(x, self.weight)


def test_a_weight_is_gone_between_the_passes_though_a_layer_holds_on_to_it() -> None:
    torch.manual_seed(0)
    layer = KeepingLinear(24, 16, bias=False)
    values, scales = in_blocks(layer.weight.detach(), lambda part: part.abs().max() / 448)
    fp8_base.hold_in_float8(layer, ["weight"], (BLOCK, BLOCK))
    layer.weight.data.copy_(values)
    layer.get_parameter("weight" + SCALES).data.copy_(scales)
    x = torch.randn(5, 24, requires_grad=True)
    out = layer(x)
    assert KeepingProduct.kept.untyped_storage().nbytes() == 0
    assert torch.equal(out, x @ exact(values, scales).t())
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 16) @ exact(values, scales))
    assert layer.weight.dtype == FP8 and layer.weight.shape == (16, 24)


def _alone(rendezvous: str, results: str, *args: Any) -> None:
    """Run `_train` in a process of its own, as a single rank with this machine's backend."""
    torch.distributed.init_process_group(
        platform.backend(), init_method=f"file://{rendezvous}", rank=0, world_size=1
    )
    history, tensors = _train(0, 1, *args)
    torch.save((history, {name: tensor.cpu() for name, tensor in tensors.items()}), results)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none")
@pytest.mark.parametrize("recompute", [None, "full"])
def test_adapters_on_a_gpu_are_those_on_the_dequantised_base(
    folders_of, tmp_path: Path, recompute: str | None
) -> None:
    """In bfloat16, with Transformer Engine's layers if installed: the same kernels on the same weights."""
    plain, rounded, _ = folders_of("qwen2")
    options = {"dtype": torch.bfloat16, "recompute_granularity": recompute}
    context, found = multiprocessing.get_context("spawn"), []
    for folder, block in ((plain, BLOCK), (rounded, None)):
        results = tmp_path / f"results-{block}"
        arguments = (str(tmp_path / f"meet-{block}"), str(results), folder, LORA, {}, block, options)
        process = context.Process(target=_alone, args=arguments)
        process.start()
        process.join(400)
        assert process.exitcode == 0
        found.append(torch.load(results))
    (history, tensors), (wanted, exact_tensors) = found
    assert history == wanted
    for name, tensor in exact_tensors.items():
        assert torch.equal(tensors[name], tensor), name
