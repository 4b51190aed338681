"""`megarl plan memory`: the recipes that come with megarl fit, the terms agree with formulas, and a search finds layouts; also for `megarl sft`, `rm`
and `dpo`."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from megarl.cli.main import main
from megarl.costs.activations import _in_flight
from megarl.costs.phases import ALL_OF
from megarl.layout.grid import ParallelLayout
from megarl.plan.fit import _engine_sizes, ends, fit
from megarl.plan.inputs import read_inputs, read_planned
from megarl.plan.memory import GIB, fitting_tokens, plan_memory, plan_of

ROOT = Path(__file__).resolve().parents[2]
QWEN, DEEPSEEK, FULL = (
    str(ROOT / f"recipes/{name}.yaml")
    for name in ("qwen2.5_72b_grpo_lora", "deepseek_v3_grpo_lora", "deepseek_v3_grpo_256x80gb")
)
LAYERS_AGAIN = [
    f"actor_rollout_ref.actor.megatron.{key}"
    for key in ("recompute_granularity=full", "recompute_modules=null")
]
LORA, ROLLOUT = "actor_rollout_ref.model.lora", "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the repository's root: the recipes' paths are relative to it."""
    monkeypatch.chdir(ROOT)


def planned(capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    assert main(["plan", "memory", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_72b_with_adapters_fits_eight_gpus_of_80_gb(capsys) -> None:
    """The model's 72.7 G parameters over 8 devices, held twice while they are sent; the reference policy has no copy."""
    plan = planned(capsys, QWEN)
    assert plan["fits"] and not plan["problems"]
    update, sync = plan["phases"]["update_actor"], plan["phases"]["sync"]
    assert update["actor_weights"] == pytest.approx(72.7e9 * 2 / 8, rel=2e-3)
    assert sync["rollout_weights"] == pytest.approx(72.7e9 * 2 / 8, rel=2e-3)
    assert update["actor_gradients"] == 2 * update["actor_adapters"]
    assert update["actor_optimizer"] == 6 * update["actor_adapters"]  # one data parallel rank
    assert not any(name.startswith("ref_") for phase in plan["phases"].values() for name in phase)
    layers = planned(capsys, QWEN, *LAYERS_AGAIN)["phases"]["update_actor"]
    # the inputs of 80 layers, 16384 / 8 tokens each; layers are recomputed one by one
    assert layers["actor_activations"] == pytest.approx(80 * 2048 * 8192 * 2, rel=0.3)
    # With only MLPs recomputed, `megarl plan memory --dry-run` of this recipe found this size on 2026-11-26, in a shadow run of rank 0.
    assert update["actor_activations"] + update["actor_working"] == pytest.approx(20_970_146_304, rel=1e-3)
    # Slots for packed slices, and for slices that other GPUs send; a single rank has all slices that it serves.
    assert sync["actor_sync_buffers"] == 4 * 256 << 20
    alone = planned(capsys, str(ROOT / "recipes/qwen2.5_0.5b_ppo_single_gpu.yaml"))["phases"]["sync"]
    assert alone["actor_sync_buffers"] == 2 * 256 << 20
    assert "rollout_sync_buffers" not in sync and "rollout_sync_buffers" not in alone
    more = planned(capsys, QWEN, f"{LORA}.rank=128")
    assert more["fits"]
    assert more["phases"]["update_actor"]["actor_adapters"] == 4 * update["actor_adapters"]


def test_without_adapters_it_does_not_fit_and_the_reason_is_named(capsys) -> None:
    plan = planned(capsys, QWEN, f"{LORA}.rank=0", f"{LORA}.alpha=null")
    assert not plan["fits"]
    update = plan["phases"]["update_actor"]
    assert update["actor_gradients"] == 2 * update["actor_weights"]
    assert update["actor_optimizer"] == 6 * update["actor_weights"]
    assert plan["phases"]["evaluate_models"]["ref_weights"] == update["actor_weights"]
    assert any(
        "update_actor takes" in problem and "actor_optimizer" in problem for problem in plan["problems"]
    )


def test_671b_with_adapters_on_a_float8_base(capsys) -> None:
    plan = planned(capsys, DEEPSEEK, "--gpu-memory", "140")
    assert plan["fits"] and not plan["problems"]
    # Engines of 8 devices hold 671 G parameters in about a byte each.
    assert plan["phases"]["sync"]["rollout_weights"] == pytest.approx(671e9 / 8, rel=0.03)
    assert plan["kv_token_bytes"] == 61 * (512 + 64) * 2
    small = planned(capsys, DEEPSEEK, "--gpu-memory", "79")
    assert not small["fits"] and any("rollout_weights" in problem for problem in small["problems"])
    alone = planned(capsys, DEEPSEEK, "--gpu-memory", "79", "--without-engines", *LAYERS_AGAIN)
    assert alone["fits"] and "rollout_weights" not in alone["phases"]["sync"]


def test_a_critic_and_its_base() -> None:
    critic = [
        f"{LORA}.rank=32",
        "algorithm.adv_estimator=gae",
        "critic.model.lora={rank: 32}",
        "critic.optim.lr=1e-5",
    ]
    phases = {}
    for shared in ("false", "true"):
        config, inputs = read_inputs(QWEN, [*critic, f"critic.model.share_base={shared}"])
        plan = plan_memory(config, inputs, 79 * GIB, 0)
        phases[shared] = {owner.name: max(owner.at("update_critic")) for owner in plan.owners}
    apart, shared = phases["false"], phases["true"]
    assert "critic_weights" not in shared and apart["critic_weights"] > 15e9 and not apart["actor_weights"]
    assert shared["actor_weights"] > 15e9
    assert {name: apart[name] for name in ALL_OF["critic"][2:]} == {
        name: shared[name] for name in ALL_OF["critic"][2:]
    }
    head = 2 * inputs.model.hidden_size  # counts as weights where these are the critic's
    assert shared["critic_adapters"] == apart["critic_adapters"] + head


def test_each_of_several_teachers_has_its_weights_while_it_judges(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """All teachers hold their weights at the same time, but only in the phase of log-probs, since they share GPUs with the engines; each is in its
    own processes."""
    recipe = str(ROOT / "recipes/qwen3_4b_distillation.yaml")
    one = planned(capsys, recipe)
    keys = yaml.safe_load(Path(recipe).read_text())
    teacher = keys["actor_rollout_ref"].pop("ref")
    half = {**teacher, "megatron": {**teacher["megatron"], "expert_model_parallel_size": 4}}
    keys["actor_rollout_ref"]["teachers"] = {"math": teacher, "code": half}
    keys["base"] = str(ROOT / "recipes/bases/math_grpo.yaml")
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(keys))
    two = planned(capsys, str(tmp_path / "two.yaml"))
    before, after = (plan["phases"]["evaluate_models"] for plan in (one, two))
    assert after["teacher_math_weights"] == before["ref_weights"]
    assert 1.5 * after["teacher_math_weights"] < after["teacher_code_weights"]
    assert "ref_weights" not in after and after["actor_weights"] == before["actor_weights"]
    for phase in ("sync", "generate", "update_actor"):
        assert not any("teacher" in name for name in two["phases"][phase])
    assert two["reserve"] > one["reserve"]


def test_671b_in_bf16_is_served_by_engines_over_four_nodes_of_80_gb(capsys) -> None:
    """671 G parameters x 2 bytes over 32 devices are 41 GB on each; over 16 devices they would leave no memory for a cache."""
    arguments = [FULL, "--gpu-memory", "79"]
    plan = planned(capsys, *arguments)
    assert plan["fits"] and not plan["problems"]
    whole = plan["phases"]["generate"]["rollout_weights"]
    assert whole == pytest.approx(
        671e9 * 2 / 32, rel=0.06
    )  # every rank has latent attention's down projections
    half = [f"{ROLLOUT}.tensor_model_parallel_size=16", f"{ROLLOUT}.expert_parallel_size=16"]
    assert not planned(capsys, *arguments, *half)["fits"]


def test_groups_of_data_parallel_attention_have_caches_of_their_own(capsys) -> None:
    """DeepSeek-V3 over 32 devices, attention within each node: the heads' projections and the embedding are cut into 8 instead of 32 parts, and the
    four nodes cache different texts."""
    arguments, groups = [FULL, "--gpu-memory", "79"], f"{ROLLOUT}.attention_data_parallel_size"
    one, four = planned(capsys, *arguments), planned(capsys, *arguments, f"{groups}=4")
    weights = [plan["phases"]["generate"]["rollout_weights"] for plan in (one, four)]
    heads = (
        24576 * 1536 + 2 * 32768 * 512 + 7168 * 16384
    )  # kv_b_proj is there a second time, as its two factors
    cut = 61 * heads + 129280 * 7168
    assert weights[1] - weights[0] == 2 * cut * 3 // 32
    assert four["kv_tokens"] == 4 * ((0.85 * 79 * GIB - weights[1]) // (61 * 576 * 2))
    assert one["kv_tokens"] == (0.85 * 79 * GIB - weights[0]) // (61 * 576 * 2)
    assert (one["kv_groups"], four["kv_groups"]) == (1, 4)
    few = planned(capsys, *arguments, f"{groups}=32", f"{ROLLOUT}.gpu_memory_utilization=0.81")
    assert few["kv_tokens"] > 9216 > few["kv_tokens"] // 32
    assert not few["fits"] and any("less than one trajectory of 9,216" in told for told in few["problems"])


def test_the_search_spreads_engines_that_fit_no_node() -> None:
    """In bf16 72.7 G parameters take 18.2 GB on each of 8 devices and 9.1 GB on each of 16: more than the 8 GiB that are free for them."""
    config, inputs = read_inputs(QWEN, [])
    room = 8 * GIB
    sizes = _engine_sizes(config, inputs, room, 4)
    assert min(sizes) == 32 > config.trainer.n_gpus_per_node
    with pytest.raises(ValueError, match="engines on up to 2 nodes of 8 devices hold more weights"):
        _engine_sizes(config, inputs, room, 2)
    assert _engine_sizes(config, inputs, 40 * GIB, 4) == [4, 8]


def test_the_search_takes_the_fewest_nodes() -> None:
    config, inputs = read_inputs(QWEN, [])
    found, plan = fit(config, inputs, 79 * GIB, 6 * GIB, 2)
    assert found.trainer.nnodes == 1 and plan.fits
    assert fit(config, inputs, 30 * GIB, 6 * GIB, 1) is None
    more, _ = fit(config, inputs, 40 * GIB, 6 * GIB, 4)
    assert more.trainer.nnodes > 1


def test_uneven_stages_hold_all_layers() -> None:
    for stages in range(2, 16):
        for first, last in ends(61, stages):
            given = [count for count in (first, last) if count is not None]
            assert (61 - sum(given)) % max(1, stages - len(given)) == 0


def test_micro_batches_that_wait_for_their_backward_pass() -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473), section 2.2: as many as there are stages from this one on, at most."""
    layout = ParallelLayout(world=4, pp=4)
    assert [_in_flight(layout, stage, None) for stage in range(4)] == [[4], [3], [2], [1]]
    assert _in_flight(layout, 0, 2) == [2]
    virtual = ParallelLayout(world=4, pp=4, vpp=2)
    assert [sum(_in_flight(virtual, stage, None)) for stage in range(4)] == [11, 9, 7, 5]
    assert Counter(_in_flight(virtual, 0, 4)) == Counter([4, 4])


def test_what_is_beside_the_owners_follows_from_the_processes_of_a_gpu(capsys) -> None:
    """PPO has one process more than GRPO, the critic's, and a reward model adds another. --reserve replaces the sum."""
    gsm8k, reward = (
        f"recipes/{name}.yaml" for name in ("qwen2.5_7b_ppo_gsm8k", "llama3_8b_ppo_reward_model")
    )
    of_two, of_three, of_four = planned(capsys, QWEN), planned(capsys, gsm8k), planned(capsys, reward)
    for number, plan in ((2, of_two), (3, of_three), (4, of_four)):
        assert plan["reserved"][f"CUDA contexts: {number}"] == number * GIB // 2
        assert plan["reserve"] == sum(plan["reserved"].values())
    assert of_two["reserve"] < of_three["reserve"] < of_four["reserve"]
    said = planned(capsys, gsm8k, "--reserve", "6")
    assert (said["reserve"], said["reserved"]) == (6 * GIB, {})
    assert not planned(capsys, gsm8k, "--reserve", "75")["fits"]


def test_its_causes_are_rows_of_the_table(capsys) -> None:
    assert main(["plan", "memory", QWEN]) == 0
    text = capsys.readouterr().out
    for name in (
        "CUDA contexts: 2",
        "NCCL communicators: 5",  # one for the weight sync
        "CUDA graphs",
        "sampling",
        "workspaces",
        "fragments",
    ):
        assert name in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([QWEN, "--max-nodes", "0"], "--max-nodes is 0; it must be at least 1"),
        ([QWEN, "--reserve", "-1"], "--reserve is -1 GiB; it must be at least 0"),
        ([QWEN, "trainer.nnodes=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=32"], "is more than the 16 devices of resource pool"),
        ([QWEN, "--fit", "--max-nodes", "1", "--gpu-memory", "30"], "on no number of nodes up to --max-nodes 1"),
        ([QWEN, "--fit", "--gpu-memory", "8", "--reserve", "6"], "engines on up to "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(arguments, message, capsys) -> None:
    assert main(["plan", "memory", *arguments]) == 2
    assert message in capsys.readouterr().err


QWEN_7B = Path(__file__).resolve().parents[2] / "recipes" / "models" / "qwen2.5-7b"
KEYS = [f"model.path={QWEN_7B}", "data.train_files=none", "data.max_length=2048", "data.train_batch_size=8",
        "optim.lr=1e-5", "trainer.n_gpus_per_node=8", "megatron.tensor_model_parallel_size=2"]  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "recipe.yaml").write_text("max_token_len_per_gpu: 8192\n")
    return str(tmp_path / "recipe.yaml")


def owners(recipe: str, command: str, *keys: str) -> dict[str, int]:
    config, inputs = read_planned(recipe, [*KEYS, *keys], command)
    return {owner.name: max(owner.stages) for owner in plan_of(config, inputs, 79 * GIB, 0).owners}


def test_one_model_holds_all_it_has_all_the_time(recipe: str, capsys: pytest.CaptureFixture) -> None:
    """Qwen2.5-7B has 7.6 G weights; each of four data parallel ranks has a fourth of the 12 bytes of optimizer states."""
    arguments = ["plan", "memory", recipe, *KEYS, "--command", "sft", "--json", "--gpu-memory", "139"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and list(plan["phases"]) == ["update"]
    update = plan["phases"]["update"]
    assert update["sft_weights"] == pytest.approx(7.6156e9, rel=1e-3)
    assert update["sft_gradients"] == 2 * update["sft_weights"]
    assert update["sft_optimizer"] == pytest.approx(7.6156e9 / 2 * 12 / 4, rel=1e-3)
    assert update["total"] == sum(size for name, size in update.items() if name != "total")
    assert plan["kv_tokens"] == 2048 and not plan["kv_token_bytes"]


def test_a_reward_model_has_a_head_of_one_row(recipe: str) -> None:
    sft, rm = owners(recipe, "sft"), owners(recipe, "rm")
    head = 2 * 152064 // 2 * 3584  # bytes of half of the language model's head, which is not tied
    assert sft["sft_weights"] - rm["rm_weights"] == head - 2 * 3584
    assert {"rm_evaluating", "rm_activations", "rm_working"} <= rm.keys()
    assert owners(recipe, "dpo").keys() == {name.replace("rm_", "dpo_") for name in rm}
    assert "sft_evaluating" not in sft  # there are no held-out examples
    assert "sft_evaluating" in owners(recipe, "sft", "data.val_files=none")


def test_adapters_have_gradients_and_states_alone(recipe: str) -> None:
    full, lora = owners(recipe, "dpo"), owners(recipe, "dpo", "model.lora.rank=16")
    assert lora["dpo_weights"] == full["dpo_weights"]
    assert lora["dpo_gradients"] == 2 * lora["dpo_adapters"] < full["dpo_gradients"] / 100


def test_sizes_of_micro_batches_are_chosen_by_the_same_formulas(recipe: str) -> None:
    config, inputs = read_planned(recipe, [*KEYS, "max_token_len_per_gpu=null"], "sft")
    del inputs
    tokens = fitting_tokens(config, 2048, 79 * GIB)
    fits = {
        number: plan_of(
            *read_planned(recipe, [*KEYS, f"max_token_len_per_gpu={number}"], "sft"), 79 * GIB
        ).fits
        for number in (tokens, 2 * tokens)
    }
    assert fits[tokens] and (2 * tokens > 65536 or not fits[2 * tokens])


def test_what_is_of_training_with_engines_alone_is_refused(
    recipe: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["plan", "memory", recipe, *KEYS, "--command", "rm", "--fit"]) == 2
    assert "--fit looks for layouts of `megarl train` alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2.5_7b_ppo_gsm8k", ()),  # context parallel parts
        (
            "llama3_8b_ppo_reward_model",
            ("--gpu-memory", "48"),
        ),  # a critic with a layout of its own, a reward model without
        (
            "qwen2.5_7b_dapo",  # ends of a pipeline that the found layout does not have
            (
                "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
                "actor_rollout_ref.actor.megatron.num_layers_in_first_pipeline_stage=13",
            ),
        ),
    ],
)
def test_the_keys_that_a_search_prints_give_its_plan(capsys, name: str, options: tuple[str, ...]) -> None:
    recipe = str(ROOT / f"recipes/{name}.yaml")
    found = planned(capsys, recipe, *options, "--fit")
    again = planned(capsys, recipe, *options, *found["layout"])
    assert found["fits"] and again["phases"] == found["phases"]


def test_the_largest_part_is_named_on_the_devices_that_are_full() -> None:
    recipe = str(ROOT / "recipes/qwen3_30b_a3b_grpo_async.yaml")
    keys = [
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=160000",
    ]
    config, inputs = read_inputs(recipe, keys)
    (problem,) = plan_memory(config, inputs, 79 * GIB).problems()
    assert problem.startswith("update_actor takes ") and "the largest part is actor_optimizer" in problem
