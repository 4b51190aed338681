"""Moves memory onto the devices for the phases of a step that need it, and keeps the account of device memory.

The needs of each phase, and the parts that leave the devices in other phases, are in `megarl.costs.phases`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megarl.cluster import WorkerLost
from megarl.config import reference_is_actor, references
from megarl.costs.phases import NEEDS, frees_engines, leaves, phase_needs, trained_parts
from megarl.util.files import write_text

if TYPE_CHECKING:
    from megarl.cluster import Device, WorkerGroup
    from megarl.cluster.group import Call
    from megarl.config import ActorConfig, CriticConfig, RefConfig, RewardModelConfig, TrainConfig
    from megarl.trainer.roles.model_roles import Role
    from megarl.trainer.run.run import Run

MIB = 1 << 20
MEMORY_FILE = "memory.txt"
ACCOUNT_EVERY = 10  # steps: asking all processes takes some 20 ms a phase
Account = dict[str, dict["Device", int]]
"""Owner -> device -> bytes."""
Recover = Callable[[WorkerLost | None], object]
"""Replaces lost engines, including the one of a given failure; raises the failure if it cannot be replaced."""


def nothing_is_replaced(failure: WorkerLost | None) -> None:
    """`Recover` where there are no engines."""
    if failure is not None:
        raise failure


def nobody_is_served() -> None:
    """`DeviceMemory.serve` where there are no engines, or none is replaced."""


@dataclass
class Owner:
    """Memory of a group that is moved on and off its devices as one part.

    Attributes:
        name: its name in NEEDS.
        part: its name in the group's processes.
        movable: whether it leaves the devices in phases that do not need it.
        resident: whether it is on the devices now (it may be empty: a transport without buffers).
    """

    name: str
    group: WorkerGroup
    part: str
    movable: bool
    resident: bool = True


@dataclass
class DeviceMemory:
    """The memory of a run's devices: moved for each phase of a step, and reported.

    Attributes:
        serve: gives engines that were replaced the weights of the others; to be called before their caches come, which come after weights.
    """

    run: Run
    owners: list[Owner]
    needs: dict[str, tuple[str, ...]] = field(default_factory=lambda: NEEDS)
    phases: dict[str, Account] = field(default_factory=dict)
    steps: int = 0
    written: list[list[str]] = field(default_factory=list)
    most: str = ""  # MiB on the fullest device, as printed last
    # Models, by role, that have computed since they last gave back the memory that torch keeps for a process's next tensors.
    at_work: dict[str, WorkerGroup] = field(default_factory=dict)
    recover: Recover = nothing_is_replaced
    serve: Callable[[], object] = nobody_is_served

    def view(
        self, run: Run, groups: Collection[WorkerGroup], recover: Recover, serve: Callable[[], object]
    ) -> DeviceMemory:
        """A view for a concurrent part of a step, of the memory of `groups`; no other memory is moved or measured.

        It adds to the accounts of this object, and is for one step; `at_work` is the same for all views.
        """
        owners = [owner for owner in self.owners if owner.group in groups]
        return replace(self, run=run, owners=owners, recover=recover, serve=serve)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """As `held`, and the block is timed as a phase of the step."""
        with self.held(name), self.run.timed(name):
            yield

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Keep the memory that the phase `name` needs on the devices during the block, and no other movable memory.

        At the block's end, with all memory that the phase allocates, memory is measured: in the first two steps (the optimizer's
        states are made in the first one) and in every `ACCOUNT_EVERY`th.
        """
        if name == "sync":
            self.recover(None)
        if name == "generate":
            self.serve()
        with self.run.timed("memory"):
            self._enter(name)
        yield
        if self.steps < 2 or (self.steps + 1) % ACCOUNT_EVERY == 0:
            self._account(name)

    def _account(self, name: str) -> None:
        """Ask every process for its memory; engines that have ended, or end during the call, are replaced first."""
        failure = None
        while True:
            self.recover(failure)
            try:
                with self.run.timed("memory"):
                    self.phases[name] = self._measure()
                return
            except WorkerLost as found:
                failure = found

    def reserve(self) -> None:
        """Have models reserve host memory for parts that will leave their GPUs; this takes minutes, during which the run continues."""
        movable = [owner for owner in self.owners if owner.movable]
        of_models = [owner for owner in movable if not owner.name.startswith("rollout_")]
        loss = self._call("reserve_memory", of_models)
        assert loss is None, "ranks of models are not replaced"

    def turns(self, roles: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
        """The phases in which `roles` are updated: (phase, roles), all at once unless they make room for each other or share GPUs."""
        groups = {
            role: owner.group for role in roles for owner in self.owners if owner.name == f"{role}_optimizer"
        }
        movable = {owner.group.role for owner in self.owners if owner.movable}
        one, other = groups[roles[0]], groups[roles[-1]]
        shared = one is not other and set(devices_of(one)) & set(devices_of(other))
        # In the same processes they cannot be updated at once anyway.
        together = len(roles) > 1 and one is other
        makes_room = shared and movable & {one.role, other.role}
        if len(roles) == 1 or together or makes_room or share_gpus(one, other):
            return [(f"update_{role}", (role,)) for role in roles]
        return [("update", tuple(roles))]

    def report(self) -> dict[str, float]:
        """At the end of a step: its account as metrics in bytes: for each owner the bytes on its fullest device, and the total.

        Writes the account as a table into the run folder's `memory.txt` if it has changed, and prints the peak if that has changed.
        """
        self.steps += 1
        if not self.phases:
            return {}
        names = {owner.name for owner in self.owners}
        totals = {phase: max(_totals(account, names).values()) for phase, account in self.phases.items()}
        metrics = {f"memory/{phase}/total": float(total) for phase, total in totals.items()}
        for phase, account in self.phases.items():
            metrics |= {f"memory/{phase}/{name}": float(max(by.values())) for name, by in account.items()}
        rows = self._rows(totals)
        if rows != self.written:
            self.written = rows
            self._write(rows)
        phase, most = max(totals.items(), key=lambda item: item[1])
        if f"{most / MIB:,.1f}" != self.most:
            self.most = f"{most / MIB:,.1f}"
            self.run.say(
                f"device memory: {self.most} MiB on the fullest device, in {phase}; all phases: {self.run.folder / MEMORY_FILE}"
            )
        self.phases = {}
        return metrics

    def make_room(self, group: WorkerGroup) -> None:
        """Take all movable memory of other groups off the devices, because processes of `group` are restarted."""
        others = [owner for owner in self.owners if owner.group is not group]
        self._move("release_memory", [owner for owner in others if owner.movable and owner.resident])

    def join(self, group: WorkerGroup, ranks: Sequence[int]) -> None:
        """Release memory that new processes of a group hold and its other processes have released."""
        parts = [owner.part for owner in self.owners if owner.group is group and not owner.resident]
        if parts:
            self.run.wait([group.call_rank(rank, "release_memory", parts) for rank in ranks])

    def _enter(self, name: str) -> None:
        """Move memory for a phase. An engine may have died since its last answer, or die now: it is replaced, as in any other call."""
        while True:
            try:
                return self._change(name)
            except WorkerLost as failure:
                self.recover(failure)

    def _change(self, name: str) -> None:
        needed = self.needs[name]
        others = [owner for owner in self.owners if owner.name not in needed]
        coming = [owner for owner in self.owners if not owner.resident and owner.name in needed]
        leaving = [owner for owner in others if owner.movable and owner.resident]
        self._move("release_memory", leaving)
        self._make_room_for(needed, leaving)
        self._move("resume_memory", coming)

    def _make_room_for(self, needed: Sequence[str], left: Sequence[Owner]) -> None:
        """Have models give back the memory that torch keeps for their next pass, where other groups work on their GPUs now.

        Only their own processes could use it: the activations of a pass would stay on the GPU beside those of the next group's. What
        leaves the devices takes it along (`left`), but where nothing moves nobody else gives it back.
        """
        for owner in left:
            self.at_work.pop(owner.group.role, None)
        working = [owner for owner in self.owners if owner.name in needed]
        full = {
            role: group
            for role, group in [*self.at_work.items()]  # another thread's view may add its own models
            if any(share_gpus(group, owner.group) for owner in working)
        }
        if full:
            self.run.wait([call for group in full.values() for call in group.call("return_memory")])
        for role in full:
            del self.at_work[role]
        self.at_work |= {o.group.role: o.group for o in working if not o.name.startswith("rollout_")}

    def _move(self, method: str, owners: list[Owner]) -> None:
        """Raises WorkerLost if a process is lost; where it can be replaced, the memory of all others has moved by then."""
        loss = self._call(method, owners)
        for owner in owners:
            owner.resident = method == "resume_memory"
        if loss is not None:
            raise loss

    def _call(self, method: str, owners: list[Owner]) -> WorkerLost | None:
        """Call a method of every process with the parts of these owners that it holds; returns the loss of a process that can be replaced.

        All others are waited for all the same: none of them may be asked a second time.
        """
        groups = {owner.group.role: owner.group for owner in owners}
        engines = {owner.group.role for owner in owners if owner.name.startswith("rollout_")}
        calls: dict[tuple[str, int], Call] = {}
        for role, group in groups.items():
            parts = [owner.part for owner in owners if owner.group.role == role]
            calls |= {(role, rank): call for rank, call in enumerate(group.call(method, parts))}
        loss: WorkerLost | None = None
        while True:
            try:
                self.run.wait([*calls.values()])
                return loss
            except WorkerLost as found:
                # Models are not replaced. An engine that cannot be either ends the next wait, too, which does not ask it.
                if found.role not in engines or calls.pop((found.role, found.rank), None) is None:
                    raise
                loss = loss or found

    def _measure(self) -> Account:
        """The memory that every process reports; parts without an owner are named after their group."""
        names = {(owner.group.role, owner.part): owner.name for owner in self.owners}
        groups = {owner.group.role: owner.group for owner in self.owners}
        calls = {role: group.call("memory") for role, group in groups.items()}
        account: Account = {}
        for role, group in groups.items():
            processes = self.run.wait(calls[role])
            found = [entry for process in processes for entry in process]
            for device, entry in zip(devices_of(group), found, strict=True):
                for part, num_bytes in entry.items():
                    name = names.get((role, part), f"{role}_{part}")
                    account.setdefault(name, {})[device] = num_bytes
        return account

    def _rows(self, totals: dict[str, int]) -> list[list[str]]:
        """A header, the owners in their order, their sum, and parts that are not on the devices or counted otherwise."""
        own = [owner.name for owner in self.owners]
        others = sorted({name for account in self.phases.values() for name in account} - set(own))

        def row(name: str) -> list[str]:
            most = (max(account.get(name, {}).values(), default=0) for account in self.phases.values())
            return [name, *(f"{num_bytes / MIB:,.1f}" for num_bytes in most)]

        total = ["all of these", *(f"{total / MIB:,.1f}" for total in totals.values())]
        return [["MiB", *self.phases], *map(row, own), total, *map(row, others)]

    def _write(self, rows: list[list[str]]) -> None:
        """Columns as wide as their longest cells; numbers to the right."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in rows
        ]
        title = f"device memory after step {self.run.at_step}: the fullest device, by owner and phase"
        write_text(self.run.folder / MEMORY_FILE, "\n".join([title, "", *lines]) + "\n")


def _totals(account: Account, names: set[str]) -> dict[Device, int]:
    """By device, the bytes of the owners `names` together."""
    totals: Counter[Device] = Counter()
    for name in names & set(account):
        totals.update(account[name])
    return totals


def devices_of(group: WorkerGroup) -> list[Device]:
    """The devices of all ranks of all processes, in their order."""
    return [device for devices in group.devices for device in devices]


def share_gpus(one: WorkerGroup, other: WorkerGroup) -> bool:
    """Whether processes of two groups compute on the same GPU.

    They then work in turns. CUDA runs the kernels of two processes in slices of time: a collective of one spins in its slices while
    its peer's GPU runs slices of the other, and the activations of both are on the device together.
    """
    gpus = {device for device in devices_of(one) if device.gpu_id is not None}
    return one is not other and not gpus.isdisjoint(devices_of(other))


def gpu_turns(groups: Sequence[WorkerGroup]) -> list[list[int]]:
    """The numbers of groups, turn by turn: groups of a turn share no GPU and work at once; each is in the first turn with room for it."""
    found: list[list[int]] = []
    for number, group in enumerate(groups):
        free = (turn for turn in found if not any(share_gpus(groups[other], group) for other in turn))
        turn = next(free, None)
        if turn is None:
            found.append([number])
        else:
            turn.append(number)
    return found


def gpu_pools(run: Run) -> frozenset[str]:
    """The names of the resource pools whose devices are GPUs."""
    return frozenset(name for name, pool in run.pools.items() if pool.use_gpu)


def device_memory(
    config: TrainConfig,
    run: Run,
    actor: Role,
    engines: WorkerGroup | None,
    critic: Role | None,
    judges: Mapping[str, Role],
    reward_model: Role | None,
    *,
    trains: bool = True,
    left: Collection[WorkerGroup] = (),
) -> DeviceMemory:
    """The memory of a run's devices, by owner; freed engines have been released already.

    Args:
        judges: the references by their roles.
        trains: whether the actor has gradients and an optimizer.
        left: the models that have been taken off their devices already (`take_off`).
    """
    owners = [
        replace(owner, resident=not (owner.movable and owner.group in left))
        for owner in model_owners(config, run, actor, critic, judges, reward_model, trains=trains)
    ]
    if engines is not None:
        freed = frees_engines(config, gpu_pools(run))
        owners += [
            Owner(f"rollout_{part}", engines, part, movable=freed, resident=not freed)
            for part in ("weights", "kv_cache")
        ]
        owners += [
            Owner(f"{group.role}_sync_buffers", group, "sync_buffers", False)
            for group in (actor.group, engines)
        ]
    return DeviceMemory(run, owners, phase_needs(config))


def model_owners(
    config: TrainConfig,
    run: Run,
    actor: Role,
    critic: Role | None,
    judges: Mapping[str, Role],
    reward_model: Role | None = None,
    *,
    trains: bool = True,
) -> list[Owner]:
    """The owners of the models' memory. Arguments as of `device_memory`."""
    policy, gpus = config.actor_rollout_ref, gpu_pools(run)
    adapted = policy.model.lora.rank > 0

    def weights(name: str, role: Role, part: str, section: RefConfig | RewardModelConfig) -> Owner:
        movable = leaves(config, section.megatron.param_offload, section.resource_pool, gpus)
        return Owner(name, role.group, part, movable)

    owners = _trained(config, gpus, "actor", actor, policy.actor, adapted)
    if not trains:
        owners = [owner for owner in owners if owner.part == "weights"]
    for name, judge in {} if reference_is_actor(config) else judges.items():
        part = "reference" if judge.group is actor.group else "weights"
        owners.append(weights(f"{name}_weights", judge, part, references(config)[name]))
    if critic is not None:
        section = config.critic
        of_critic = _trained(config, gpus, "critic", critic, section, section.model.lora.rank > 0)
        if section.model.share_base:  # parts of the actor's processes
            of_critic = [
                replace(owner, part=f"critic_{owner.part}") for owner in of_critic if owner.part != "weights"
            ]
        owners += of_critic
    if reward_model is not None:
        owners.append(weights("reward_model_weights", reward_model, "weights", config.reward_model))
    return owners


def take_off(run: Run, owners: Sequence[Owner]) -> None:
    """Wait until the models of `owners` are loaded, and take what is movable of them off their devices.

    Before the first phase all parts of a model are there, gradients too: no phase has room for those of several models.
    """
    groups = {owner.group.role: owner.group for owner in owners if owner.movable}
    run.wait([started for group in groups.values() for started in group.started])
    calls = []
    for role, group in groups.items():
        parts = [owner.part for owner in owners if owner.movable and owner.group.role == role]
        calls += group.call("release_memory", parts)
    run.wait(calls)


def _trained(
    config: TrainConfig,
    gpus: frozenset[str],
    name: str,
    role: Role,
    section: ActorConfig | CriticConfig,
    adapted: bool,
) -> list[Owner]:
    return [
        Owner(f"{name}_{part}", role.group, part, leaves(config, switch, section.resource_pool, gpus))
        for part, switch in trained_parts(section.megatron).items()
        if adapted or part != "adapters"
    ]
