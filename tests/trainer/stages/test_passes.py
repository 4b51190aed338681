from types import SimpleNamespace

import numpy as np
import pytest

from megarl.config import TrainConfig, load_config, resolve
from megarl.data.trajectories import Blocks, ragged
from megarl.layout.grid import ParallelLayout
from megarl.trainer.roles.model_roles import Role
from megarl.trainer.stages.nonfinite import NotFinite
from megarl.trainer.stages.passes import evaluate_models
from megarl.trainer.workers.dispatch import MicroBatching, Plans
from tests.trainer.workers.test_dispatch import batch

LAYOUT = ParallelLayout(world=2)
CUT = MicroBatching(mini_batch_size=4, max_tokens=40, micro_batch_size=None)


class Group:
    """Two ranks, whose columns are of one number each; notes what is called."""

    def __init__(self, **numbers):
        self.numbers, self.calls = numbers, []

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
    roles = SimpleNamespace(actor=Role(actor, LAYOUT, CUT), ref=Role(ref, LAYOUT, CUT), critic=None)
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


@pytest.mark.parametrize(("name", "role"), [("old_log_probs", "actor"), ("ref_log_probs", "ref")])
def test_a_number_of_one_call_is_named_by_its_role(name, role):
    both = Group(**{"old_log_probs": -1.0, "ref_log_probs": -2.0, name: float("nan")})
    with pytest.raises(NotFinite, match=f"{name} of trajectory p0/0 is nan, computed by {role} rank"):
        evaluated(both, both)
