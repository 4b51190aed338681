"""The size of a micro-batch that no key gives: from lengths, from the memory of GPUs, or from the checkpoint that a run resumes from."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.checkpoints import CheckpointStore, Keep
from megarl.config import RMConfig, SFTConfig, TrainConfig, load_config, resolve, save_config
from megarl.config.resolve import least_tokens
from megarl.plan import micro_batches
from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, fitting_tokens, plan_memory
from megarl.plan.micro_batches import with_chosen_size
from megarl.util.gpus import Gpu
from tests.fixtures.runs import PPO, REPOSITORY, on

ACTOR = "actor_rollout_ref.actor"
NO_SIZE = f"{ACTOR}.ppo_max_token_len_per_gpu=null"
LARGE = REPOSITORY / "recipes/qwen2.5_7b_ppo_gsm8k.yaml"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is the repository's root: the recipes' paths are relative to it."""
    monkeypatch.chdir(REPOSITORY)


def gpus(monkeypatch: pytest.MonkeyPatch, *gib: int) -> None:
    found = tuple(Gpu("H100", "550", each * GIB, 0) for each in gib)
    monkeypatch.setattr(micro_batches, "gpus_here", lambda: found)


def large(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, LARGE, [NO_SIZE, *overrides])


def test_a_size_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 80)
    config = load_config(TrainConfig, LARGE)
    assert with_chosen_size(config) == (config, [])
    given = load_config(TrainConfig, LARGE, [NO_SIZE, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"])
    assert with_chosen_size(given) == (given, [])


def test_without_gpus_it_is_that_of_the_configuration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch)
    config, (line,) = with_chosen_size(large())
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 4 * longest
    assert resolve(config) == resolve(large())
    assert line.startswith(f"{ACTOR}.ppo_max_token_len_per_gpu={4 * longest} is chosen: 4 times the ")
    config, (line,) = with_chosen_size(large(f"{ACTOR}.use_dynamic_bsz=false"))
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert line.startswith(f"{ACTOR}.ppo_micro_batch_size_per_gpu=4 is chosen")


def test_gpus_hold_what_is_chosen_and_not_twice_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size follows from the plan of the complete run, without the phases of the engines."""
    chosen = {}
    for memory in (24, 60, 80, 140, 1000):
        gpus(monkeypatch, 1000, memory)  # the smallest memory counts
        config, (line,) = with_chosen_size(large())
        tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        assert f"{ACTOR}.ppo_max_token_len_per_gpu={tokens} is chosen: " in line and f"({memory} GiB)" in line
        chosen[memory] = tokens
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert sorted(chosen.values()) == list(chosen.values()) and len(set(chosen.values())) > 2, chosen
    assert chosen[24] == longest and chosen[1000] == 16 * longest
    for memory, tokens in chosen.items():
        for times in (1, 2):
            keys = [f"{ACTOR}.ppo_max_token_len_per_gpu={times * tokens}"]
            sized, inputs = read_inputs(str(LARGE), keys)
            plan = plan_memory(sized, inputs, memory * GIB)
            peak = max(plan.fullest(phase) for phase in ("evaluate_models", "update_critic", "update_actor"))
            if tokens > longest and times == 1:
                assert peak + plan.reserve <= memory * GIB
            if tokens < 16 * longest and times == 2:
                assert peak + plan.reserve > memory * GIB


def test_a_controller_without_gpus_asks_the_cluster_that_it_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the head's pod on Kubernetes, where the workers alone have GPUs."""
    gpus(monkeypatch, 80)
    expected, _ = with_chosen_size(large())
    gpus(monkeypatch)
    nodes = [{"NodeID": name, "Resources": {"GPU": 8.0}} for name in ("two", "one")]
    nodes.append({"NodeID": "head", "Resources": {"memory": 1.0}})
    done: list[object] = []
    monkeypatch.setattr("megarl.cluster.start_cluster", lambda *given: done.append(given) or "the cluster")
    monkeypatch.setattr("megarl.cluster.stop_cluster", done.append)
    monkeypatch.setattr("megarl.cluster.hosts.living_nodes", lambda: nodes)

    def on_node(node: str, seconds: float, function: object) -> tuple[Gpu, ...]:
        done.append(node)
        return (Gpu("H100", "550", 80 * GIB, 0),)

    monkeypatch.setattr("megarl.cluster.hosts.on_node", on_node)
    joining = large("trainer.ray_address=auto", f"trainer.default_local_dir={tmp_path}")
    config, (line,) = with_chosen_size(joining)
    actors = [each.actor_rollout_ref.actor for each in (config, expected)]
    assert actors[0].ppo_max_token_len_per_gpu == actors[1].ppo_max_token_len_per_gpu and "(80 GiB)" in line
    assert done == [("auto", 1, str(tmp_path)), "one", "the cluster"]
    del nodes[:2]  # a cluster without GPUs
    assert resolve(with_chosen_size(joining)[0]) == resolve(joining)
    assert done[3:] == [done[0], done[2]]


@pytest.mark.parametrize("schema", [SFTConfig, RMConfig])
def test_fine_tuning_has_what_its_model_alone_leaves(
    monkeypatch: pytest.MonkeyPatch, schema: type[SFTConfig | RMConfig]
) -> None:
    keys = ["data.train_files=f", "data.max_length=1024", "data.train_batch_size=8", "optim.lr=1"]
    keys += [
        "model.path=recipes/models/qwen2.5-7b",
        "trainer.n_gpus_per_node=8",
        "megatron.tensor_model_parallel_size=2",
    ]
    config = load_config(schema, None, keys)
    gpus(monkeypatch, 80)
    sized, (line,) = with_chosen_size(config)
    assert line.startswith(f"max_token_len_per_gpu={sized.max_token_len_per_gpu} is chosen: ")
    least = least_tokens(config)  # for rankings a pair of texts
    assert least == (1024 if schema is SFTConfig else 2048)
    found = [fitting_tokens(config, least, memory * GIB) for memory in (10, 50, 64, 80, 1000)]
    assert found == sorted(found) and (found[0], found[-1]) == (least, 16 * least)
    assert sized.max_token_len_per_gpu == found[3] and len(set(found)) > 2, found
    less = replace(config, megatron=replace(config.megatron, recompute_granularity="full"))
    assert fitting_tokens(less, least, 50 * GIB) > found[1]  # fewer activations are kept


def test_a_run_that_goes_on_keeps_its_size(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, *keys = PPO
    config = load_config(TrainConfig, REPOSITORY / recipe, [*keys, *on(task, tmp_path / "run"), NO_SIZE])
    gpus(monkeypatch, 80)
    first, _ = with_chosen_size(config)
    assert first.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 16 * 56
    with CheckpointStore(tmp_path / "run/checkpoints", Keep(1)) as store, store.building(1) as partial:
        save_config(resolve(first), partial / "config.yaml")
        store.commit(1, partial, {"config.yaml": None}, {"step": 1})
    gpus(monkeypatch)
    again, (line,) = with_chosen_size(config)
    assert again == first and line.endswith("as in the checkpoint that the run goes on from")
    anew = load_config(
        TrainConfig, REPOSITORY / recipe, [*keys, *on(task, tmp_path / "run"), NO_SIZE, "trainer.resume_mode=disable"]
    )  # fmt: skip
    assert with_chosen_size(anew)[0].actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 4 * 56


def test_engines_on_devices_of_their_own_do_not_shrink_micro_batches() -> None:
    recipe, rollout = REPOSITORY / "recipes/qwen3_30b_a3b_grpo_async.yaml", "actor_rollout_ref.rollout"
    keys = [NO_SIZE, f"{rollout}.max_num_seqs=1024"]
    small, full = (
        load_config(TrainConfig, recipe, [*keys, f"{rollout}.gpu_memory_utilization={part}"])
        for part in (0.8, 0.92)
    )
    assert fitting_tokens(full, 9216, 79 * GIB) == fitting_tokens(small, 9216, 79 * GIB) > 9216
