"""Checks of trainer.mode, and what is said of a run whose trajectories are of older weights."""

import re
from pathlib import Path

import pytest

from megarl.config import TrainConfig, check_config, load_config, resolve, save_config
from megarl.config.notes import notes
from megarl.config.resume import changed_keys, refused_changes
from tests.config.conftest import lines_of

POLICY = "actor_rollout_ref"
MODE = "trainer.mode=one_step_off"
APART = [
    MODE, "trainer.n_gpus_per_node=6", "resource_pools={train: {n_gpus_per_node: 4}, rollout: {n_gpus_per_node: 2}}",
    f"{POLICY}.actor.resource_pool=train", f"{POLICY}.rollout.resource_pool=rollout",
]  # fmt: skip
CORRECTION = "algorithm.rollout_correction"


def test_a_pool_for_the_engines_is_all_that_it_needs(train) -> None:
    check_config(train(*APART))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([MODE], f"{POLICY}.rollout.resource_pool='global' is also that of {POLICY}.actor, critic: with trainer.mode=one"),
        (
            [*APART, "critic.resource_pool=rollout"],
            f"{POLICY}.rollout.resource_pool='rollout' is also that of critic: with trainer.mode=one_step_off both work",
        ),
        (
            [*APART, f"{POLICY}.actor.use_kl_loss=true", f"{POLICY}.ref.resource_pool=rollout"],
            f"{POLICY}.rollout.resource_pool='rollout' is also that of {POLICY}.ref: with",
        ),
        (
            [*APART, "reward_model.enable=true", "reward_model.resource_pool=train"],
            f"reward_model.resource_pool='train' is also that of {POLICY}.actor, critic: with",
        ),
        ([*APART, "trainer.rollout_only=true"], "trainer.rollout_only: trainer.mode=one_step_off has no such half"),
        ([*APART, "trainer.train_only=."], "trainer.train_only: trainer.mode=one_step_off has no such half"),
        (["trainer.mode=one_step"], "trainer.mode='one_step' is unknown; megarl has sync, partial_rollouts, one_step_off, fully_async; did you mean one_step_off?"),
    ],
)  # fmt: skip
def test_violations(train, overrides: list[str], message: str) -> None:
    found = lines_of(lambda: check_config(train(*overrides)))
    assert any(re.match(re.escape(message), line) for line in found), found


STREAMED = "trainer.mode=fully_async"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([STREAMED], f"{POLICY}.rollout.resource_pool='global' is also that of {POLICY}.actor, critic: with trainer.mode=fully"),
        ([*APART[1:], STREAMED, f"{POLICY}.rollout.free_cache_engine=true"], f"{POLICY}.rollout.free_cache_engine=true: trainer.mode=fully_async generates"),
        (["trainer.mode=partial_rollouts", "trainer.rollout_only=true"], "trainer.rollout_only: trainer.mode=partial_rollouts has no such half"),
        (["trainer.max_staleness=2"], "trainer.max_staleness=2: trainer.mode=sync does not read it; leave it out, or set the mode to partial_rollouts or fully_async"),
        ([*APART, "trainer.max_staleness=2"], "trainer.max_staleness=2: trainer.mode=one_step_off does not read it"),
        ([STREAMED, "trainer.max_staleness=0"], "trainer.max_staleness"),
    ],
)  # fmt: skip
def test_violations_of_modes_whose_responses_go_on(train, overrides: list[str], message: str) -> None:
    test_violations(train, overrides, message)


def test_responses_may_go_on_where_all_share_their_devices(train) -> None:
    check_config(train("trainer.mode=partial_rollouts"))
    check_config(train(*APART[1:], STREAMED, "trainer.max_staleness=3"))
    resolved = [
        resolve(train(f"trainer.mode={mode}")).trainer.max_staleness for mode in ("partial_rollouts", "sync")
    ]
    assert resolved == [1, None]


def test_a_reward_model_may_be_with_the_engines(train) -> None:
    shared = train(*APART, "reward_model.enable=true", "reward_model.resource_pool=rollout")
    assert not any("also that of" in line for line in lines_of(lambda: check_config(shared)))


@pytest.mark.parametrize("given", ["rollout_is=token", "rollout_rs=sequence", "bypass_mode=true"])
def test_advice_where_nothing_corrects(train, given: str) -> None:
    (note,) = notes(train(*APART), [])
    assert "nothing corrects: set algorithm.rollout_correction.rollout_is=token" in note
    assert notes(train(*APART, f"{CORRECTION}.{given}"), []) == []
    assert notes(train(), []) == []


def test_a_run_goes_on_in_its_own_mode(train, tmp_path: Path) -> None:
    """A checkpoint from before there were modes is of a synchronous run."""
    saved = save_config(resolve(train(*APART)), tmp_path / "config.yaml")
    assert refused_changes(changed_keys(resolve(train(*APART)), saved)) == []
    now = resolve(train(*APART, "trainer.mode=sync"))
    (refused,) = refused_changes(changed_keys(now, saved))
    assert refused.startswith("trainer.mode was 'one_step_off', is 'sync' now: ")
    text = saved.read_text()
    assert "  mode: one_step_off\n" in text
    saved.write_text(text.replace("  mode: one_step_off\n", ""))
    assert changed_keys(now, saved) == {}
    (refused,) = refused_changes(changed_keys(resolve(train(*APART)), saved))
    assert refused.startswith("trainer.mode was 'sync', is 'one_step_off' now: ")


def test_the_recipe() -> None:
    config = resolve(load_config(TrainConfig, "recipes/one_step_off_cpu.yaml"))
    assert config.trainer.mode == "one_step_off" and config.algorithm.rollout_correction.rollout_is == "token"
