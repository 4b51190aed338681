"""Floors: operations over the peak and bytes over the bandwidth, counted by hand; no estimate is below its floor."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from megarl.costs.engine import EngineLoad, ServedModel, generation
from megarl.costs.floors import at_peaks, generation_floor, pass_floor
from megarl.costs.flops import model_flops
from megarl.costs.hardware import TABLE, Assumptions
from megarl.costs.pipeline import pass_time
from megarl.costs.speed import Machine, Passes
from megarl.layout.grid import ParallelLayout
from megarl.models import read_model_config
from megarl.weight_sync.layouts import EngineLayout

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "models"
MODEL = read_model_config(str(RECIPES / "qwen2.5-7b"))
FLOPS = model_flops(MODEL)
H100 = TABLE["H100"]
MACHINE = Machine(H100, Assumptions(), 8)
SERVED = ServedModel(MODEL, FLOPS, EngineLayout(2, 1), MACHINE, 7 << 30, 28 << 10)


def passes(trained: str | None, **sizes: int) -> Passes:
    layout = ParallelLayout(world=8, tp=2, **{"pp": 1, "cp": 1, "ep": 1, "etp": 1} | sizes)
    return Passes(MODEL, FLOPS, layout, MACHINE, trained)


def test_peaks_are_reached_and_nothing_else_costs_anything() -> None:
    ideal = at_peaks(MACHINE)
    assert ideal.links == {"local": H100.hbm / 2, "intra_node": H100.nvlink, "inter_node": H100.nic}
    assert ideal.host == H100.host and ideal.latency(512) == 0.0
    assumed = {field.name: getattr(ideal.assumed, field.name) for field in fields(Assumptions)}
    assert set(assumed.values()) == {0.0, 0.5, 1.0}
    assert {name for name, value in assumed.items() if value == 0.5} == {"prompt", "response"}  # the data's


def test_a_forward_pass_takes_its_operations() -> None:
    """The head is computed for responses only; of all pairs of tokens the causal half counts."""
    layers = 28 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944)
    pairs = 28 * 2 * 2 * 28 * 128 * (1000 + 1) / 2
    by_hand = 64 * (1000 * (2 * layers + pairs) + 800 * 2 * 152064 * 3584)
    assert pass_floor(passes(None), 64, 200, 800) == pytest.approx(by_hand / 8 / 989e12, rel=1e-3)
    assert pass_floor(passes("adapters"), 64, 200, 800) == pytest.approx(2 * by_hand / 8 / 989e12, rel=1e-3)


def test_layers_in_float8_are_bound_by_its_peak() -> None:
    """Attention and head are bound by the peak of bfloat16."""
    layers = 28 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944)
    others = 1000 * 28 * 2 * 2 * 28 * 128 * (1000 + 1) / 2 + 800 * 2 * 152064 * 3584
    for ends, part in (((0, 0), 1.0), ((2, 5), 21 / 28)):
        ideal = replace(passes(None), float8=True, bf16_ends=ends)
        seconds = 1000 * 2 * layers * (part / 1979e12 + (1 - part) / 989e12) + others / 989e12
        assert pass_floor(ideal, 64, 200, 800) == pytest.approx(64 * seconds / 8, rel=1e-3)


def test_few_tokens_take_the_time_of_the_weights() -> None:
    weights = 28 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944)
    assert pass_floor(passes(None), 1, 1, 1) == pytest.approx(weights / 2 * 2 / 3.35e12, rel=1e-3)


def test_an_update_is_followed_by_the_optimizer() -> None:
    """Each of four data parallel ranks has a quarter of the states: it reads the gradient, reads and writes master copy and moments, and
    writes the weight."""
    own = 28 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944) / 2 / 4
    adam = own * (4 + 2 * 12 + 2) / 3.35e12
    computed = pass_floor(passes("adapters"), 512, 200, 800) * 3 / 2
    assert pass_floor(passes("weights"), 512, 200, 800, 4) == pytest.approx(4 * (computed + adam), rel=1e-3)


def test_each_token_reads_weights_and_cache() -> None:
    found = generation_floor(SERVED, EngineLoad(64, 64, 100, 500, 4000, 64))
    embedding = 152064 * 3584 // 2 * 2  # not read like a head: a token looks up one row
    read = 500 * ((7 << 30) - embedding + 64 * (100 + 250) * (28 << 10)) / 3.35e12
    assert found.decode == pytest.approx(read, rel=1e-3)
    assert found.prefill == pytest.approx(64 * 100 * FLOPS.forward(50.5) / 2 / 989e12)
    crowded = generation_floor(SERVED, EngineLoad(128, 64, 100, 500, 4000, 64))
    assert crowded.decode == pytest.approx(2 * found.decode, rel=0.01)


@pytest.mark.parametrize("trained", [None, "adapters", "weights"])
@pytest.mark.parametrize("sizes", [{}, {"pp": 2}, {"cp": 2}], ids=str)
def test_no_estimate_is_below_its_floor(trained: str | None, sizes: dict[str, int]) -> None:
    for rows, length in ((8, 64), (64, 1000), (512, 8000)):
        run = passes(trained, **sizes)
        least = pass_floor(run, rows, 1, length - 1, 2)
        assert 0 < least < pass_time(run, rows, length, 16384, None, 2).total
        ideal = replace(run, machine=at_peaks(MACHINE))
        assert least <= pass_time(ideal, rows, length, 16384, None, 2).total * (1 + 1e-9)


@pytest.mark.parametrize("mean", [10, 500, 3999])
def test_no_generation_is_below_its_floor(mean: int) -> None:
    given = EngineLoad(256, 32, 100, mean, 4000, 48)
    assert generation_floor(SERVED, given).seconds < generation(SERVED, given).seconds
