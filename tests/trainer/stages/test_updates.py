"""Log-probs, values and updates of a step: the calls of the ranks, and the metrics of their results."""

import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from megarl.algorithms.aggregate import LossAggregation
from megarl.algorithms.policy_loss import ClipCov, KLCov
from megarl.config import TrainConfig, load_config, resolve
from megarl.data.trajectories import TEACHER, Blocks, ragged
from megarl.layout.grid import ParallelLayout
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.stages.advantages import Controls, make_controls
from megarl.trainer.stages.inputs import check_names
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.stages.updates import (
    _update_metrics,
    evaluate_models,
    learning_columns,
    policy_update,
    update,
)
from megarl.trainer.workers.dispatch import MicroBatching, Plans
from tests.trainer.workers.test_dispatch import batch

LAYOUT = ParallelLayout(world=2)
CUT = MicroBatching(mini_batch_size=4, max_tokens=40, micro_batch_size=None)


class Group:
    """A worker group of two ranks that fills each column with one number, and records its calls."""

    def __init__(self, **numbers):
        self.numbers, self.calls, self.devices = numbers, [], []

    def call(self, method, table, *arguments):
        self.calls.append(method)
        if method == "compute_both_log_probs":
            both = zip(*(self.columns(table, shares, name) for shares, name in
                         zip(arguments, ("old_log_probs", "ref_log_probs"), strict=True)), strict=True)  # fmt: skip
            return list(both)
        return self.columns(table, arguments[0], arguments[1] if arguments[1:] else "values")

    def columns(self, table, shares, name):
        lengths = [len(ids) for ids in table["response_ids"]]
        found = []
        for share in shares:
            rows = [row for micro in share for row in micro]
            offsets = np.cumsum([0, *(lengths[row] for row in rows)])
            found.append((rows, {name: (np.full(offsets[-1], self.numbers[name], np.float32), offsets)}))
        return found


def evaluated(actor, ref):
    run = SimpleNamespace(put=lambda value: value, wait=lambda refs: refs, plans=Plans(), blocks=Blocks())
    roles = SimpleNamespace(
        actor=Role(actor, LAYOUT, CUT), ref=Role(ref, LAYOUT, CUT), critic=None, teachers={}, judges={}
    )
    overrides = ["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=true"]
    config = resolve(load_config(TrainConfig, "recipes/quickstart_ppo.yaml", overrides))
    return evaluate_models(run, roles, batch([3, 1, 4, 1, 5, 9, 2, 6]), config, seed=1)


def numbers(table):
    return [set(ragged(table, name)[0].tolist()) for name in ("old_log_probs", "ref_log_probs")]


def test_ranks_that_have_both_are_called_once_for_the_policy_and_the_reference():
    both = Group(old_log_probs=-1.0, ref_log_probs=-2.0)
    assert numbers(evaluated(both, both)) == [{-1.0}, {-2.0}]
    assert both.calls == ["compute_both_log_probs"]


def test_a_reference_on_ranks_of_its_own_is_called_itself():
    actor, ref = Group(old_log_probs=-1.0), Group(ref_log_probs=-2.0)
    assert numbers(evaluated(actor, ref)) == [{-1.0}, {-2.0}]
    assert (actor.calls, ref.calls) == (["compute_log_probs"], ["compute_log_probs"])


def judged(table, **teachers):
    run = SimpleNamespace(put=lambda value: value, wait=lambda refs: refs, plans=Plans(), blocks=Blocks())
    roles = SimpleNamespace(
        actor=Role(Group(old_log_probs=-1.0), LAYOUT, CUT),
        ref=None,
        critic=None,
        teachers={name: Role(group, LAYOUT, CUT) for name, group in teachers.items()},
        judges={},
    )
    overrides = ["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=true"]
    config = resolve(load_config(TrainConfig, "recipes/quickstart_ppo.yaml", overrides))
    return evaluate_models(run, roles, table, config, seed=1)


def test_each_teacher_judges_its_own_rows():
    """With a single row both of a teacher's ranks compute that row; a teacher without rows is not called."""
    names = ["math", "code", "math", "math", "math", "math", "math", "math"]
    table = batch([3, 1, 4, 1, 5, 9, 2, 6]).append_column(TEACHER, [names])
    groups = {"math": Group(ref_log_probs=-2.0), "code": Group(ref_log_probs=-3.0), "talk": Group()}
    found = judged(table, **groups)
    assert numbers(found)[0] == {-1.0}
    values, offsets = ragged(found, "ref_log_probs")
    for row, name in enumerate(names):
        expected = {"math": {-2.0}, "code": {-3.0}}[name]
        assert set(values[offsets[row] : offsets[row + 1]].tolist()) == expected
    assert [group.calls for group in groups.values()] == [["compute_log_probs"], ["compute_log_probs"], []]
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.teachers has math, and .* by 'code'"):
        judged(table, math=groups["math"])
    with pytest.raises(ValueError, match="teachers: the trajectories have no column 'teacher'"):
        judged(table.drop_columns([TEACHER]), math=groups["math"])


class Clocked(Group):
    """A group on named devices that records when its calls begin and end, by a clock that ticks at each call and at the end of each wait."""

    def __init__(self, clock, devices, gpu_id, **numbers):
        super().__init__(**numbers)
        self.clock, self.intervals = clock, []
        self.devices = [(SimpleDevice(name, gpu_id),) for name in devices]

    def call(self, method, table, *arguments):
        self.intervals.append([next(self.clock), None])
        return self, super().call(method, table, *arguments)


@dataclass(frozen=True)
class SimpleDevice:
    name: str
    gpu_id: str | None


def worked_at_once(one, other):
    return any(
        begin < end_of_other and begin_of_other < end
        for begin, end in one.intervals
        for begin_of_other, end_of_other in other.intervals
    )


@pytest.mark.parametrize(
    ("gpu_id", "critic_on", "at_once"),
    [("0", ("a", "b"), False), ("0", ("b", "c"), False), ("0", ("c", "d"), True), (None, ("a", "b"), True)],
)
def test_log_probs_and_values_are_computed_in_turns_on_the_same_gpus(gpu_id, critic_on, at_once):
    clock = itertools.count()
    actor = Clocked(clock, ("a", "b"), gpu_id, old_log_probs=-1.0, ref_log_probs=-2.0)
    critic = Clocked(clock, critic_on, gpu_id, values=0.5)

    def wait(call):
        group, results = call
        group.intervals[-1][1] = next(clock)
        return results

    run = SimpleNamespace(put=lambda value: value, wait=wait, plans=Plans(), blocks=Blocks())
    roles = SimpleNamespace(
        actor=Role(actor, LAYOUT, CUT),
        ref=Role(actor, LAYOUT, CUT),
        critic=Role(critic, LAYOUT, CUT),
        teachers={},
        judges={},
    )
    table = evaluate_models(run, roles, batch([3, 1, 4, 1, 5, 9, 2, 6]), config(), seed=1)
    assert worked_at_once(actor, critic) == at_once
    assert set(ragged(table, "values")[0].tolist()) == {0.5}
    assert (actor.calls, critic.calls) == (["compute_both_log_probs"], ["compute_values"])


@pytest.mark.parametrize(("name", "role"), [("old_log_probs", "actor"), ("ref_log_probs", "ref")])
def test_a_number_of_one_call_is_named_by_its_role(name, role):
    both = Group(**{"old_log_probs": -1.0, "ref_log_probs": -2.0, name: float("nan")})
    with pytest.raises(NotFinite, match=f"{name} of trajectory p0/0 is nan, computed by {role} rank"):
        evaluated(both, both)


RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "quickstart_ppo.yaml"
ACTOR = "actor_rollout_ref.actor"


def config(*overrides: str) -> TrainConfig:
    return resolve(load_config(TrainConfig, RECIPE, overrides))


def update_of(settings: TrainConfig):
    return policy_update(
        settings.actor_rollout_ref.actor,
        make_controls(settings.algorithm, settings.actor_rollout_ref.actor, num_steps=5),
        seed=11,
    )


def test_settings_reach_the_ranks() -> None:
    plain = update_of(config())
    assert (plain.aggregation, plain.select, plain.target_kl) == (LossAggregation("token-mean"), None, None)
    assert (plain.options.loss_mode, plain.options.kl_kind, plain.seed) == ("vanilla", None, 11)
    own = update_of(
        config(
            f"{ACTOR}.policy_loss.loss_mode=sapo",
            f"{ACTOR}.tau_pos=2",
            f"{ACTOR}.tau_neg=3",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
            f"{ACTOR}.target_kl=0.02",
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.kl_loss_type=k2",
            f"{ACTOR}.clip_ratio_low=0.1",
        )
    )
    longest = config().data.max_response_length
    assert own.aggregation == LossAggregation("seq-mean-token-sum-norm", longest)
    assert (own.options.tau_pos, own.options.tau_neg, own.target_kl) == (2, 3, 0.02)
    assert (own.options.kl_kind, own.options.kl_coef) == ("k2", 0.001)
    assert (own.options.clip_low, own.options.clip_high) == (0.1, 0.2)


def test_only_columns_that_are_learnt_from_are_sent() -> None:
    names = ["uid", "prompt_ids", "response_ids", "response_mask", "score", "rollout_log_probs", "old_log_probs",
             "ref_log_probs", "token_level_rewards", "advantages", "values", "returns"]  # fmt: skip
    batch = pa.table({name: [0.0] for name in names})
    always = {"uid", "prompt_ids", "response_ids", "response_mask", "advantages", "values", "returns"}

    def learnt(batch: pa.Table, *overrides: str) -> set[str]:
        return set(learning_columns(batch, config(*overrides).actor_rollout_ref.actor).column_names)

    assert learnt(batch) == always | {"old_log_probs"}
    assert learnt(batch.drop_columns("old_log_probs")) == always | {"rollout_log_probs"}
    loss = f"{ACTOR}.use_kl_loss=true"
    assert learnt(batch, loss) == always | {"old_log_probs", "ref_log_probs"}
    assert learnt(batch, loss, f"{ACTOR}.kl_loss_type=full") == always | {"old_log_probs"}


def test_the_tokens_selected_from_a_mini_batch() -> None:
    clip = update_of(
        config(f"{ACTOR}.policy_loss={{loss_mode: clip_cov, clip_cov_ratio: 0.1, clip_cov_lb: 2}}")
    )
    assert clip.select == ClipCov(0.1, 2.0, 5.0)
    kl = update_of(config(f"{ACTOR}.policy_loss={{loss_mode: kl_cov, kl_cov_ratio: 0.3, ppo_kl_coef: 0.5}}"))
    assert kl.select == KLCov(0.3)
    assert kl.options.ppo_kl_coef == 0.5


def test_controls_follow_their_schedules_and_survive_a_resume() -> None:
    settings = config(
        "algorithm.kl_ctrl={type: linear, kl_coef: 0.01, end_kl_coef: 0.1}",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_coef=0.2",
        f"{ACTOR}.kl_loss_end_coef=0.4",
        f"{ACTOR}.kl_loss_schedule_steps=3",
    )
    controls = make_controls(
        settings.algorithm, settings.actor_rollout_ref.actor, num_steps=10
    )  # for schedules without a length of their own
    for _ in range(9):
        controls.kl.update(0.0, 8)
        controls.kl_loss.update(0.0, 8)
    assert controls.kl.coef == pytest.approx(0.1)
    assert policy_update(settings.actor_rollout_ref.actor, controls, 0).options.kl_coef == pytest.approx(0.4)
    controls.clip_low = controls.clip_high = 0.1
    resumed = make_controls(settings.algorithm, settings.actor_rollout_ref.actor, num_steps=10)
    resumed.load_state_dict(controls.state_dict())
    assert resumed == controls
    assert policy_update(settings.actor_rollout_ref.actor, resumed, 0).options.clip_high == 0.1


def test_a_resumed_run_clips_as_its_own_configuration_says() -> None:
    """Unless health.auto_action has lowered the ratio."""

    def controls(high: float) -> Controls:
        settings = config(f"{ACTOR}.clip_ratio_high={high}")
        return make_controls(settings.algorithm, settings.actor_rollout_ref.actor, num_steps=10)

    def resumed(saved: Controls, high: float) -> tuple[float, float]:
        found = controls(high)
        found.load_state_dict(json.loads(json.dumps(saved.state_dict())))
        return found.clip_low, found.clip_high

    saved = controls(0.28)
    assert resumed(saved, 0.4) == (0.2, 0.4) and resumed(saved, 0.2) == (0.2, 0.2)
    saved.clip_high = 0.25
    assert resumed(saved, 0.4) == (0.2, 0.25) and resumed(saved, 0.2) == (0.2, 0.2)


def test_the_metrics_of_updates() -> None:
    first = {"actor/pg_loss": 0.2, "actor/tokens": 10.0, "actor/ppo_kl": 1.0, "grad_norm": 2.0, "lr": 1e-3}
    second = {"actor/pg_loss": 0.4, "actor/tokens": 30.0, "actor/ppo_kl": 3.0, "grad_norm": 4.0, "lr": 2e-3}
    metrics = _update_metrics("actor", [first, {**second, "stopped_early": 1.0}])
    assert metrics == pytest.approx(
        {
            "actor/pg_loss": 0.3,
            "actor/ppo_kl": 0.1,
            "actor/grad_norm": 3.0,
            "actor/lr": 2e-3,
            "actor/updates": 2.0,
            "actor/stopped_early": 1.0,
        }
    )
    assert _update_metrics("actor", []) == {"actor/updates": 0.0}


def test_unknown_names_are_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "plugin_of_this_test.py"
    file.write_text(
        "from megarl.algorithms.policy_loss import register_policy_loss\n"
        "register_policy_loss('loss_of_this_test')(lambda log_probs, tokens, options: (log_probs, {}))\n"
    )
    check: Callable[..., None] = lambda *overrides: check_names(config(f"plugins=[{file}]", *overrides))  # noqa: E731
    check(f"{ACTOR}.policy_loss.loss_mode=loss_of_this_test")
    with pytest.raises(
        ValueError, match=r"policy_loss.loss_mode='loss_of_that_test' is unknown; known: .*loss_of_this"
    ):
        check(f"{ACTOR}.policy_loss.loss_mode=loss_of_that_test")
    with pytest.raises(ValueError, match=r"algorithm.adv_estimator='mine' is unknown; known: .*gae, "):
        check("algorithm.adv_estimator=mine")


class UpdateGroup:
    """A worker group that records what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def call(self, method: str, *arguments: object) -> tuple:
        self.calls.append((method, *arguments))
        return self, method


def test_the_actor_waits_out_the_critics_warm_up() -> None:
    lists = {"prompt_ids": pa.list_(pa.int32()), "response_ids": pa.list_(pa.int32())}
    batch = pa.table({name: pa.array([[1, 2]] * 4, kind) for name, kind in lists.items()})
    batch = batch.append_column("response_mask", pa.array([[True, True]] * 4))
    settings = config(
        "critic.warmup_steps=2", "algorithm.use_kl_in_reward=false", f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_end_coef=0.003",
    )  # fmt: skip
    controls = make_controls(settings.algorithm, settings.actor_rollout_ref.actor, num_steps=3)
    cut = MicroBatching(mini_batch_size=2, max_tokens=64, micro_batch_size=None)
    groups = {name: UpdateGroup() for name in ("actor", "critic")}
    roles = SimpleNamespace(
        **{name: Role(group, ParallelLayout(world=1), cut) for name, group in groups.items()},
        memory=SimpleNamespace(turns=lambda names: [("update", names)], held=lambda phase: nullcontext()),
    )
    taken = [{"actor/tokens": 4.0, "actor/kl_loss": 0.1, "grad_norm": 1.0, "lr": 1e-3}]
    run = SimpleNamespace(put=lambda table: table, wait=lambda refs: [taken], plans=Plans())
    called, coefs = [], []
    for step in (1, 2, 3):
        metrics = update(run, roles, batch, settings, controls, step, seed=step)
        called.append([len(group.calls) for group in groups.values()])
        coefs.append(metrics["actor/kl_loss_coef"])
        assert ("actor/updates" in metrics) == (step == 3)
    assert called == [[0, 1], [0, 2], [1, 3]]
    assert coefs == pytest.approx([0.001, 0.002, 0.003])  # the coefficient's schedule continues
    method, _, plan, counts, how = groups["actor"].calls[0]
    assert method == "update_policy" and len(plan) == len(counts) == 2
    assert how.options.kl_coef == pytest.approx(0.003)
