"""`megarl plan step --search`: its proposals are legal, fit, and are the best that there are."""

import itertools
import json
import re
import time
from functools import lru_cache
from math import prod
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config import TrainConfig, check_config, load_config
from megarl.config.model_fit import check_models
from megarl.costs.hardware import TABLE, Assumptions
from megarl.costs.speed import Machine
from megarl.models import read_model_config
from megarl.plan.fit import ENGINE_KEYS
from megarl.plan.inputs import PlanInputs, read_inputs
from megarl.plan.job import plan_job
from megarl.plan.memory import GIB, plan_memory
from megarl.plan.search import _GROUPS, Search, recomputations

ROOT = Path(__file__).resolve().parents[2]
SMALL, MOE, DEEPSEEK, FULL = (
    str(ROOT / f"recipes/{name}.yaml")
    for name in (
        "qwen2.5_0.5b_ppo_single_gpu",
        "qwen3_30b_a3b_grpo",
        "deepseek_v3_grpo",
        "deepseek_v3_grpo_256x80gb",
    )
)
ACTOR, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.rollout"
AGAIN = {
    "nothing": ("granularity=null",),
    "parts": ("granularity=selective", "modules=[mlp]"),
    "layers": ("granularity=full",),
}
FOUR = ["trainer.n_gpus_per_node=4", f"{ROLLOUT}.gpu_memory_utilization=0.5"]


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the repository's root: the recipes' paths are relative to it."""
    monkeypatch.chdir(ROOT)


def searched(recipe: str, overrides: list[str], memory: float, gpu: str = "H100") -> Search:
    config, inputs = read_inputs(recipe, overrides)
    machine = Machine(TABLE[gpu], Assumptions(), config.trainer.n_gpus_per_node)
    given = load_config(TrainConfig, recipe, overrides)
    return Search(given, inputs, machine, round(memory * GIB), 2 * GIB)


@lru_cache(maxsize=200)  # a small space's layouts, read again for each memory
def read(recipe: str, overrides: tuple[str, ...]) -> tuple[TrainConfig, PlanInputs]:
    return read_inputs(recipe, list(overrides))


def seconds_of(search: Search, recipe: str, overrides: list[str]) -> float | None:
    """The seconds of a step, computed only from the recipe and its overrides; None: the configuration is refused or does not fit."""
    try:
        config, inputs = read(recipe, tuple(overrides))
        check_models(config, inputs.model, inputs.critic, inputs.reward)
        memory = plan_memory(config, inputs, search.limit, search.reserve)
    except ValueError:
        return None
    return plan_job(config, inputs, search.machine, memory, sync=False).seconds if memory.fits else None


@pytest.mark.parametrize("memory", [8.5, 24.0])
def test_the_best_of_a_small_space_is_found(memory: float) -> None:
    """The search is compared with all layouts of four GPUs: with little memory, where something must leave the devices, and with enough memory."""
    search, known = searched(SMALL, FOUR, memory), {}
    for tp, pp, cp, serve in itertools.product((1, 2, 4), repeat=4):
        for recompute, stays in itertools.product(AGAIN, ("null", "false")):
            keys = [
                f"{ACTOR}.tensor_model_parallel_size={tp}",
                f"{ACTOR}.pipeline_model_parallel_size={pp}",
                f"{ACTOR}.context_parallel_size={cp}",
                *(f"{ACTOR}.recompute_{key}" for key in AGAIN[recompute]),
                *(f"{ACTOR}.{part}_offload={stays}" for part in ("param", "grad", "optimizer")),
                f"{ROLLOUT}.tensor_model_parallel_size={serve}",
                f"{ROLLOUT}.num_engines={4 // serve}",
            ]
            if tp * pp * cp <= 4:
                known[tp, pp, cp, serve, recompute, stays] = seconds_of(search, SMALL, FOUR + keys)
    there = sorted({seconds for seconds in known.values() if seconds is not None})
    assert 3 < len(there) < len(known)
    found = search.run(3)
    assert [each.seconds for each in found] == pytest.approx(there[:3])


def test_proposals_are_legal_fit_and_can_be_pasted() -> None:
    search = searched(MOE, [], 79)
    found = search.run(4)
    assert len(found) == 4
    for each in found:
        assert seconds_of(search, MOE, list(each.keys)) == pytest.approx(each.seconds)
        config = load_config(TrainConfig, MOE, list(each.keys))
        check_config(config, data_files=False)
        assert read_inputs(MOE, list(each.keys))[0].actor_rollout_ref == each.config.actor_rollout_ref
    recipe = seconds_of(search, MOE, [])
    assert recipe is not None and found[0].seconds <= recipe


def test_parts_that_are_computed_again_are_those_of_the_model() -> None:
    def parts(name: str) -> list[tuple[str, ...] | None]:
        found = list(recomputations(read_model_config(str(ROOT / "recipes/models" / name))))
        assert found[0] == (None, None) and found[-1] == ("full", None)
        assert {granularity for granularity, _ in found[1:-1]} == {"selective"}
        return [modules for _, modules in found[1:-1]]

    assert parts("qwen2.5-7b") == [("mlp",)]
    assert parts("qwen3-30b-a3b") == [("layernorm", "moe_act")]
    assert parts("deepseek-v3") == [("layernorm", "mla_up_proj", "moe_act")]


@pytest.mark.parametrize("memory", [60, 46])
def test_no_more_is_computed_again_than_memory_asks_for(memory: int) -> None:
    """Qwen3-30B-A3B on two nodes: the fastest layout recomputes nothing, parts or layers, whichever is fastest among those that fit."""
    search = searched(MOE, [], memory)
    (best,) = search.run(1)
    keys = [key for key in best.keys if ".recompute_" not in key]
    again = {"null": "null", "selective": "[layernorm,moe_act]", "full": "null"}
    seconds = {
        name: seconds_of(
            search,
            MOE,
            [*keys, f"{ACTOR}.recompute_granularity={name}", f"{ACTOR}.recompute_modules={parts}"],
        )
        for name, parts in again.items()
    }
    fitting = {took: name for name, took in seconds.items() if took is not None}
    assert best.seconds == min(fitting)
    assert f"{ACTOR}.recompute_granularity={fitting[min(fitting)]}" in best.keys


def test_671b_on_512_devices_takes_less_than_a_minute(capsys) -> None:
    start = time.process_time()
    arguments = [DEEPSEEK, "trainer.nnodes=64", "--hardware", "H200", "--search", "--top", "3"]
    assert main(["plan", "step", *arguments, "--json"]) == 0
    assert time.process_time() - start < 60
    found = json.loads(capsys.readouterr().out)
    assert found["layouts"] > 1000 and len(found["proposals"]) == 3
    times = [each["seconds"] for each in found["proposals"]]
    assert times == sorted(times)
    best = found["proposals"][0]
    search = searched(DEEPSEEK, [], 140, "H200")
    search.reserve = 6 * GIB
    assert seconds_of(search, DEEPSEEK, ["trainer.nnodes=64", *best["keys"]]) == pytest.approx(times[0])
    assert best["peak"] + 6 * GIB <= 140 * GIB


def test_671b_on_gpus_of_80_gb_is_served_by_engines_over_several_nodes() -> None:
    """Engines have 32 devices or more: half as many would hold 82 GB of weights each. 256 devices can cut 128 heads only in groups."""
    rollouts = [engine.rollout for engine in searched(FULL, [], 79)._engines()]
    groups = {(each.tensor_model_parallel_size, each.attention_data_parallel_size) for each in rollouts}
    assert {tp for tp, dp in groups if dp == 1} == {32, 64, 128}
    assert {(32, 4), (64, 8), (128, 16), (256, 32)} <= groups
    for rollout in (rollouts[0], rollouts[-1]):
        keys = (f"{name}={getattr(rollout, name)}" for name in (*ENGINE_KEYS, *_GROUPS))
        config, _ = read_inputs(FULL, [f"{ROLLOUT}.{key}" for key in keys])
        found = config.actor_rollout_ref.rollout
        assert found.tensor_model_parallel_size == 8 * found.nodes_per_engine
        assert found.num_engines * found.tensor_model_parallel_size == 256


def test_the_recipes_own_layout_need_not_be_legal(capsys) -> None:
    """DeepSeek-V3's layout takes multiples of 128 devices, and there are 96; other mistakes are still named."""
    arguments = [DEEPSEEK, "trainer.nnodes=12", "--hardware", "H200", "--search", "--top", "1", "--json"]
    assert main(["plan", "step", *arguments]) == 0
    (best,) = json.loads(capsys.readouterr().out)["proposals"]
    read_inputs(DEEPSEEK, ["trainer.nnodes=12", *best["keys"]])
    with pytest.raises(ValueError, match="does not divide the 96 devices"):
        read_inputs(DEEPSEEK, ["trainer.nnodes=12"])
    wrong = ["actor_rollout_ref.actor.optim.weight_decay=-1", "--search"]
    assert main(["plan", "step", SMALL, *wrong]) == 2
    assert "weight_decay" in capsys.readouterr().err


def test_engines_with_devices_of_their_own() -> None:
    """The recipe decides what leaves the devices; a step is as long as the longer of the two concurrent views."""
    pools = [
        "trainer.nnodes=2",
        "resource_pools={train: {n_gpus_per_node: 4}, serve: {n_gpus_per_node: 2}}",
        "actor_rollout_ref.actor.resource_pool=train",
        f"{ROLLOUT}.resource_pool=serve",
        "trainer.mode=one_step_off",
        "trainer.n_gpus_per_node=4",
        f"{ACTOR}.optimizer_offload=true",
    ]
    search = searched(SMALL, pools, 79)
    (best,) = search.run(1)
    megatron, rollout = best.config.actor_rollout_ref.actor.megatron, best.config.actor_rollout_ref.rollout
    assert megatron.optimizer_offload is True and megatron.param_offload is None
    assert rollout.num_engines * rollout.tensor_model_parallel_size == 2
    assert seconds_of(search, SMALL, [*pools, *best.keys]) == pytest.approx(best.seconds)
    phases = {phase.name: phase.seconds for phase in best.phases}
    learn = phases["evaluate_models"] + phases["update"]
    assert best.seconds == pytest.approx(phases["sync"] + max(phases["generate"], learn))


def test_the_table_has_the_keys_of_each_layout(capsys) -> None:
    assert main(["plan", "step", SMALL, *FOUR, "--search", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "layouts the fastest that fit and are legal" in out and "nothing was measured" in out
    first, second = re.findall(r"^\d: (tp\d .*)\n   (.*)$", out, re.MULTILINE)
    assert first != second and all(re.search("engines? of tp", words) for words, _ in (first, second))
    sizes = dict(re.findall(r"\b(tp|pp|cp|dp)(\d)", first[0].split(",")[0]))
    assert (
        f"{ACTOR}.tensor_model_parallel_size={sizes['tp']} {ACTOR}.pipeline_model_parallel_size={sizes['pp']}"
        in first[1]
    )
    assert prod(map(int, sizes.values())) == 4
