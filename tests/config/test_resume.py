"""What may change between a checkpoint and the run that goes on from it."""

from pathlib import Path

import pytest

from megarl.config import SFTConfig, TrainConfig, load_config, resolve, save_config
from megarl.config.resume import changed_keys, refused_changes

PPO = Path(__file__).resolve().parents[2] / "recipes" / "quickstart_ppo.yaml"
POLICY = "actor_rollout_ref"


def changes(tmp_path: Path, *overrides: str) -> dict:
    saved = save_config(resolve(load_config(TrainConfig, PPO)), tmp_path / "config.yaml")
    return changed_keys(resolve(load_config(TrainConfig, PPO, overrides)), saved)


def test_nothing_has_changed(tmp_path: Path) -> None:
    assert changes(tmp_path) == {}


def test_what_may_change_is_listed_with_both_values(tmp_path: Path) -> None:
    found = changes(
        tmp_path, f"{POLICY}.actor.optim.lr=0.25", f"{POLICY}.actor.megatron.tensor_model_parallel_size=1"
    )
    assert found[f"{POLICY}.actor.optim.lr"][1] == 0.25
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
        ("algorithm.kl_ctrl.type=adaptive", "another controller"),
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
