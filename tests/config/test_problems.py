"""Advice for users of other trainers: the table of their keys, flags and commands."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config import SFTConfig, TrainConfig
from megarl.config.problems import aliases, flag_advice, key_advice
from megarl.config.schema import is_free, walk
from tests.config.conftest import lines_of

KEYS = {key for key, _, _ in walk(TrainConfig)}
FREE = tuple(f"{key}." for key, _, kind in walk(TrainConfig) if is_free(kind))
Train = Callable[..., TrainConfig]


def verl_keys() -> Iterator[str]:
    for line in (Path(__file__).parent / "verl_keys.txt").read_text().splitlines():
        section, _, names = line.partition(": ")
        if not line.startswith("#"):
            yield from (f"{section}.{name}" for name in names.split())


def test_every_key_of_verls_is_read_or_has_advice() -> None:
    keys = list(verl_keys())
    assert len(keys) == len(set(keys)) > 250
    others = [key for key in keys if key not in KEYS and not key.startswith(FREE)]
    assert [key for key in others if key_advice(key) is None] == []


@pytest.mark.parametrize("schema", [TrainConfig, SFTConfig])
def test_keys_of_megarls_own_have_no_advice(schema: type) -> None:
    """Advice for such a key would be wrong, or would be about a section that other trainers have, too."""
    assert [key for key, _, _ in walk(schema) if key_advice(key) is not None] == []


def mentioned(advice: str) -> set[str]:
    """The keys that an advice names, recognised by the sections that they begin with."""
    sections = (
        "data|actor_rollout_ref|critic|algorithm|reward_model|reward|custom_reward_function|trainer|plugins"
    )
    return set(re.findall(rf"(?<![\w.])(?:{sections})(?:\.\w+)+", advice))


def test_advice_names_only_keys_that_exist() -> None:
    texts = [advice for key in verl_keys() if key not in KEYS for advice in [key_advice(key)] if advice]
    texts += [*aliases()["flags"].values(), *aliases()["commands"].values()]
    named = set().union(*map(mentioned, texts))
    assert len(named) > 40
    assert sorted(named - KEYS) == []


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("skip_rollout", "trainer.train_only=FOLDER"),
        ("mode", "trainer.mode"),
        ("over_sample_rate", "trainer.mode=partial_rollouts"),
    ],
)
def test_keys_of_rollouts_are_answered_with_the_key_that_does_it(key: str, advice: str) -> None:
    assert advice in str(key_advice(f"actor_rollout_ref.rollout.{key}"))


def test_training_an_external_draft_is_refused_by_name() -> None:
    for name in ("train_draft", "draft_lr", "online_training.enable"):
        advice = str(key_advice(f"actor_rollout_ref.rollout.speculative.{name}"))
        assert advice.startswith("a draft model is not trained in a run"), name
        assert mentioned(advice) <= KEYS


def test_advice_is_of_the_role_that_was_meant() -> None:
    assert key_advice("critic.model.fsdp_config.param_offload") == "FSDP's; use critic.megatron.param_offload"
    assert "reward_model.megatron.context_parallel_size" in str(
        key_advice("reward_model.ulysses_sequence_parallel_size")
    )
    for role in ("actor", "ref"):
        assert key_advice(f"actor_rollout_ref.{role}.use_prefix_grouper") == (
            "use actor_rollout_ref.actor.share_prompts, for all models"
        )
    assert key_advice("critic.optim.override_optimizer_config.optimizer_cpu_offload") == (
        "use critic.optim.optimizer_cpu_offload"
    )
    assert key_advice("trainer.seed") is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.strategy=fsdp", "megarl trains with Megatron-core: leave the key out"),
        ("actor_rollout_ref.ref.strategy=fsdp2", "megarl trains with Megatron-core: leave the key out"),
        ("critic.strategy=fsdp", "fsdp=optim_grads_params in the section megatron beside it"),
        ("critic.strategy=ddp", "the section megatron beside it"),
        ("actor_rollout_ref.rollout.name=vllm", "write sglang"),
        ("actor_rollout_ref.model.use_remove_padding=false", "pads nothing anywhere"),
        ("critic.model.use_remove_padding=false", "pads nothing anywhere"),
        (
            "actor_rollout_ref.hybrid_engine=false",
            "set resource_pools and actor_rollout_ref.rollout.resource_pool",
        ),
    ],
)
def test_values_of_other_engines_are_refused_with_a_way(train: Train, override: str, words: str) -> None:
    (line,) = lines_of(lambda: train(override))
    key, _, value = override.partition("=")
    assert line.startswith(f"override '{override}': {key}={value}: ") and words in line
    right = {"strategy": "megatron", "name": "sglang"}.get(key.rpartition(".")[2], "true")
    train(f"{key}={right}")


def test_what_is_said_twice_is_refused(train: Train) -> None:
    actor = "actor_rollout_ref.actor"
    (line,) = lines_of(lambda: train(f"{actor}.grad_clip=1", f"{actor}.optim.clip_grad=1"))
    assert line == (
        f"override '{actor}.grad_clip=1': {actor}.grad_clip and {actor}.optim.clip_grad (override "
        f"'{actor}.optim.clip_grad=1') say the same thing; give one of them"
    )
    for other in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        (line,) = lines_of(
            lambda other=other: train(f"{actor}.clip_range=[0.2, 0.3]", f"{actor}.{other}=0.2")
        )
        assert f"{actor}.clip_range and {actor}.{other} " in line
    train(f"{actor}.clip_range=null", f"{actor}.clip_ratio=0.1")


@pytest.mark.parametrize("key", ["~trainer.seed", "~trainer.seed=1"])
def test_keys_are_not_deleted(train: Train, key: str) -> None:
    (line,) = lines_of(lambda: train(key))
    assert "keys are not deleted; write trainer.seed=null" in line


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--rollout-batch-size", "data.train_batch_size=N"),
        ("--n_samples_per_prompt=8", "actor_rollout_ref.rollout.n=N"),
        ("--rollout-num-gpus-per-engine", "actor_rollout_ref.rollout.tensor_model_parallel_size=N"),
        ("--rollout-top-p=0.9", "actor_rollout_ref.rollout.top_p=X"),
        ("--rollout-top-k", "actor_rollout_ref.rollout.top_k=N"),
    ],
)
def test_slimes_flags_are_answered_with_keys(flag: str, advice: str, capsys: pytest.CaptureFixture) -> None:
    assert advice in str(flag_advice(flag))
    with pytest.raises(SystemExit) as caught:
        main(["train", "recipe.yaml", "trainer.seed=1", flag])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: megarl ") and advice in error


def test_a_flag_that_nobody_knows_has_no_advice() -> None:
    assert flag_advice("--fast") is None
