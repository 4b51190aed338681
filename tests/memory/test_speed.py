"""Seconds by formulas beside numbers worked out by hand; the table of hardware and the assumptions by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.hybrid_engine.layouts import EngineLayout
from megarl.layout.grid import ParallelLayout
from megarl.memory.decoding import Served, generation
from megarl.memory.flops import ModelFlops, model_flops
from megarl.memory.hardware import SECONDS, TABLE, Assumptions, find_hardware, read_assumptions
from megarl.memory.speed import Machine, Passes, pass_time
from megarl.models import ModelConfig, read_model_config

MODELS = Path(__file__).resolve().parents[2] / "recipes/models"
# A GPU with round figures, all of which is reached.
ALL = Assumptions(**dict.fromkeys(vars(Assumptions()), 1.0) | dict.fromkeys(SECONDS, 0.0))
ROUND = replace(TABLE["H100"], bf16=1e15, fp8=2e15, hbm=1e12, nvlink=1e11, nic=1e10, host=1e10)
MACHINE = Machine(ROUND, ALL, per_node=8)


def model(name: str) -> tuple[ModelConfig, ModelFlops]:
    config = read_model_config(str(MODELS / name))
    return config, model_flops(config)


def passes(name: str, machine: Machine = MACHINE, **sizes) -> Passes:
    how = {key: sizes.pop(key) for key in ("trained", "recompute", "on_host", "itemsize") if key in sizes}
    config, flops = model(name)
    return Passes(config, flops, ParallelLayout(**sizes), machine, **how)


def test_one_gpu_computes_and_sends_nothing() -> None:
    config, flops = model("qwen2.5-0.5b")
    assert passes("qwen2.5-0.5b", world=1).stages(1000, 99) == [
        pytest.approx(1000 * flops.forward(pairs=50) / 1e15)
    ]
    (trained,) = passes("qwen2.5-0.5b", world=1, trained="weights").stages(1000, 99)
    assert trained == pytest.approx(3000 * flops.forward(pairs=50) / 1e15)
    (again,) = passes("qwen2.5-0.5b", world=1, trained="weights", recompute="full").stages(1000, 99)
    head = 2 * config.vocab_size * config.hidden_size
    assert again - trained == pytest.approx(1000 * (flops.forward(pairs=50) - head) / 1e15)
    (adapted,) = passes("qwen2.5-0.5b", world=1, trained="adapters").stages(1000, 99)
    pairs = 24 * 2 * 14 * 128 * 50  # layers, heads, keys and values
    assert adapted == pytest.approx(1000 * (2 * 2 * flops.active + 3 * pairs) / 1e15)


def test_tensor_parallel_ranks_share_the_work_and_gather_hidden_states() -> None:
    one, two = passes("qwen2.5-7b", world=1), passes("qwen2.5-7b", world=2, tp=2, sp=True)
    sent = (
        28 * 4 * (1000 * 3584 * 2) / 2 / 1e11
    )  # layers; two gathered, two scattered, half of each from the other rank
    assert two.stages(1000, 99)[0] == pytest.approx(one.stages(1000, 99)[0] / 2 + sent)
    far = passes("qwen2.5-7b", replace(MACHINE, per_node=1), world=2, tp=2, sp=True)
    assert far.stages(1000, 99)[0] == pytest.approx(one.stages(1000, 99)[0] / 2 + 10 * sent)


def test_experts_get_their_tokens_from_the_ranks_of_their_group() -> None:
    """Qwen3-30B-A3B: 48 layers, 8 experts of a token, a hidden size of 2048."""
    alone, near = passes("qwen3-30b-a3b", world=8), passes("qwen3-30b-a3b", world=8, ep=8)
    sent = near.stages(1000, 99)[0] - alone.stages(1000, 99)[0]
    assert sent == pytest.approx(48 * 2 * 1000 * 8 * 2048 * 2 * 7 / 8 / 1e11)
    over = passes("qwen3-30b-a3b", world=16, ep=16)  # two nodes: half of the tokens leave theirs
    sent = over.stages(1000, 99)[0] - alone.stages(1000, 99)[0]
    assert sent == pytest.approx(48 * 2 * 1000 * 8 * 2048 * 2 / 2 / 1e10)


def test_gradients_and_weights_travel_between_replicas() -> None:
    config, flops = model("qwen2.5-7b")
    matrices = sum(layer.dense for layer in flops.layers) + flops.head
    run = passes("qwen2.5-7b", world=8, trained="weights")
    assert run.reduce_seconds() == pytest.approx(matrices * (4 + 2) * 7 / 8 / 1e11)
    assert passes("qwen2.5-7b", world=16, trained="weights").reduce_seconds() == pytest.approx(
        matrices * (4 + 2) * 15 / 16 / 1e10
    )
    assert passes("qwen2.5-7b", world=1, trained="weights").reduce_seconds() == 0.0
    assert config.num_layers == 28


def test_states_on_the_host_come_while_others_go_back() -> None:
    """12 bytes a weight in each direction, 8 of a float32 weight; 10 GB/s of the link, beside 1 TB/s of the GPU's memory."""
    _, flops = model("qwen2.5-7b")
    matrices = sum(layer.dense for layer in flops.layers)
    usual = passes("qwen2.5-7b", world=8, trained="weights")
    assert usual.adam_seconds() == pytest.approx(matrices / 8 * (4 + 2 * 12 + 2) / 1e12)
    for itemsize, size in ((2, 12), (4, 8)):
        run = passes("qwen2.5-7b", world=8, trained="weights", on_host=True, itemsize=itemsize)
        assert run.adam_seconds() == pytest.approx(matrices / 8 * size / 1e10)


def test_a_mini_batch_is_cut_into_micro_batches() -> None:
    run = passes("qwen2.5-7b", world=4, tp=1, pp=2, trained="weights")
    time = pass_time(run, rows=64, length=1000, most=4096, most_rows=None, updates=3)
    assert time.micro_batches == 8  # 32 texts of a rank, 4 at a time
    assert time.bubble == pytest.approx(1 / 9)
    stages = run.stages(4000, 1000)
    assert time.seconds == pytest.approx(3 * (8 * max(stages) + min(stages)))
    assert pass_time(run, 64, 1000, None, 2).micro_batches == 16


def served(name: str, tp: int, weights: int, token: int, machine: Machine = MACHINE, **how) -> Served:
    config, flops = model(name)
    return Served(config, flops, EngineLayout(tp, 1, num_engines=1), machine, weights, token, **how)


def test_a_decode_step_reads_weights_and_cache() -> None:
    """Qwen2.5-7B: 7,615,616,512 parameters, of which 152064 x 3584 are an embedding; 28 layers, 4 heads of 128 for keys."""
    weights, token = 2 * 7_615_616_512, 2 * 28 * 4 * 128 * 2
    engine = served("qwen2.5-7b", 1, weights, token)
    read = weights - 2 * 152064 * 3584 + 16 * 1000 * token
    assert engine.step_bytes(16, 1000) == pytest.approx(read)
    assert engine.step_seconds(16, 1000) == pytest.approx(read / 1e12)
    computed = 8192 * (2 * (7_615_616_512 - 152064 * 3584 - 28 * 2 * 3584 - 3584 - 28 * 4608) + 28 * 28 * 512)
    assert engine.step_seconds(8192, 1) == pytest.approx(computed / 1e15, rel=1e-6)


def test_few_tokens_touch_few_experts() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts, each of 3 x 2048 x 768 weights, in 48 layers; a byte each in float8."""
    experts, rest = 48 * 128 * 3 * 2048 * 768, 3_000_000_000
    engine = served("qwen3-30b-a3b", 1, experts + rest, 0, quantized=True)
    others = rest - 2 * 151936 * 2048
    assert engine.step_bytes(1, 0) == pytest.approx(others + experts * 8 / 128)
    assert engine.step_bytes(2, 0) == pytest.approx(others + experts * (1 - (120 / 128) ** 2))
    assert engine.step_bytes(10_000, 0) == pytest.approx(others + experts)


def test_an_engine_is_as_slow_as_its_longest_text() -> None:
    engine = served("qwen2.5-7b", 1, 15_000_000_000, 57344)
    many = generation(engine, 100, 10, prompt=50, mean=200, longest=400, running=10)
    assert many.steps == 2000 and many.batch == 10
    assert many.decode == pytest.approx(2000 * engine.step_seconds(10, 150))
    few = generation(engine, 4, 4, prompt=50, mean=200, longest=400, running=10)
    assert few.steps == 400 and few.batch == 2
    assert few.prefill == pytest.approx(4 * 50 * engine.flops.forward(25.5) / 1e15)


def test_what_takes_time_whatever_its_size() -> None:
    """A pass of few tokens is as long as its launches, a step of an engine as its collectives and all that is beside them."""
    slow = Machine(ROUND, replace(ALL, latency=1e-5, step=1e-3, launch=1e-2), 8)
    run = passes("qwen2.5-7b", slow, world=1)
    head, pairs = 2 * run.flops.head / 1e15, 28 * 28 * 512 / 1e15
    assert run.stages(1, 1)[0] == pytest.approx(28 * 1e-2 + head + pairs)
    fast, beside = served("qwen2.5-7b", 2, 10**10, 0), served("qwen2.5-7b", 2, 10**10, 0, machine=slow)
    assert beside.step_seconds(1, 1) - fast.step_seconds(1, 1) == pytest.approx(1e-3 + 28 * 2 * 1e-5)


def test_links_are_parts_of_peaks() -> None:
    machine = Machine(TABLE["H100"], Assumptions(nvlink=0.5, nic=0.25, host=0.5), 8)
    assert machine.link(8) == machine.links["intra_node"] == 225e9
    assert machine.link(9) == machine.links["inter_node"] == 12.5e9
    assert machine.host == 32e9


def test_hardware_and_assumptions_by_name() -> None:
    assert find_hardware("h200").hbm == 4.8e12
    assert TABLE["A100"].fp8 is None
    for gpu in TABLE.values():  # a byte is twice as fast as two
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
