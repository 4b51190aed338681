"""Checks of trainer.mode, and messages about runs that train on trajectories of older weights."""

import re
from pathlib import Path

import pytest

from megarl.config import (
    SFTConfig,
    TrainConfig,
    batch_table,
    check_config,
    eval_rollout,
    load_config,
    resolve,
    resolve_batches,
    save_config,
)
from megarl.config.checks.run import changed_keys, refused_changes
from megarl.config.show import notes
from tests.config.conftest import problems

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
        ([*APART, "trainer.rollout_only=true"], "trainer.rollout_only: trainer.mode=one_step_off both generates and trains"),
        ([*APART, "trainer.train_only=."], "trainer.train_only: trainer.mode=one_step_off both generates and trains"),
        (["trainer.mode=one_step"], "trainer.mode='one_step' is unknown; megarl has sync, partial_rollouts, one_step_off, fully_async; did you mean one_step_off?"),
    ],
)  # fmt: skip
def test_violations_of_modes(train, overrides: list[str], message: str) -> None:
    found = problems(train(*overrides))
    assert any(re.match(re.escape(message), line) for line in found), found


STREAMED = "trainer.mode=fully_async"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([STREAMED], f"{POLICY}.rollout.resource_pool='global' is also that of {POLICY}.actor, critic: with trainer.mode=fully"),
        ([*APART[1:], STREAMED, f"{POLICY}.rollout.free_cache_engine=true"], f"{POLICY}.rollout.free_cache_engine=true: trainer.mode=fully_async generates"),
        (["trainer.mode=partial_rollouts", "trainer.rollout_only=true"], "trainer.rollout_only: trainer.mode=partial_rollouts both generates and trains"),
        (["trainer.max_staleness=2"], "trainer.max_staleness=2: trainer.mode=sync does not read it; leave it out, or set the mode to partial_rollouts or fully_async"),
        ([*APART, "trainer.max_staleness=2"], "trainer.max_staleness=2: trainer.mode=one_step_off does not read it"),
        ([STREAMED, "trainer.max_staleness=0"], "trainer.max_staleness"),
    ],
)  # fmt: skip
def test_violations_of_modes_whose_responses_go_on(train, overrides: list[str], message: str) -> None:
    test_violations_of_modes(train, overrides, message)


EVAL = "trainer.eval_mode=concurrent"
WITH_EVAL = [
    EVAL, "trainer.n_gpus_per_node=5", "resource_pools={global: {n_gpus_per_node: 4}, eval: {n_gpus_per_node: 1}}",
    "trainer.test_freq=2", f"{POLICY}.rollout.tensor_model_parallel_size=1",
]  # fmt: skip


def test_engines_of_validation_are_as_many_as_their_pool_holds(train) -> None:
    config = check_config(train(*WITH_EVAL, f"{POLICY}.rollout.num_engines=2"))
    assert config.trainer.eval_resource_pool == "eval"
    own = eval_rollout(config)
    assert (own.resource_pool, own.num_engines, own.nodes_per_engine) == ("eval", 1, 1)
    assert own.max_num_seqs == config.actor_rollout_ref.rollout.max_num_seqs
    assert resolve_batches(config).devices == 5
    assert ("validation", "eval", "1", "1 engine x tp1", "", "") in batch_table(resolve_batches(config))
    pools = "resource_pools={global: {n_gpus_per_node: 4}, held_out: {n_gpus_per_node: 1}}"
    overrides = [pools if one.startswith("resource_pools") else one for one in WITH_EVAL]
    other = check_config(train(*overrides, "trainer.eval_resource_pool=held_out"))
    assert eval_rollout(other).resource_pool == "held_out"
    assert resolve(train()).trainer.eval_resource_pool is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.eval_mode=async"], "trainer.eval_mode='async' is unknown; megarl has blocking, concurrent"),
        (["trainer.eval_resource_pool=global"], "trainer.eval_resource_pool='global': trainer.eval_mode=blocking validates with the engines of the rollouts"),
        ([EVAL, "trainer.test_freq=2"], f"{EVAL} needs devices of its own, the pool trainer.eval_resource_pool='eval', which is none of global; add it, such as"),
        ([*WITH_EVAL, "trainer.test_freq=-1"], f"{EVAL}: nothing is validated; set trainer.test_freq"),
        (
            [*WITH_EVAL, f"{POLICY}.rollout.resource_pool=eval"],
            f"trainer.eval_resource_pool='eval' is also that of {POLICY}.rollout: with {EVAL} both work",
        ),
        (
            [*WITH_EVAL, f"{POLICY}.rollout.tensor_model_parallel_size=2"],
            f"{POLICY}.rollout.tensor_model_parallel_size=2 is more than the 1 devices of resource pool 'eval'",
        ),
        ([*WITH_EVAL, "reward_model.enable=true"], f"{EVAL} with reward_model.enable=true: training and validation would ask"),
        ([*WITH_EVAL, "trainer.best_metric=val/score/mean"], f"trainer.best_metric='val/score/mean' with {EVAL}: when a result comes"),
    ],
)  # fmt: skip
def test_violations_of_concurrent_validation(train, overrides: list[str], message: str) -> None:
    test_violations_of_modes(train, overrides, message)


def test_responses_may_go_on_where_all_share_their_devices(train) -> None:
    check_config(train("trainer.mode=partial_rollouts"))
    check_config(train(*APART[1:], STREAMED, "trainer.max_staleness=3"))
    resolved = [
        resolve(train(f"trainer.mode={mode}")).trainer.max_staleness for mode in ("partial_rollouts", "sync")
    ]
    assert resolved == [1, None]


def test_a_reward_model_may_be_with_the_engines(train) -> None:
    shared = train(*APART, "reward_model.enable=true", "reward_model.resource_pool=rollout")
    assert not any("also that of" in line for line in problems(shared))


@pytest.mark.parametrize("given", ["rollout_is=token", "rollout_rs=sequence", "bypass_mode=true"])
def test_advice_where_nothing_corrects(train, given: str) -> None:
    (note,) = notes(train(*APART), [])
    assert "nothing corrects: set algorithm.rollout_correction.rollout_is=token" in note
    assert notes(train(*APART, f"{CORRECTION}.{given}"), []) == []
    assert notes(train(), []) == []


def test_a_run_goes_on_in_its_own_mode(train, tmp_path: Path) -> None:
    """A checkpoint that was saved before trainer.mode existed belongs to a synchronous run."""
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


ONLY = "trainer.rollout_only=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ONLY, "trainer.train_only=."], "trainer.rollout_only and trainer.train_only: give one of them"),
        ([ONLY, "trainer.test_freq=2"], "trainer.test_freq: with trainer.rollout_only nothing is validated"),
        (["trainer.train_only=.", "trainer.val_before_train=true"], "val_before_train: with trainer.train_only nothing"),
        ([ONLY, "trainer.save_freq=2"], "trainer.save_freq: with trainer.rollout_only no model changes"),
        ([ONLY, "trainer.max_restarts=2"], "trainer.max_restarts: with trainer.rollout_only no model changes"),
        ([ONLY, f"{POLICY}.model.indexer=train"], f"{POLICY}.model.indexer=train: with trainer.rollout_only no model changes"),
        ([ONLY, f"{POLICY}.model.lora.rank=4"], f"{POLICY}.model.lora.rank: trainer.rollout_only has no adapters"),
        (["trainer.train_only=nowhere"], "trainer.train_only=nowhere: there is no such folder"),
        (["trainer.on_nonfinite=ignore"], "trainer.on_nonfinite='ignore' is unknown; megarl has stop, skip"),
    ],
)  # fmt: skip
def test_violations_of_runs_that_only_generate_or_only_train(
    train, overrides: list[str], message: str
) -> None:
    found = problems(train(*overrides))
    assert any(re.search(re.escape(message), line) for line in found), found


def test_what_is_told_to_be_set_over_a_recipe_is_enough(train, tmp_path: Path) -> None:
    """Whatever the recipe has, the errors name a new value for each key that has no meaning in a run that only generates."""
    given = [ONLY, "trainer.test_freq=2", "trainer.val_before_train=true", "trainer.save_freq=2", "trainer.save_minutes=5",
             "trainer.best_metric=reward/mean", "trainer.max_run_minutes=9", "trainer.checkpoint_url=s3://bucket/run",
             f"trainer.resume_from_path={tmp_path}"]  # fmt: skip
    lines = problems(train(*given))
    told = [match[1] for line in lines if (match := re.search(r"[Ss]et (trainer\.\w+=\S+)$", line))]
    assert len(told) == len(given) - 1, lines
    check_config(train(*given, *told))


def test_training_alone_needs_no_prompts(train, tmp_path: Path) -> None:
    missing = ("data.train_files=nowhere.parquet", "trainer.test_freq=-1")
    assert any("nowhere.parquet" in line for line in problems(train(*missing)))
    check_config(train(*missing, f"trainer.train_only={tmp_path}"))


PPO = Path(__file__).resolve().parents[3] / "recipes" / "quickstart_ppo.yaml"


def changes(tmp_path: Path, *overrides: str) -> dict:
    saved = save_config(resolve(load_config(TrainConfig, PPO)), tmp_path / "config.yaml")
    return changed_keys(resolve(load_config(TrainConfig, PPO, overrides)), saved)


def test_nothing_has_changed(tmp_path: Path) -> None:
    assert changes(tmp_path) == {}


def test_what_may_change_is_listed_with_both_values(tmp_path: Path) -> None:
    found = changes(
        tmp_path,
        f"{POLICY}.actor.optim.lr=0.25",
        f"{POLICY}.actor.megatron.tensor_model_parallel_size=1",
        f"{POLICY}.model.mtp=keep",
    )
    found[f"{POLICY}.model.indexer"] = ("(not there)", "freeze")  # a run from before this key existed
    assert found[f"{POLICY}.actor.optim.lr"][1] == 0.25
    assert f"{POLICY}.model.mtp" in found
    assert found[f"{POLICY}.actor.megatron.tensor_model_parallel_size"] == (2, 1)
    assert refused_changes(found) == []


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "data.train_batch_size=8",
            "data.train_batch_size was 128, is 8 now: the position in the data means other rows",
        ),
        ("data.seed=17", "means other rows"),
        ("data.sampler.name=curriculum", "data.sampler.name was None, is 'curriculum' now"),
        (f"{POLICY}.model.lora.rank=4", "adapters of another kind"),
        (f"{POLICY}.actor.megatron.dtype=bfloat16", "weights and optimizer states of another kind"),
        (f"{POLICY}.actor.optim.optimizer=muon", "the states of another optimizer"),
        ("algorithm.kl_ctrl.type=adaptive", "another controller"),
        (f"{POLICY}.model.mtp=train", "has multi-token prediction layers, or has none"),
        (f"{POLICY}.model.indexer=train", "optimizer states of indexers, or has none"),
    ],
)
def test_what_cannot_change_is_refused_with_the_reason(tmp_path: Path, override: str, reason: str) -> None:
    assert any(reason in text for text in refused_changes(changes(tmp_path, override)))


def test_a_critic_cannot_come_or_go(tmp_path: Path) -> None:
    found = changes(tmp_path, "critic=null", "algorithm.adv_estimator=grpo", f"{POLICY}.rollout.n=2")
    assert any(text.startswith("critic was") for text in refused_changes(found))


def test_of_fine_tuning_too(tmp_path: Path) -> None:
    given = [
        "data.train_files=a.parquet",
        "data.max_length=8",
        "data.train_batch_size=2",
        "model.path=m",
        "optim.lr=1",
    ]
    given += ["max_token_len_per_gpu=8"]
    saved = save_config(resolve(load_config(SFTConfig, None, given)), tmp_path / "config.yaml")
    now = resolve(load_config(SFTConfig, None, [*given, "model.lora.rank=2", "optim.lr=2"]))
    found = changed_keys(now, saved)
    assert found["optim.lr"] == (1.0, 2.0)
    assert [text.split(" was ")[0] for text in refused_changes(found)] == ["model.lora.rank"]


def test_what_is_traced_may_be_chosen(train) -> None:
    check_config(
        train(
            "trainer.total_training_steps=5", "trainer.profile_steps=[3, 5]", "trainer.profile_ranks=[0, 7]",
            "trainer.timeline_mb=0",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.profile_ranks=[1]"], "trainer.profile_ranks is of traces: give trainer.profile_steps"),
        (["trainer.profile_steps=[0]"], "trainer.profile_steps"),
        (["trainer.timeline_mb=-1"], "trainer.timeline_mb"),
    ],
)
def test_what_makes_no_sense_is_refused(train, overrides: list[str], message: str) -> None:
    lines = problems(train(*overrides))
    assert any(line.startswith(message) for line in lines), lines
