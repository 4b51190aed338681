"""`megarl plan step`: its figures of memory, sync and seconds agree with each other; its page is one complete file; its advice holds."""

import json
import re
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.costs.hardware import TABLE, Assumptions, likely
from megarl.costs.speed import Machine
from megarl.plan.inputs import read_inputs
from megarl.plan.job import plan_job
from megarl.plan.memory import GIB, plan_memory
from tests.report.folders import Page

ROOT = Path(__file__).resolve().parents[2]
PPO, LORA, MOE, DEEPSEEK = (
    str(ROOT / f"recipes/{name}.yaml")
    for name in ("qwen2.5_7b_ppo_gsm8k", "qwen2.5_72b_grpo_lora", "qwen3_30b_a3b_grpo", "deepseek_v3_grpo")
)


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the repository's root: the recipes' paths are relative to it."""
    monkeypatch.chdir(ROOT)


def planned(capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    assert main(["plan", "step", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_report_hangs_together(capsys) -> None:
    plan = planned(capsys, PPO, "--assume", "nvlink=0.5")
    assert plan["hardware"]["name"] == "H100" and plan["devices"] == 8
    memory = plan["memory"]
    assert memory["fits"] and not plan["advice"]
    assert main(["plan", "memory", PPO, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == memory
    for phase, fullest in plan["fullest"].items():  # one stage: all ranks have equal memory
        assert fullest["bytes"] == memory["phases"][phase]["total"] and fullest["number"] == 0
    for link, cost in plan["sync"]["links"].items():
        rate = {"local": 3.35e12 * 0.8 / 2, "intra_node": 450e9 * 0.5, "inter_node": 50e9 * 0.8}[link]
        assert cost["seconds"] == pytest.approx(max(cost["max_received"], cost["max_sent"]) / rate)
    phases = plan["phases"]
    assert list(phases) == ["sync", "generate", "evaluate_models", "update"]
    # There are two tensor parallel parts. One is on the engine's own device; the other takes a round with the other part's rank.
    assert phases["sync"]["parts"]["weights"] == pytest.approx(plan["sync"]["seconds"] + 0.025)
    for phase in phases.values():  # all phases use the same devices
        assert phase["seconds"] == pytest.approx(sum(phase["parts"].values()))
    step = plan["step"]
    assert step["seconds"] == pytest.approx(sum(phase["seconds"] for phase in phases.values()))
    assert (step["seconds_low"], step["seconds_high"]) == likely(step["seconds"])
    for phase in (*phases.values(), step):  # what the GPUs' peak rates allow
        assert 0 < phase["floor"] < phase["seconds"]
    for phase in phases.values():
        assert phase["floor"] == pytest.approx(sum(phase["floors"].values()))
        assert phase["floors"]["controller and workers"] == 0
    links = plan["sync"]["links"].values()
    rates = (3.35e12 / 2, 450e9, 50e9)
    least = max(
        max(cost["max_received"], cost["max_sent"]) / rate for cost, rate in zip(links, rates, strict=True)
    )
    assert phases["sync"]["floors"]["weights"] == pytest.approx(least)
    assert step["tokens"] == 1024 * (256 + 128)  # trajectories x half of the longest lengths
    assert step["tokens_per_s_per_device"] == pytest.approx(step["tokens"] / step["seconds"] / 8)
    assert phases["generate"]["tokens"] == 1024 * 128
    assert plan["passes"]["critic updates"]["updates"] == 4


def test_what_moves_is_what_leaves(capsys) -> None:
    """Weights leave the devices when the engines generate and come back for log-probs; optimizer states come back for updates and leave for the sync;
    gradients are dropped."""
    plan = planned(capsys, MOE, "--without-sync", "--assume", "host=0.5")
    held, phases = plan["memory"]["phases"]["update_actor"], plan["phases"]
    moved, rate = "moved to and from the host", 64e9 / 2
    for phase, owner in (
        ("generate", "actor_weights"),
        ("evaluate_models", "actor_weights"),
        ("update", "actor_optimizer"),
        ("sync", "actor_optimizer"),
    ):
        assert phases[phase]["parts"][moved] == pytest.approx(held[owner] / rate)
        assert phases[phase]["floors"][moved] == pytest.approx(held[owner] / 64e9)
    parts = ("param", "grad", "optimizer")
    stays = [f"actor_rollout_ref.actor.megatron.{part}_offload=false" for part in parts]
    still = planned(capsys, MOE, "--without-sync", *stays)
    assert not any(moved in phase["parts"] for phase in still["phases"].values())
    assert still["memory"]["peak"] > plan["memory"]["peak"]


def test_a_batch_that_is_one_update_has_no_log_probs_before_it(capsys) -> None:
    """The weights then come back for the update; with a KL in the loss, the reference's log-probs are a phase, too."""
    single = ("actor_rollout_ref.actor.ppo_mini_batch_size=512", "data.train_batch_size=512")
    plan = planned(capsys, MOE, "--without-sync", *single, "actor_rollout_ref.actor.use_kl_loss=false")
    assert list(plan["phases"]) == ["sync", "generate", "update"]
    assert list(plan["memory"]["phases"]) == ["sync", "generate", "update_actor"]
    held = plan["memory"]["phases"]["update_actor"]
    moved = plan["phases"]["update"]["parts"]["moved to and from the host"]
    rate = 64e9 * Assumptions().host
    assert moved == pytest.approx((held["actor_weights"] + held["actor_optimizer"]) / rate)
    with_reference = planned(
        capsys, MOE, "--without-sync", *single, "actor_rollout_ref.actor.use_kl_loss=true"
    )
    assert "evaluate_models" in with_reference["phases"]


def test_weights_that_come_for_nothing_are_counted(capsys) -> None:
    """With the engines' log-probs in place of the policy's, the policy's weights come back one phase before the update."""
    bypass = ("algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.actor.use_kl_loss=false")
    phases = planned(capsys, MOE, "--without-sync", *bypass)["phases"]
    assert list(phases["evaluate_models"]["parts"]) == [
        "moved to and from the host",
        "controller and workers",
    ]
    assert phases["evaluate_models"]["seconds"] > 0


def test_muon_takes_its_products_and_has_one_state_less(capsys) -> None:
    usual, found = (
        planned(capsys, MOE, "--without-sync", f"actor_rollout_ref.actor.optim.optimizer={name}")
        for name in ("adam", "muon")
    )
    held, states = (plan["memory"]["phases"]["update_actor"]["actor_optimizer"] for plan in (found, usual))
    assert 0.65 < held / states < 0.75  # 8 bytes of 12, except for the embedding and the head
    assert found["phases"]["update"]["seconds"] > usual["phases"]["update"]["seconds"]


def test_states_on_the_host_leave_the_devices_slots(capsys) -> None:
    """These hold three buckets of 8 Mi weights, 12 bytes each; the rest is on the host, and passes the link in each update."""
    usual = planned(capsys, MOE, "--without-sync")
    found = planned(capsys, MOE, "--without-sync", "actor_rollout_ref.actor.optim.optimizer_cpu_offload=true")
    held, states = (plan["memory"]["phases"]["update_actor"] for plan in (found, usual))
    assert held["actor_optimizer"] == 3 * (8 << 20) * 12 < states["actor_optimizer"] / 50
    assert held["total"] == states["total"] - states["actor_optimizer"] + held["actor_optimizer"]
    # Weights and states that leave the devices have a copy on the host; states that stay on the host take no more.
    assert found["memory"]["host"] == usual["memory"]["host"]
    host = usual["memory"]["host"]["global"]
    assert (
        host["device"] == states["actor_weights"] + states["actor_optimizer"]
        and host["node"] == 8 * host["device"]
    )
    moved = "moved to and from the host"
    assert moved not in found["phases"]["sync"]["parts"] and moved in usual["phases"]["sync"]["parts"]
    update = found["passes"]["actor updates"]
    passed = update["optimizer_seconds"] / update["updates"] * 64e9 * 0.7
    assert passed == pytest.approx(states["actor_optimizer"], rel=0.1)  # embeddings are not counted


def test_better_hardware_and_parts_are_faster(capsys) -> None:
    def seconds(*options: str) -> dict[str, float]:
        phases = planned(capsys, LORA, "--without-sync", *options)["phases"]
        return {name: phase["seconds"] for name, phase in phases.items()}

    h100, h200, h20 = (seconds("--hardware", name) for name in ("H100", "h200", "H20"))
    assert h200["generate"] < h100["generate"]  # only their memory differs
    assert h200["update"] < h100["update"] < h20["update"]
    halves = ("matmul=0.325", "attention=0.275", "nvlink=0.35", "nic=0.4", "hbm=0.4", "host=0.35")
    doubled = ("latency=2e-5", "hop=3e-5", "dispatch=3.6e-5", "phase=2")
    slow = seconds(*(word for each in (*halves, *doubled) for word in ("--assume", each)))
    assert slow["update"] == pytest.approx(2 * h100["update"], rel=1e-6)
    assert seconds("--assume", "response=1")["generate"] > h100["generate"]


def test_the_fullest_device_of_uneven_stages_is_named() -> None:
    """The sum is taken for each device; the sum of each role's fullest stage is equal, or larger where the roles' fullest stages differ."""
    config, inputs = read_inputs(DEEPSEEK, [])
    memory = plan_memory(config, inputs, 140 * GIB, 6 * GIB)
    machine = Machine(TABLE["H200"], Assumptions(), 8)
    job = plan_job(config, inputs, machine, memory, sync=False)
    device, size = job.fullest("update_actor")
    actor = [owner for owner in memory.owners if owner.role == "actor"]
    stages = [sum(owner.at("update_actor")[stage] for owner in actor) for stage in range(16)]
    assert device.actor.pp == stages.index(max(stages)) == device.number // 8
    others = sum(max(owner.at("update_actor")) for owner in memory.owners if owner.role != "actor")
    assert size == max(stages) + others <= memory.fullest("update_actor")
    assert str(device).startswith(
        f"node {device.number // 8}, GPU 0 of pool global (actor rank {device.number}: tp 0"
    )


def test_what_does_not_fit_gets_advice_that_holds(capsys) -> None:
    short = ["--gpu-memory", "41", "--without-sync"]
    plan = planned(capsys, PPO, *short)
    assert not plan["memory"]["fits"] and plan["memory"]["problems"]
    peaks = [change["peak"] for change in plan["advice"] if change["fits"]]
    assert peaks and peaks == sorted(peaks)
    for change in plan["advice"]:
        changed = planned(capsys, PPO, *change["keys"], *short)["memory"]
        assert (changed["peak"], changed["fits"]) == (change["peak"], change["fits"])
        assert changed["fits"] or changed["peak"] < plan["memory"]["peak"]
    assert main(["plan", "step", PPO, *short]) == 0
    out = capsys.readouterr().out
    assert "does not fit, " in out and f"would help: {plan['advice'][0]['keys'][0]}" in out


def test_the_page_is_one_whole_file(tmp_path: Path, capsys) -> None:
    file = tmp_path / "deep" / "plan.html"
    arguments = ["plan", "step", DEEPSEEK, "--hardware", "H200", "--without-sync", "--html", str(file)]
    assert main(arguments) == 0
    table, text = capsys.readouterr().out, file.read_text()
    page = Page(text)
    assert page.open == [] and text.startswith("<!DOCTYPE html>")
    assert all(address.startswith("#") for address in page.addresses)
    for kind in ("tensor parallel, 8", "pipeline stage, 16", "expert parallel, 8", "engine, 16"):
        assert f"Pool global: {kind}" in text
    assert "context parallel" not in text and "data parallel," not in text  # groups of one rank
    assert len(re.findall(r'<span class="gpu', text)) == 128 * 5  # four kinds of groups, and the memory
    assert (
        len(re.findall(r'<span class="gpu[^>]*>15</span>', text)) == 8 + 8
    )  # the last stage's, the last engine's
    (step,) = re.findall(r"^ +step +([\d.]+)", table, re.MULTILINE)
    assert f"<td>step</td><td>{step}</td>" in text
    (likely_range,) = re.findall(r"^likely (from [\d,.]+ to [\d,.]+ s) a step", table, re.MULTILINE)
    assert f"likely {likely_range}" in text
    bars = page.chart("Memory by phase")
    sums = [sum(values) for values in zip(*(part["values"] for part in bars["parts"]), strict=True)]
    assert sums == pytest.approx(bars["totals"], abs=0.01) and min(sums) > 0
    (reserve,) = re.findall(r"^of 140\.0 GiB a device, ([\d.]+) of them", table, re.MULTILINE)
    assert bars["limit"] == pytest.approx(140 - float(reserve), abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PPO, "--hardware", "H1000"], "--hardware H1000 is not in the table; did you mean H100?"),
        ([PPO, "--assume", "speed=1"], "--assume speed=1: 'speed' is unknown"),
        ([PPO, "--gpu-memory", "-1"], "--gpu-memory is -1 GiB; it must be at least 0"),
        ([PPO, "--search", "--top", "0"], "--top is 0; it must be at least 1"),
        ([PPO, "--search", "--html", "x.html"], "--html beside --search"),
        ([PPO, "--search", "--gpu-memory", "20"], "no layout on the recipe's devices fits 20 GiB"),
        (
            [DEEPSEEK, "trainer.nnodes=1", "--search", "--hardware", "A100"],
            "no engine has room in rollout.gpu_memory_utilization=0.7",
        ),
        ([PPO, "--search", "--gpu-memory", "8"], "; the actor's weights, gradients and optimizer states take more"),
        ([PPO, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3"], "tensor_model_parallel_size"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(arguments, message, capsys) -> None:
    assert main(["plan", "step", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_collecting_and_learning_at_the_same_time(capsys) -> None:
    """The engines have a pool of their own: with one_step_off a step takes the sync and the longer of the two concurrent views."""
    pools = [
        "trainer.nnodes=2",
        "resource_pools={train: {n_gpus_per_node: 8}, serve: {n_gpus_per_node: 4}}",
        "actor_rollout_ref.actor.resource_pool=train",
        "actor_rollout_ref.rollout.resource_pool=serve",
        "critic.resource_pool=train",
    ]
    apart = planned(capsys, PPO, *pools, "--without-sync")
    assert apart["devices"] == 12
    seconds = {name: phase["seconds"] for name, phase in apart["phases"].items()}
    assert apart["step"]["seconds"] == pytest.approx(sum(seconds.values()))
    # Actor and critic share GPUs: they take turns, though nothing leaves these GPUs for the engines.
    for name, critics in (("evaluate_models", "critic forward"), ("update", "critic updates")):
        parts = apart["phases"][name]["parts"]
        assert critics in parts and seconds[name] == pytest.approx(sum(parts.values()))
    ahead = planned(capsys, PPO, *pools, "trainer.mode=one_step_off", "--without-sync")["step"]["seconds"]
    assert ahead == pytest.approx(
        seconds["sync"] + max(seconds["generate"], seconds["evaluate_models"] + seconds["update"])
    )


def test_engines_of_concurrent_validation(capsys) -> None:
    """The engines are on devices of their own, where they always hold what the rollouts' engines hold during generation."""
    pools = "resource_pools={train: {n_gpus_per_node: 8}, eval: {n_gpus_per_node: 2}}"
    own = [
        pools,
        "trainer.eval_mode=concurrent",
        "trainer.nnodes=2",
        "actor_rollout_ref.actor.resource_pool=train",
    ]
    own += ["critic.resource_pool=train"]
    alone, found = planned(capsys, PPO, "--without-sync"), planned(capsys, PPO, *own, "--without-sync")
    assert (alone["devices"], found["devices"]) == (8, 10)
    assert found["step"]["seconds"] == pytest.approx(
        alone["step"]["seconds"]
    )  # a validation is not part of a step
    phases = found["memory"]["phases"]
    for part in ("weights", "kv_cache"):
        assert {phase[f"eval_{part}"] for phase in phases.values()} == {phases["generate"][f"rollout_{part}"]}
    assert "eval_weights" not in alone["memory"]["phases"]["generate"]


def test_engines_that_serve_adapters_get_these_alone(capsys) -> None:
    """The adapters have rank 32 on every linear layer of Qwen2.5-72B, sharded over 8 devices."""
    pools = [
        "trainer.nnodes=2",
        "resource_pools={train: {n_gpus_per_node: 8}, serve: {n_gpus_per_node: 8}}",
        "actor_rollout_ref.actor.resource_pool=train",
        "actor_rollout_ref.rollout.resource_pool=serve",
    ]
    plan = planned(capsys, LORA, *pools)
    assert plan["sync"] is None
    merged = planned(capsys, LORA, *pools, "actor_rollout_ref.rollout.lora_sync=merged", "--without-sync")
    weights = 72.7e9 * 2 / 8 / (50e9 * 0.8)
    rounds = 0.025 * 8  # one with each of the trainer's tensor parallel ranks
    assert merged["phases"]["sync"]["parts"]["weights"] == pytest.approx(weights + rounds, rel=0.02)
    assert 0 < plan["phases"]["sync"]["parts"]["weights"] < 0.05 * weights
