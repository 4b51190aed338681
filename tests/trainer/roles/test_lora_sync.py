"""What the engines serve of a policy with adapters."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import LoraConfig, RolloutConfig, TrainConfig, load_config, resolve
from megarl.examples.tiny_model import make_tiny_model
from megarl.models import ModelConfig, read_model_config
from megarl.rollout.engine import AdapterConfig
from megarl.trainer.roles.adapters import check_adapters
from megarl.trainer.roles.lora_sync import engine_adapters, served_adapters
from tests.fixtures.runs import PPO, REPOSITORY, on

LORA, ROLLOUT = LoraConfig(rank=4, alpha=8), RolloutConfig()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "hf", ["some text"], family="qwen3")
    return read_model_config(str(folder))


def test_adapters_are_served_where_they_can_be_and_help(model: ModelConfig) -> None:
    assert served_adapters(ROLLOUT, model, LoraConfig(), freed=False) == (None, None)
    served, said = served_adapters(ROLLOUT, model, LORA, freed=False)
    assert served == LORA and "only adapters are sent" in said
    asked = replace(ROLLOUT, lora_sync="adapters")
    assert served_adapters(asked, model, LORA, freed=True)[0] == LORA


@pytest.mark.parametrize(
    ("rollout", "lora", "freed", "reason"),
    [
        (ROLLOUT, LORA, True, "memory is freed in each step"),
        (ROLLOUT, replace(LORA, use_dora=True), False, "SGLang refuses DoRA adapters"),
        (replace(ROLLOUT, quantization="fp8"), LORA, False, "float8 engines are sent merged weights"),
        (replace(ROLLOUT, sync_skip_unchanged=True), LORA, False, "rollout.sync_skip_unchanged=true"),
        (replace(ROLLOUT, lora_sync="merged"), LORA, False, "rollout.lora_sync=merged"),
    ],
)
def test_why_they_are_merged_is_said(
    model: ModelConfig, rollout: RolloutConfig, lora: LoraConfig, freed: bool, reason: str
) -> None:
    served, said = served_adapters(rollout, model, lora, freed)
    assert served is None
    assert said is not None and said.startswith("rollout engines are sent weights") and reason in said


def test_engines_are_started_for_the_layers_and_scaling_that_are_trained(model: ModelConfig) -> None:
    lora = LoraConfig(rank=4, alpha=6, use_rslora=True, target_modules=("v_proj", "down_proj"))
    assert engine_adapters(model, lora) == AdapterConfig(4, 3.0, ("v_proj", "down_proj"))


def test_what_cannot_be_served_is_refused_before_anything_starts(task: Path) -> None:
    recipe, *ppo = PPO
    given = [
        *on(task, task),
        "actor_rollout_ref.model.lora.rank=4",
        "actor_rollout_ref.rollout.lora_sync=adapters",
    ]
    model = read_model_config(str(task / "model"))
    check_adapters(resolve(load_config(TrainConfig, REPOSITORY / recipe, [*ppo, *given])), model, model)
    given.append("actor_rollout_ref.model.lora.use_dora=true")
    config = resolve(load_config(TrainConfig, REPOSITORY / recipe, [*ppo, *given]))
    with pytest.raises(
        ValueError, match=r"lora_sync=adapters cannot be: lora\.use_dora=true: SGLang refuses DoRA"
    ):
        check_adapters(config, model, model)
