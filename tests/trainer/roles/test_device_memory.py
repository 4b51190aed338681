"""Which memory moves to and from the devices between the phases of a step, and the account of it."""

import contextlib
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.cluster import WorkerDied, WorkerLost
from megarl.config import ActorConfig, AlgorithmConfig, OptimConfig
from megarl.costs.phases import NEEDS, phase_needs
from megarl.trainer.roles.device_memory import (
    MIB,
    DeviceMemory,
    Owner,
    gpu_turns,
    nobody_is_served,
    nothing_is_replaced,
)

STEP = ("sync", "generate", "score_model", "evaluate_models", "update_critic", "update_actor")
SIZES = {"weights": 4, "gradients": 8, "optimizer": 24, "reference": 4, "kv_cache": 50}


@dataclass(frozen=True)
class Slot:
    """A device; on a machine without GPUs its `gpu_id` is None."""

    name: str
    gpu_id: str | None = None


@dataclass
class Group:
    """Two processes with a device each; `log` records the parts that are on the devices after each call."""

    role: str
    parts: list[str]
    devices: list[tuple[Slot, ...]]
    log: list[set[str]]
    everything: set[str]
    away: set[str] = field(default_factory=set)

    def call(self, method, parts=()):
        for part in parts:
            name = f"{self.role}_{part}"
            assert (name in self.everything) == (method == "release_memory"), (method, name)
            self.everything ^= {name}
            self.log.append(set(self.everything))
        return [[self.memory(rank)] for rank in range(len(self.devices))]

    def memory(self, rank):
        here = {part: f"{self.role}_{part}" in self.everything for part in self.parts}
        return {part: SIZES[part] * MIB * (rank + 1) * there for part, there in here.items()} | {"on_host": 7}


@dataclass
class FakeRun:
    folder: Path | None = None  # None: no file is written
    at_step: int = 1
    said: list[str] = field(default_factory=list)
    seconds: list[str] = field(default_factory=list)

    def say(self, text):
        self.said.append(text)

    def wait(self, refs):
        return refs

    @contextlib.contextmanager
    def timed(self, phase):
        self.seconds.append(phase)
        yield


PARTS = {
    "actor": ["weights", "gradients", "optimizer", "reference"],
    "critic": ["weights", "gradients", "optimizer"],
    "reward_model": ["weights"],
    "rollout": ["weights", "kv_cache"],
}


def make(movable=True, critic_devices=("d0", "d1"), gpu_id=None):
    """All roles on two devices, d0 and d1, except a critic with `critic_devices`; movable engines begin off the devices, as at a run's start."""
    everything, log, owners = set(), [], []
    for role, parts in PARTS.items():
        devices = critic_devices if role == "critic" else ("d0", "d1")
        group = Group(role, parts, [(Slot(device, gpu_id),) for device in devices], log, everything)
        everything |= {f"{role}_{part}" for part in parts if role != "rollout" or not movable}
        for part in parts:
            name = "ref_weights" if part == "reference" else f"{role}_{part}"
            owners.append(Owner(name, group, part, movable, resident=role != "rollout" or not movable))
    run = FakeRun()
    return DeviceMemory(run, owners), log, run


def test_never_both_copies_and_both_caches():
    """In any order of phases, the devices hold exactly the parts that the current phase needs."""
    for order in itertools.permutations(STEP):
        memory, log, _ = make()
        for phase in (*order, *order[:1]):
            with memory.held(phase):
                here = log[-1]
                renamed = {name.replace("actor_reference", "ref_weights") for name in here}
                there = {owner.name for owner in memory.owners}
                assert renamed == there & set(NEEDS[phase])
    # The order of a run: the KV cache comes after the weight sync.
    memory, log, _ = make()
    for phase in (*STEP, *STEP, "sync", "generate", "export"):
        with memory.held(phase):
            pass
    training_state = {f"{role}_{part}" for role in ("actor", "critic") for part in ("gradients", "optimizer")}
    for here in log[len(PARTS["actor"]) + len(PARTS["critic"]) :]:
        if "rollout_kv_cache" in here:
            assert here <= {"rollout_weights", "rollout_kv_cache"}
        if "reward_model_weights" in here and here > {"reward_model_weights"}:
            assert here == {"reward_model_weights", "rollout_weights"}
        if {"actor_weights", "rollout_weights"} <= here:
            assert not here & (training_state | {"rollout_kv_cache"})
        assert not ({"actor_optimizer", "critic_optimizer"} <= here)


@pytest.mark.parametrize("used", [True, False])
def test_the_exact_kl_in_the_loss_keeps_the_reference_with_the_actor(used):
    actor = ActorConfig(
        ppo_mini_batch_size=8, optim=OptimConfig(lr=1.0), use_kl_loss=used, kl_loss_type="full"
    )
    policy = SimpleNamespace(actor=actor, ref=SimpleNamespace(engine=None), teachers=None)
    config = SimpleNamespace(actor_rollout_ref=policy, critic=None, algorithm=AlgorithmConfig())
    memory, log, _ = make()
    memory.needs = phase_needs(config)
    for phase in STEP:
        with memory.held(phase):
            assert ("actor_reference" in log[-1]) == (
                phase == "evaluate_models" or (used and phase == "update_actor")
            )


def died(role):
    return WorkerDied(SimpleNamespace(role=role, rank=1, host="h", pid=3, log_path="l"), "killed", "")


@pytest.mark.parametrize("lost", ["engine", "rank"])
def test_an_engine_that_ends_while_it_is_asked_is_replaced(lost):
    memory, _, _ = make(movable=False)
    role = "rollout" if lost == "engine" else "actor"
    group = next(owner.group for owner in memory.owners if owner.group.role == role)
    failure, failures, asked = died(role), [], group.call

    def end_at_first(method, parts=()):
        group.call = asked
        raise failure

    def recover(found):
        failures.append(found)
        if found is not None and found.role != "rollout":
            raise found

    group.call, memory.recover = end_at_first, recover
    expected = contextlib.nullcontext() if lost == "engine" else pytest.raises(WorkerLost)
    with expected, memory.held("generate"):
        pass
    assert failures == [None, failure]
    assert list(memory.phases) == (["generate"] if lost == "engine" else [])


@pytest.mark.parametrize("lost", ["engine", "rank"])
@pytest.mark.parametrize(("phase", "number"), [("evaluate_models", 0), ("generate", 1)])
def test_an_engine_that_ends_while_its_memory_moves_is_replaced(phase, number, lost):
    """Such as one that was killed while rewards were computed: nobody has asked for it since its last answer.

    number: of the phase's moves, the one that the engines take part in.
    """
    memory, log, run = make()
    for earlier in ("sync", "generate")[: 2 - number]:
        with memory.held(earlier):
            pass
    failure, failures, waited = died("rollout" if lost == "engine" else "actor"), [], []

    def end(refs):
        waited.append(len(refs))
        if len(waited) == number + 1 or (lost == "rank" and len(waited) > number):
            raise failure
        return refs

    def recover(found):
        if found is not None:
            failures.append(found)
            if found.role != "rollout":
                raise found

    run.wait, memory.recover = end, recover
    if lost == "rank":
        with pytest.raises(WorkerLost), memory.held(phase):
            pass
        assert failures == [failure]
        return
    memory.steps = 3  # the phase is not measured
    with memory.held(phase):
        # Nobody's memory has moved twice, which `Group` asserts, and all of it is where the phase needs it.
        needed = {owner.name for owner in memory.owners} & set(NEEDS[phase])
        assert {name.replace("actor_reference", "ref_weights") for name in log[-1]} == needed
        assert {owner.name for owner in memory.owners if owner.resident} == needed
    assert failures == [failure]
    assert waited[number + 1] == waited[number] - 1  # the other engine is waited for


def test_ranks_that_are_not_replaced_end_the_phase():
    memory, _, _ = make(movable=False)
    failure = died("actor")

    def end(refs):
        raise failure

    memory.run.wait = end
    with pytest.raises(WorkerLost) as raised, memory.held("generate"):
        pass
    assert raised.value is failure


def test_what_cannot_move_stays_and_is_not_called():
    memory, log, _ = make(movable=False)
    for phase in STEP:
        with memory.held(phase):
            pass
    assert log == []


@pytest.mark.parametrize(
    ("movable", "critic_devices", "expected"),
    [
        (True, ("d0", "d1"), [("update_critic", ("critic",)), ("update_actor", ("actor",))]),
        (True, ("d1", "d2"), [("update_critic", ("critic",)), ("update_actor", ("actor",))]),
        (True, ("d2", "d3"), [("update", ("critic", "actor"))]),
        (False, ("d0", "d1"), [("update", ("critic", "actor"))]),
    ],
)
def test_updates_take_turns_only_to_make_room(movable, critic_devices, expected):
    memory, _, _ = make(movable, critic_devices)
    assert memory.turns(["critic", "actor"]) == expected


@pytest.mark.parametrize("movable", [True, False])
@pytest.mark.parametrize(
    ("critic_devices", "shared"), [(("d0", "d1"), True), (("d1", "d2"), True), (("d2", "d3"), False)]
)
def test_updates_on_the_same_gpus_take_turns_though_nothing_moves(critic_devices, shared, movable):
    memory, _, _ = make(movable, critic_devices, gpu_id="0")
    turns = [("update_critic", ("critic",)), ("update_actor", ("actor",))]
    assert memory.turns(["critic", "actor"]) == (turns if shared else [("update", ("critic", "actor"))])


def returns(memory, phases):
    """By phase, the roles that were asked to give back memory as it began."""
    asked = []
    for group in {id(owner.group): owner.group for owner in memory.owners}.values():

        def call(method, parts=(), group=group, usual=group.call):
            if method == "return_memory":
                asked.append(group.role)
                return [None]
            return usual(method, parts)

        group.call = call
    found = []
    for phase in phases:
        asked.clear()
        with memory.held(phase):
            found.append((phase, sorted(asked)))
    return found


def test_models_that_stay_on_shared_gpus_give_back_what_their_passes_took():
    """Nothing moves, since the engines have GPUs of their own: a critic's activations must not stay beside the actor's."""
    phases = ("sync", "generate", "evaluate_models", "update_critic", "update_actor") * 2

    def learners(**more):
        memory, _, _ = make(**more)
        memory.owners = [owner for owner in memory.owners if owner.group.role in ("actor", "critic")]
        return memory

    shared = returns(learners(movable=False, gpu_id="0"), phases)
    assert [asked for _, asked in shared] == [[], [], ["actor"], ["actor"], ["critic"]] * 2
    # With GPUs of their own each keeps its memory; so it is on CPUs; and what moves has given it back.
    for more in (
        {"movable": False, "gpu_id": "0", "critic_devices": ("d2", "d3")},
        {"movable": False},
        {"movable": True, "gpu_id": "0"},
    ):
        assert all(asked == [] for _, asked in returns(learners(**more), phases))


def test_a_later_view_knows_which_models_have_not_given_back_what_their_passes_took():
    """With trainer.mode=one_step_off each step learns with a view of its own."""
    memory, _, _ = make(movable=False, gpu_id="0")
    groups = {id(o.group): o.group for o in memory.owners if o.group.role in ("actor", "critic")}
    phases = ("evaluate_models", "update_critic", "update_actor")

    def step():
        view = memory.view(memory.run, [*groups.values()], nothing_is_replaced, nobody_is_served)
        return [asked for _, asked in returns(view, phases)]

    assert [step(), step()] == [[[], ["actor"], ["critic"]], [["actor"], ["actor"], ["critic"]]]


def test_groups_that_share_a_gpu_are_in_different_turns():
    def group(*names, gpu_id="0"):
        return SimpleNamespace(devices=[(Slot(name, gpu_id),) for name in names])

    actor, critic, ref, judge = group("a", "b"), group("b", "c"), group("c", "d"), group("d", "e")
    assert gpu_turns([actor, critic, ref, judge]) == [[0, 2], [1, 3]]
    assert gpu_turns([actor, actor, judge]) == [
        [0, 1, 2]
    ]  # calls of the same processes run one after the other anyway
    assert gpu_turns([group("a"), group("a"), group("a")]) == [[0], [1], [2]]
    on_cpu = [group("a", gpu_id=None) for _ in range(3)]
    assert gpu_turns(on_cpu) == [[0, 1, 2]]
    assert gpu_turns([]) == []


@pytest.mark.parametrize("movable", [True, False])
def test_a_critic_in_the_actors_processes_waits_for_them(movable):
    """In addition to its own parts the critic needs the actor's weights."""
    memory, log, _ = make(movable)
    (actor,) = {
        owner.group.role: owner.group for owner in memory.owners if owner.name == "actor_weights"
    }.values()
    memory.owners = [owner for owner in memory.owners if owner.group.role != "critic"]
    for part in ("gradients", "optimizer"):
        memory.owners.append(Owner(f"critic_{part}", actor, f"critic_{part}", movable))
        actor.everything |= {f"actor_critic_{part}"}
        actor.everything -= {f"critic_{part}"}
    assert memory.turns(["critic", "actor"]) == [("update_critic", ("critic",)), ("update_actor", ("actor",))]
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(
            actor=ActorConfig(ppo_mini_batch_size=8, optim=OptimConfig(lr=1.0)), ref=None, teachers=None
        ),
        critic=SimpleNamespace(model=SimpleNamespace(share_base=True)),
        algorithm=AlgorithmConfig(),
    )
    memory.needs = phase_needs(config)
    with memory.held("update_critic"):
        there = {owner.name for owner in memory.owners if owner.resident}
    if movable:
        assert there == {"actor_weights", "critic_gradients", "critic_optimizer"}
        assert "actor_weights" in log[-1] and "actor_optimizer" not in log[-1]


def test_only_those_who_train_are_given_room():
    memory, _, _ = make()
    assert memory.turns(["critic"]) == [("update_critic", ("critic",))]


def test_the_account_is_of_the_fullest_device(tmp_path):
    memory, _, run = make(critic_devices=("d1", "d2"))
    run.folder = tmp_path
    with memory.phase("sync"):
        pass
    with memory.phase("evaluate_models"):
        pass
    metrics = memory.report()
    assert metrics["memory/sync/actor_weights"] == 8 * MIB
    assert metrics["memory/sync/total"] == 8 * MIB + 8 * MIB  # on d1
    # d1 has the second process of the actor and of the reference, and the critic's first process
    assert metrics["memory/evaluate_models/total"] == (8 + 8 + 4) * MIB
    assert metrics["memory/sync/rollout_kv_cache"] == metrics["memory/sync/actor_optimizer"] == 0
    assert metrics["memory/sync/actor_on_host"] == 7  # reported, but not part of the device's total
    assert memory.run.seconds.count("sync") == 1
    rows = {
        line.split()[0]: line.split()[1:]
        for line in (tmp_path / "memory.txt").read_text().splitlines()[1:]
        if line
    }
    assert rows["actor_weights"] == ["8.0", "8.0"] and rows["ref_weights"] == ["0.0", "8.0"]
    assert rows["all"] == ["of", "these", "16.0", "20.0"]


def test_the_account_is_taken_now_and_then_and_written_when_it_changes(tmp_path):
    memory, _, run = make()
    run.folder, taken, written = tmp_path, [], []
    for step in range(1, 22):
        run.at_step = step
        with memory.held("sync" if step < 20 else "generate"):
            pass
        if memory.report():
            taken.append(step)
        written.append((tmp_path / "memory.txt").read_text().split(":")[0])
    assert taken == [1, 2, 10, 20]
    assert written == [f"device memory after step {1 if step < 20 else 20}" for step in range(1, 22)]
    # d1, with the second process of each role, is the fullest: first with weights, later with the KV cache, too.
    path = tmp_path / "memory.txt"
    assert run.said == [
        f"device memory: 16.0 MiB on the fullest device, in sync; all phases: {path}",
        f"device memory: 108.0 MiB on the fullest device, in generate; all phases: {path}",
    ]
