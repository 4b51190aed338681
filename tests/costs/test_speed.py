"""Seconds by formulas against numbers worked out by hand, and pipelines against schedules played through pass by pass."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.config.schema.models import MuonConfig
from megarl.costs.engine import Draft, EngineLoad, ServedModel, _batches, _scale, generation, spread
from megarl.costs.floors import generation_floor
from megarl.costs.flops import ModelFlops, causal_pairs, model_flops, prediction_flops
from megarl.costs.hardware import SECONDS, TABLE, Assumptions, find_hardware, read_assumptions
from megarl.costs.layer_kernels import decode_kernels, launches
from megarl.costs.muon import busiest, gathered, operations
from megarl.costs.pipeline import bubble, pass_time, pipeline_seconds
from megarl.costs.speed import Machine, Passes
from megarl.layout.grid import ParallelLayout
from megarl.models import ModelConfig, read_model_config
from megarl.weight_sync.layouts import EngineLayout

MODELS = Path(__file__).resolve().parents[2] / "recipes/models"
# A GPU with round figures; every peak is reached.
ALL = Assumptions(**dict.fromkeys(vars(Assumptions()), 1.0) | dict.fromkeys(SECONDS, 0.0))
ROUND = replace(TABLE["H100"], bf16=1e15, fp8=2e15, hbm=1e12, nvlink=1e11, nic=1e10, host=1e10)
MACHINE = Machine(ROUND, ALL, per_node=8)
COMPUTES = Machine(replace(ROUND, hbm=1e24), ALL, per_node=8)  # reading and writing takes no time


def model(name: str) -> tuple[ModelConfig, ModelFlops]:
    config = read_model_config(str(MODELS / name))
    return config, model_flops(config)


def passes(name: str, machine: Machine = MACHINE, **sizes) -> Passes:
    names = (
        "trained",
        "recompute",
        "recompute_modules",
        "on_host",
        "itemsize",
        "fused",
        "float8",
        "bf16_ends",
        "fsdp",
        "predicted",
        "detached",
        "indexers",
    )
    how = {key: sizes.pop(key) for key in names if key in sizes}
    config, flops = model(name)
    return Passes(config, flops, ParallelLayout(**sizes), machine, **how)


def test_one_gpu_computes_and_sends_nothing() -> None:
    """Attention takes 2.5 times as long backward as forward; logits are computed a second time, except the last 1 GiB of them."""
    config, flops = model("qwen2.5-0.5b")
    assert passes("qwen2.5-0.5b", COMPUTES, world=1).stages(1000, 99) == [
        pytest.approx(1000 * flops.forward(pairs=50) / 1e15)
    ]
    head, pairs = (
        2 * config.vocab_size * config.hidden_size,
        24 * 2 * 14 * 128 * 50,
    )  # layers, heads, keys and values
    (trained,) = passes("qwen2.5-0.5b", COMPUTES, world=1, trained="weights").stages(1000, 99)
    assert trained == pytest.approx(1000 * (3 * 2 * flops.active + 3.5 * pairs) / 1e15)
    (more,) = passes("qwen2.5-0.5b", COMPUTES, world=1, trained="weights").stages(5000, 99)
    kept = 2**30 // (2 * config.vocab_size)  # 3,533 tokens
    assert more == pytest.approx(5 * trained + (5000 - kept) * head / 1e15)
    (again,) = passes("qwen2.5-0.5b", COMPUTES, world=1, trained="weights", recompute="full").stages(1000, 99)
    assert again - trained == pytest.approx(1000 * (flops.forward(pairs=50) - head) / 1e15)
    (adapted,) = passes("qwen2.5-0.5b", COMPUTES, world=1, trained="adapters").stages(1000, 99)
    assert adapted == pytest.approx(1000 * (2 * 2 * flops.active + 3.5 * pairs) / 1e15)


def test_layers_in_float8_take_half_the_time_but_for_attention_and_head() -> None:
    """The first and the last two of 24 layers are in bfloat16: their matrices take bfloat16's time, as do head and attention."""
    config, flops = model("qwen2.5-0.5b")
    head, pairs = 2 * config.vocab_size * config.hidden_size, 24 * 2 * 2 * 14 * 64 * 50
    matrices = 2 * flops.active - head
    for ends, part in (((0, 0), 1.0), ((1, 2), 21 / 24)):
        (found,) = passes("qwen2.5-0.5b", COMPUTES, world=1, float8=True, bf16_ends=ends).stages(1000, 99)
        assert found == pytest.approx(1000 * (head + pairs + matrices * (1 - part / 2)) / 1e15)
    assumed = Machine(COMPUTES.gpu, replace(ALL, float8=0.5), per_node=8)
    (slower,) = passes("qwen2.5-0.5b", assumed, world=1, float8=True).stages(1000, 99)
    assert slower == pytest.approx(1000 * (head + pairs + matrices) / 1e15)


def test_inputs_are_quantised_before_they_are_multiplied() -> None:
    """Inputs are read in bfloat16, and a byte is written for each orientation: per token, the inputs of four linear layers in each of 24 layers."""
    inputs = 24 * (896 + 896 + 896 + 4864)
    sizes = {"world": 1, "machine": Machine(replace(ROUND, bf16=1e24, fp8=1e24), ALL, per_node=8)}
    for trained, each in ((None, 2 + 1), ("weights", 2 + 1 + 1)):
        one, other = (
            passes("qwen2.5-0.5b", trained=trained, float8=there, **sizes) for there in (True, False)
        )
        found = [run.layer(run.flops.layers[0], 1000, 99, run.float8).between * 24 for run in (one, other)]
        assert found[0] - found[1] == pytest.approx(1000 * inputs * each / 1e12)


def test_a_gpu_without_float8_is_told() -> None:
    config, flops = model("qwen2.5-0.5b")
    with pytest.raises(
        ValueError, match=r"--hardware A100 has no products in float8, which megatron\.fp8 asks for"
    ):
        Passes(config, flops, ParallelLayout(world=1), Machine(TABLE["A100"], ALL, 8), float8=True).stages(
            9, 9
        )


def test_indexers_that_learn_take_longer() -> None:
    """Only in the backward pass: by the operations of their loss, on a machine where only computing takes time."""
    plain, learns = (
        passes("deepseek-v3.2", COMPUTES, world=64, ep=64, trained="weights", indexers=indexers)
        for indexers in (False, True)
    )
    layer = plain.flops.layers[0]
    before, after = (run.layer(layer, 10**6, 8192) for run in (plain, learns))
    assert before.forward == after.forward
    operations = 10**6 * layer.learning(causal_pairs(8192))
    assert learns._both(after) - plain._both(before) == pytest.approx(operations / 1e15)


def test_layers_of_multi_token_prediction_are_of_the_last_stage() -> None:
    """Each adds a layer's passes, with the projection before it as one of its matrices, and the head's; detached, without the head's gradient."""
    predicted = prediction_flops(read_model_config(str(MODELS / "deepseek-v3")))
    how = {"world": 64, "pp": 4, "ep": 16, "first_layers": 16, "last_layers": 15, "trained": "weights"}
    plain = passes("deepseek-v3", COMPUTES, **how)
    further, whole = (
        passes("deepseek-v3", COMPUTES, predicted=predicted, detached=detached, **how)
        for detached in (True, False)
    )
    found = [run.stages(10**6, 99) for run in (plain, further, whole)]
    assert found[0][:3] == found[1][:3] == found[2][:3]
    head = 2 * 10**6 * plain.flops.head / 1e15
    assert found[2][3] - found[1][3] == pytest.approx(head, rel=1e-3)
    layer = plain._both(plain.layer(predicted[0], 10**6, 99))
    again = (10**6 - 2**30 // (2 * 129280)) * 2 * plain.flops.head / 1e15
    assert found[1][3] - found[0][3] == pytest.approx(layer + 2 * head + again, rel=1e-2)
    # Its gradients and states count as others do, where the last stage has more weights than any other.
    assert further.stage_weights[0][-1] > plain.stage_weights[0][-1]


def test_what_is_read_and_written_beside_the_matrices_takes_time() -> None:
    """Qwen2.5-0.5B, forward, bfloat16. Bytes per element: two norms 4 (torch's own 36), two residuals 6, a rotation 4 (or 22), a gated unit
    6 (or 10), logits 4. Each of 24 layers has a hidden size of 896, 14 + 2 heads of 64 and an MLP of width 4864."""
    _, flops = model("qwen2.5-0.5b")
    endless = Machine(replace(ROUND, bf16=1e24), ALL, per_node=8)
    whole = 151936 * 4
    for fused, norm, rotation, gate in ((True, 4, 4, 6), (False, 36, 22, 10)):
        layer = 2 * 896 * (norm + 6) + 16 * 64 * rotation + 4864 * gate
        (found,) = passes("qwen2.5-0.5b", endless, world=1, fused=fused).stages(10**6, 99)
        matrices = 2 * sum(each.dense for each in flops.layers)  # read once
        assert found == pytest.approx((10**6 * (24 * layer + whole) + matrices) / 1e12)


def test_matrices_take_as_long_as_their_weights_are_read() -> None:
    """For one token; in training, every layer's gradients are read and written in float32."""
    _, flops = model("qwen2.5-7b")
    run = passes("qwen2.5-7b", world=1)
    found = run.layer(flops.layers[0], 1, 99)
    assert found.matrices == pytest.approx(2 * flops.layers[0].dense / 1e12) and found.summed == 0
    trained = passes("qwen2.5-7b", world=1, trained="weights").layer(flops.layers[0], 1, 99)
    assert trained.summed == pytest.approx(8 * flops.layers[0].dense / 1e12)


def test_small_shares_of_tokens_leave_tiles_empty() -> None:
    """Qwen3-30B-A3B: of 1024 tokens on one rank each of 128 experts gets 64, and on average computes half of a tile of 128 more."""
    _, flops = model("qwen3-30b-a3b")
    layer = flops.layers[0]
    found = passes("qwen3-30b-a3b", COMPUTES, world=1).layer(layer, 1024, 99).matrices
    assert found == pytest.approx(2 * 1024 * (layer.dense + layer.active * (64 + 64) / 64) / 1e15)
    more = passes("qwen3-30b-a3b", COMPUTES, world=8, ep=8).layer(layer, 1024, 99).matrices
    assert more == pytest.approx(2 * 1024 * (layer.dense + layer.active * (512 + 64) / 512) / 1e15)


def test_tensor_parallel_ranks_share_the_work_and_gather_hidden_states() -> None:
    one, two = passes("qwen2.5-7b", COMPUTES, world=1), passes("qwen2.5-7b", COMPUTES, world=2, tp=2, sp=True)
    sent = (
        28 * 4 * (1000 * 3584 * 2) / 2 / 1e11
    )  # layers; two gathered, two scattered, half of each from the other rank
    assert two.stages(1000, 99)[0] == pytest.approx(one.stages(1000, 99)[0] / 2 + sent)
    far = passes("qwen2.5-7b", replace(COMPUTES, per_node=1), world=2, tp=2, sp=True)
    assert far.stages(1000, 99)[0] == pytest.approx(one.stages(1000, 99)[0] / 2 + 10 * sent)


def test_modules_are_computed_again_with_their_messages() -> None:
    """DeepSeek-V3, whose first layers are dense: two tensor parallel ranks, experts over eight ranks; reading takes no time."""
    config, flops = model("deepseek-v3")
    dense, moe = flops.layers[0], flops.layers[-1]
    hidden, expert = config.hidden_size, 3 * config.hidden_size * config.moe.ffn_hidden_size
    up = (
        config.mla.q_lora_rank * 128 * 192 + config.mla.kv_lora_rank * 128 * 256
    )  # queries; keys and values, of 128 heads
    around = 2 * 1000 * hidden * 2 / 2 / 1e11  # gathered and scattered, half of it from the other rank

    def again(layer, *modules, trained="weights"):
        sizes = {"world": 8, "tp": 2, "sp": True, "ep": 8, "trained": trained}
        run = passes("deepseek-v3", COMPUTES, recompute="selective", recompute_modules=modules, **sizes)
        return run.layer(layer, 1000, 99).again

    assert again(moe, "layernorm", "moe_act") < 1e-14  # only moves values
    assert again(moe, "core_attn") == pytest.approx(moe.pair * 50 * 1000 / 2 / 1e15)
    for layer in (moe, dense):
        assert again(layer, "mla_up_proj") == pytest.approx(2 * up * 1000 / 2 / 1e15)
    assert again(dense, "mlp") == pytest.approx(2 * 3 * hidden * 18432 * 1000 / 2 / 1e15 + around)
    assert again(moe, "mlp") < 1e-14 and again(dense, "moe", "shared_experts") < 1e-14
    assert again(moe, "shared_experts") == pytest.approx(2 * expert * 1000 / 2 / 1e15 + around)
    # Eight of 256 experts for each token: with 500 tokens on each of 8 ranks an expert gets 125, and computes half of a tile more.
    routed = 2 * 8 * expert * 500 * (125 + 64) / 125 / 1e15
    sent = 2 * 500 * 8 * hidden * 2 * 7 / 8 / 1e11
    both = again(moe, "shared_experts") + routed + sent
    for modules in (("moe",), ("moe", "shared_experts")):
        assert again(moe, *modules) == pytest.approx(both)
    # A step has the forward pass, a backward pass of twice the matrices and 2.5 times attention, and the recomputation.
    run = passes(
        "deepseek-v3", COMPUTES, world=1, trained="weights", recompute="selective", recompute_modules=("mlp",)
    )
    without = passes("deepseek-v3", COMPUTES, world=1, trained="weights")
    (more,), (less,) = run.stages(1000, 99), without.stages(1000, 99)
    assert more - less == pytest.approx(3 * 2 * 3 * hidden * 18432 * 1000 / 1e15)  # three dense layers


def test_experts_get_their_tokens_from_the_ranks_of_their_group() -> None:
    """Qwen3-30B-A3B: 48 layers, 8 experts per token, a hidden size of 2048."""
    _, flops = model("qwen3-30b-a3b")
    near = passes("qwen3-30b-a3b", world=8, ep=8).layer(flops.layers[0], 1000, 99)
    assert near.sent == pytest.approx(2 * 1000 * 8 * 2048 * 2 * 7 / 8 / 1e11)
    over = passes("qwen3-30b-a3b", world=16, ep=16).layer(flops.layers[0], 1000, 99)  # half leave their node
    assert over.sent == pytest.approx(2 * 1000 * 8 * 2048 * 2 / 2 / 1e10)


def test_gradients_and_weights_travel_between_replicas() -> None:
    config, flops = model("qwen2.5-7b")
    matrices = sum(layer.dense for layer in flops.layers) + flops.head
    run = passes("qwen2.5-7b", world=8, trained="weights")
    assert run.reduce_seconds() == pytest.approx(matrices * (4 + 2) * 7 / 8 / 1e11)
    # Two nodes: each GPU sends an eighth of its node's outgoing traffic through a network card of its own.
    assert passes("qwen2.5-7b", world=16, trained="weights").reduce_seconds() == pytest.approx(
        matrices * (4 + 2) * 15 / 16 / 8e10
    )
    cut = passes(
        "qwen2.5-7b", world=16, tp=8, trained="weights"
    ).reduce_seconds()  # one data parallel rank per node
    assert cut == pytest.approx(matrices / 8 * (4 + 2) / 2 / 1e10)
    assert passes("qwen2.5-7b", world=1, trained="weights").reduce_seconds() == 0.0
    assert config.num_layers == 28


def test_shared_weights_travel_with_every_micro_batch() -> None:
    """Qwen2.5-7B with 28 layers on eight ranks, by the traffic of ZeRO's stages (arXiv:1910.02054, section 7): a rank gets 7/8 of the weights
    (2 bytes) before each pass and 7/8 of the gradients (4 bytes) after it, over 100 GB/s, one layer's data at a time."""
    _, flops = model("qwen2.5-7b")
    bytes_of_one = (sum(layer.dense for layer in flops.layers) + flops.head) * 7 / 8 / 1e11
    alone = passes("qwen2.5-7b", COMPUTES, world=1).stages(1000, 99)[
        0
    ]  # forward, 15 ms: less than gathering the weights takes
    head = 2 * flops.head * 1000 / 1e15
    assert alone < 2 * bytes_of_one

    def shared(
        level: str | None, tokens: int, trained: str | None = "weights", machine: Machine = COMPUTES
    ) -> Passes:
        return passes("qwen2.5-7b", machine, world=8, trained=trained, fsdp=level)

    # In evaluation, gathering takes longer than computing; only the last layer is computed after it.
    (found,) = shared("optim_grads_params", 1000, None).stages(1000, 99)
    assert found == pytest.approx(2 * bytes_of_one + alone / 28)
    (usual,) = shared(None, 1000).stages(1000, 99)
    back = usual - (alone - head)  # with the head, forward and backward
    (found,) = shared("optim_grads_params", 1000).stages(1000, 99)
    assert found == pytest.approx(2 * bytes_of_one + (alone - head) / 28 + 6 * bytes_of_one + back / 28)
    (found,) = shared("optim_grads", 1000).stages(1000, 99)
    assert found == pytest.approx(alone - head + 4 * bytes_of_one + back / 28)
    # With more tokens, computing takes longer than transfers; only the first layer's gathering and the last one's gradients add to it.
    (usual,) = shared(None, 200_000).stages(200_000, 99)
    (found,) = shared("optim_grads_params", 200_000).stages(200_000, 99)
    assert found - usual == pytest.approx((2 + 6) * bytes_of_one / 28)
    # After the optimizer's step, weights are gathered where every rank holds them unsharded.
    seconds = {
        level: shared(level, 1).reduce_seconds() for level in (None, "optim_grads", "optim_grads_params")
    }
    expected = {None: 6, "optim_grads": 2, "optim_grads_params": 0}
    assert seconds == {level: pytest.approx(size * bytes_of_one) for level, size in expected.items()}


def test_states_on_the_host_come_while_others_go_back() -> None:
    """12 bytes per weight in each direction, 8 per float32 weight, over a link of 10 GB/s; the GPU's memory has 1 TB/s."""
    _, flops = model("qwen2.5-7b")
    matrices = sum(layer.dense for layer in flops.layers)
    usual = passes("qwen2.5-7b", world=8, trained="weights")
    assert usual.adam_seconds() == pytest.approx(matrices / 8 * (4 + 2 * 12 + 2) / 1e12)
    for itemsize, size in ((2, 12), (4, 8)):
        run = passes("qwen2.5-7b", world=8, trained="weights", on_host=True, itemsize=itemsize)
        assert run.adam_seconds() == pytest.approx(matrices / 8 * size / 1e10)


def test_muon_has_one_state_less_and_three_products_a_step() -> None:
    """Five steps of 4 m^2 n + 2 m^3 operations at the assumed speed of products, on the rank with the most. The largest
    matrices are assigned first."""
    muon, square, wide = (
        MuonConfig(),
        ("0:l.linear_proj.weight", (64, 32), False),
        ("0:l.mlp.router.weight", (8, 64), False),
    )
    assert operations(square, muon, 2, 1) == 5 * (4 * 64**3 + 2 * 64**3)  # both ranks' shards together
    assert operations(square, replace(muon, tp_mode="blockwise"), 2, 1) == 5 * (4 * 32**2 * 64 + 2 * 32**3)
    assert operations(square, replace(muon, tp_mode="distributed"), 2, 1) == 5 * (4 * 64**2 * 32 + 2 * 64**3)
    assert gathered(square, muon, 2, 1) == 4 * 64 * 64 / 2
    assert gathered(square, replace(muon, tp_mode="distributed"), 2, 1) == 5 * 2 * 2 * 64 * 64 / 2
    assert gathered(wide, muon, 2, 1) == 0
    most, received = busiest([square, wide, square], muon, 2, 1, (2, 1))
    assert (most, received) == (5 * 6 * 64**3 + operations(wide, muon, 2, 1), 4 * 64 * 64 / 2)
    _, flops = model("qwen2.5-7b")
    matrices = sum(layer.dense for layer in flops.layers)
    run = passes("qwen2.5-7b", world=8, trained="weights")
    took = replace(run, muon=(1e12, 0.0)).adam_seconds()
    computed = 1e12 / (run.machine.gpu.bf16 * run.machine.assumed.matmul)
    assert took == pytest.approx(matrices / 8 * (4 + 2 * 8 + 2) / 1e12 + computed)


def test_a_mini_batch_is_cut_into_micro_batches() -> None:
    run = passes("qwen2.5-7b", world=4, tp=1, pp=2, trained="weights")
    time = pass_time(run, rows=64, length=1000, most=4096, most_rows=None, updates=3)
    assert time.micro_batches == 8  # 32 texts per rank, 4 at a time
    assert time.bubble == pytest.approx(1 / 9)
    stages = run.stages(4000, 1000)
    assert time.seconds == pytest.approx(3 * (8 * max(stages) + min(stages)))
    assert pass_time(run, 64, 1000, None, 2).micro_batches == 16


def served(name: str, tp: int, weights: int, token: int, machine: Machine = MACHINE, **how) -> ServedModel:
    config, flops = model(name)
    return ServedModel(config, flops, EngineLayout(tp, 1, num_engines=1), machine, weights, token, **how)


def test_a_decode_step_reads_weights_and_cache() -> None:
    """Qwen2.5-7B: 7,615,616,512 parameters, 152064 x 3584 of them an embedding; 28 layers, 4 key heads of 128."""
    weights, token = 2 * 7_615_616_512, 2 * 28 * 4 * 128 * 2
    engine = served("qwen2.5-7b", 1, weights, token)
    read = weights - 2 * 152064 * 3584 + 16 * 1000 * token
    assert sum(engine.step_bytes(16, 1000)) == pytest.approx(read)
    sampled = 152064 * 24 / 1e12  # seconds per text, for its logits
    assert engine.step_seconds(16, 1000) == pytest.approx(read / 1e12 + 16 * sampled)
    parts = Machine(ROUND, replace(ALL, hbm=0.5, cache=0.25), 8)
    slow = served("qwen2.5-7b", 1, weights, token, parts).step_seconds(16, 1000)
    cache = 16 * 1000 * token
    assert slow == pytest.approx((2 * (read - cache) + 4 * cache) / 1e12 + 32 * sampled)
    computed = 8192 * (2 * (7_615_616_512 - 152064 * 3584 - 28 * 2 * 3584 - 3584 - 28 * 4608) + 28 * 28 * 512)
    assert engine.step_seconds(8192, 1) == pytest.approx(computed / 1e15 + 8192 * sampled, rel=1e-6)


def test_few_tokens_touch_few_experts() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts, each of 3 x 2048 x 768 weights, in 48 layers; a byte per weight in float8."""
    experts, rest = 48 * 128 * 3 * 2048 * 768, 3_000_000_000
    engine = served("qwen3-30b-a3b", 1, experts + rest, 0, quantized=True)
    others = rest - 2 * 151936 * 2048
    for batch, part in ((1, 8 / 128), (2, 1 - (120 / 128) ** 2), (10_000, 1.0)):
        assert engine.step_bytes(batch, 0) == (pytest.approx(others), pytest.approx(experts * part), 0)


def test_a_group_of_data_parallel_attention_reads_the_cache_of_its_own_texts() -> None:
    """A group also samples for its own texts only; hidden states travel to their experts and back over all ranks, and within a group."""
    config, flops = model("qwen3-30b-a3b")
    machine = Machine(ROUND, replace(ALL, latency=1e-3), per_node=8)
    one, two, four = (
        ServedModel(config, flops, EngineLayout(4, 1, dp=dp), machine, 20_000_000_000, 1000)
        for dp in (1, 2, 4)
    )
    for engine, part in ((one, 1), (two, 2), (four, 4)):
        dense, experts, cache = engine.step_bytes(64, 500)
        assert (experts, cache) == (pytest.approx(one.step_bytes(64, 500)[1]), 64 * 500 * 1000 / part)
        embedding = 2 * 151936 * 2048 * part / 4  # sharded over a group's ranks; not the head
        full = sum(layer.experts for layer in flops.layers) / 4 * 2
        assert dense == pytest.approx(20_000_000_000 - full - embedding)
    moved = 2048 * 2 * 64 / machine.link(1)  # a sum over n ranks moves 2 (n - 1) / n of it
    latency = 1e-3
    assert one._sent(64, waits=True) == pytest.approx(48 * 2 * (1.5 * moved + latency))
    assert two._sent(64, waits=True) == pytest.approx(48 * (1.5 * moved + 2 * latency + moved / 2 + latency))
    assert four._sent(64, waits=True) == pytest.approx(48 * (1.5 * moved + 2 * latency))


def test_an_engine_is_as_slow_as_its_longest_text() -> None:
    """Waiting texts take the places of texts that end; when none waits, the batch shrinks."""
    engine = served("qwen2.5-7b", 1, 15_000_000_000, 57344)
    few = generation(engine, EngineLoad(4, 4, prompt=50, mean=200, longest=400, running=10))
    assert few.prefill == pytest.approx(4 * 50 * engine.flops.forward(25.5) / 1e15)
    assert 200 < few.steps <= 400 and few.batch == pytest.approx(800 / few.steps)
    many = generation(engine, EngineLoad(100, 10, prompt=50, mean=200, longest=400, running=10))
    # 90 texts wait for ten places; the last ten take as many steps as the longest text may have.
    assert many.steps == pytest.approx(90 * 200 / 10 + 400)
    waiting, tail = 1800 * engine.step_seconds(10, 150), many.decode - 1800 * engine.step_seconds(10, 150)
    assert 400 * engine.step_seconds(1, 50) < tail < 400 * engine.step_seconds(10, 450) < waiting
    same = generation(engine, EngineLoad(10, 10, prompt=50, mean=400, longest=400, running=10))
    assert same.steps == 400 and same.decode == pytest.approx(400 * engine.step_seconds(10, 250))


def test_drafted_tokens_are_checked_together_and_some_are_accepted() -> None:
    """A step of three drafted tokens reads weights and cache once, samples four times, and yields 2.5 tokens per text."""
    weights, token, read = 15_000_000_000, 57344, 10**9
    plain = served("qwen2.5-7b", 1, weights, token)
    drafting = served("qwen2.5-7b", 1, weights, token, draft=Draft(3, read, 2.5))
    sampled = 152064 * 24 / 1e12
    assert drafting.step_seconds(16, 1000) == pytest.approx(
        plain.step_seconds(16, 1000) + 16 * 3 * sampled + 3 * read / 1e12
    )
    assert drafting.step_operations(16, 1000) == 4 * plain.step_operations(16, 1000)
    few = {"prompt": 50, "mean": 400, "longest": 400, "running": 10}
    found, without = (generation(engine, EngineLoad(10, 10, **few)) for engine in (drafting, plain))
    assert found.steps == pytest.approx(without.steps / 2.5) and found.batch == pytest.approx(without.batch)
    assert found.decode == pytest.approx(160 * drafting.step_seconds(10, 250))
    assert found.prefill == without.prefill
    least = generation_floor(drafting, EngineLoad(10, 10, 50, 400, 400, 10))
    assert least.decode < found.decode and least.steps == pytest.approx(160)
    # It reads as many experts as four times as many texts do without a draft.
    experts = {"draft": Draft(3, 0.0, 1.0), "quantized": True}
    mixture = served("qwen3-30b-a3b", 1, 48 * 128 * 3 * 2048 * 768 + 10**9, 0, **experts)
    alone = served("qwen3-30b-a3b", 1, 48 * 128 * 3 * 2048 * 768 + 10**9, 0, quantized=True)
    assert mixture.step_bytes(2, 0) == alone.step_bytes(8, 0)


@pytest.mark.parametrize("mean", [0.2, 0.5, 0.8])
def test_lengths_are_drawn_until_the_longest(mean: float) -> None:
    """Against a million drawn lengths: the number of texts that have not ended, and the spread of lengths."""
    draws = np.random.default_rng(1).exponential(_scale(mean, 1.0), 10**6).clip(max=1.0)
    assert draws.mean() == pytest.approx(mean, rel=3e-3)
    assert spread(mean, 1.0) == pytest.approx(draws.std() / draws.mean(), rel=3e-3)
    parts = list(_batches(1000, mean * 400, 400, 1000))
    assert sum(steps for steps, _, _ in parts) == pytest.approx(400)
    for _, batch, age in parts:
        assert batch == pytest.approx(max(1, 1000 * (draws > age / 400).mean()), rel=0.02, abs=1)


def test_what_takes_time_whatever_its_size() -> None:
    """A pass of few tokens takes as long as its kernel launches in Python; an engine's step, as long as its collectives and kernels."""
    slow = Machine(ROUND, replace(ALL, latency=1e-5, step=1e-3, dispatch=1e-3, kernel=1e-4), 8)
    run = passes("qwen2.5-7b", slow, world=1)
    assert run.layer(run.flops.layers[0], 1, 1).forward == pytest.approx(24 * 1e-3)
    fast, beside = served("qwen2.5-7b", 2, 10**10, 0), served("qwen2.5-7b", 2, 10**10, 0, machine=slow)
    launched = 28 * 14 * 1e-4
    assert beside.step_seconds(1, 1) - fast.step_seconds(1, 1) == pytest.approx(
        1e-3 + 28 * 2 * 1e-5 + launched
    )


def test_collectives_between_nodes_wait_longer() -> None:
    machine = Machine(ROUND, replace(ALL, latency=1e-5, hop=1e-6), 8)
    assert [machine.latency(ranks) for ranks in (2, 8, 16, 32)] == pytest.approx([1e-5, 1e-5, 1.2e-5, 1.4e-5])
    assert [machine.ring(8, 1), machine.ring(16, 1), machine.ring(2, 8)] == [1e11, 8e10, 1e10]


def test_kernels_of_a_layer() -> None:
    """By hand, for grouped queries with an MLP, and for latent attention with an MLP or with experts and shared experts."""
    qwen, deepseek = model("qwen2.5-7b"), model("deepseek-v3")
    assert decode_kernels(qwen[0], qwen[1].layers[0]) == 10 + 4
    assert decode_kernels(deepseek[0], deepseek[1].layers[0]) == 10 + 6 + 4
    assert decode_kernels(deepseek[0], deepseek[1].layers[-1]) == 10 + 6 + 4 + 14
    assert launches(deepseek[0], deepseek[1].layers[-1], 16) == 18 + 10 + 6 + 40 + 8


def test_links_are_parts_of_peaks() -> None:
    machine = Machine(TABLE["H100"], Assumptions(nvlink=0.5, nic=0.25, host=0.5), 8)
    assert machine.link(8) == machine.links["intra_node"] == 225e9
    assert machine.link(9) == machine.links["inter_node"] == 12.5e9
    assert machine.host == 32e9


def test_hardware_and_assumptions_by_name() -> None:
    assert find_hardware("h200").hbm == 4.8e12
    assert TABLE["A100"].fp8 is None
    for gpu in TABLE.values():  # float8 is twice as fast as bfloat16
        assert gpu.fp8 is None or gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=1e-3)
    assert read_assumptions(["matmul=0.3", "latency=0"]) == Assumptions(matmul=0.3, latency=0)
    for text, message in (
        ("matmull=0.3", "did you mean matmul"),
        ("matmul=x", "'x' is not a number"),
        ("matmul=0", "over 0 and at most 1"),
        ("hbm=1.5", "over 0 and at most 1"),
        ("latency=-1", "at least 0"),
    ):
        with pytest.raises(ValueError, match=message):
            read_assumptions([text])
    with pytest.raises(ValueError, match=r"--hardware V100 is not in the table.*H100, H200, H20, A100, B200"):
        find_hardware("V100")


def test_the_page_has_the_same_tables() -> None:
    """docs/planning.md: hardware and assumptions."""
    page = (MODELS.parents[1] / "docs/planning.md").read_text()
    for gpu in TABLE.values():
        peaks = [None if peak is None else peak / 1e12 for peak in (gpu.bf16, gpu.fp8, gpu.hbm)]
        links = [link / 1e9 for link in (gpu.nvlink, gpu.nic, gpu.host)]
        cells = ["-" if value is None else f"{value:g}" for value in (gpu.memory_gib, *peaks, *links)]
        assert f"| {gpu.name} | {' | '.join(cells)} |" in page
    for name, value in vars(Assumptions()).items():
        assert f"| `{name}` | {value:g} | " in page


FORWARD, BACKWARD = 2, 4


def order(stage: int, stages: int, micro_batches: int, chunks: int) -> list[tuple[str, int, int]]:
    """The passes of a stage as (kind, chunk, micro-batch): 1F1B, interleaved where there are chunks, after Narayanan et al.
    2021, figures 3 and 4."""
    total = micro_batches * chunks
    first = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    first = min(first, total)

    def place(kind: str, number: int) -> tuple[str, int, int]:
        group, rest = divmod(number, stages * chunks)
        chunk = rest // stages if kind == "forward" else chunks - 1 - rest // stages
        return kind, chunk, group * stages + rest % stages

    if chunks == 1:

        def place(kind: str, number: int) -> tuple[str, int, int]:
            return kind, 0, number

    passes = [place("forward", number) for number in range(first)]
    for number in range(total - first):
        passes += [place("forward", first + number), place("backward", number)]
    return passes + [place("backward", number) for number in range(total - first, total)]


def played(times: list[tuple[float, float]], micro_batches: int, chunks: int = 1) -> float:
    """Seconds until all passes are done, if each stage takes its `times` (forward, backward) for a micro-batch."""
    stages = len(times)
    queues = [order(stage, stages, micro_batches, chunks) for stage in range(stages)]
    done: dict[
        tuple[str, int, int], float
    ] = {}  # (kind, place among all chunks of all stages, micro-batch) -> when
    free, last = [0.0] * stages, stages * chunks - 1
    while any(queues):
        moved = False
        for stage, queue in enumerate(queues):
            while queue:
                kind, chunk, micro_batch = queue[0]
                place = chunk * stages + stage
                needed = []
                if kind == "forward":
                    needed += [("forward", place - 1, micro_batch)] if place else []
                else:
                    needed += [("forward", place, micro_batch)]
                    needed += [("backward", place + 1, micro_batch)] if place < last else []
                if any(each not in done for each in needed):
                    break
                start = max([free[stage], *(done[each] for each in needed)])
                free[stage] = start + times[stage][kind == "backward"] / chunks
                done[kind, place, micro_batch] = free[stage]
                queue.pop(0)
                moved = True
        assert moved, "a schedule that waits for itself"
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 9), (8, 32), (4, 2)])
def test_one_forward_one_backward(stages: int, micro_batches: int) -> None:
    seconds = played([(FORWARD, BACKWARD)] * stages, micro_batches)
    assert pipeline_seconds([FORWARD + BACKWARD] * stages, micro_batches) == seconds
    assert bubble(stages, micro_batches) == pytest.approx(1 - micro_batches * (FORWARD + BACKWARD) / seconds)


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 4)])
def test_interleaved(stages: int, micro_batches: int, chunks: int) -> None:
    seconds = played([(FORWARD, BACKWARD)] * stages, micro_batches, chunks)
    assert pipeline_seconds([FORWARD + BACKWARD] * stages, micro_batches, chunks) == pytest.approx(seconds)
    waits = 1 - micro_batches * (FORWARD + BACKWARD) / seconds
    assert bubble(stages, micro_batches, chunks) == pytest.approx(waits)


@pytest.mark.parametrize("slow", range(4))
def test_one_slow_stage(slow: int) -> None:
    """All other stages wait for the slow one, which, unless it is the last, has work while the pipeline fills."""
    times = [(1.5 * FORWARD, 1.5 * BACKWARD) if stage == slow else (FORWARD, BACKWARD) for stage in range(4)]
    seconds, most = played(times, 16), pipeline_seconds([sum(time) for time in times], 16)
    assert seconds <= most <= 1.07 * seconds
    assert slow < 3 or most == seconds
