"""The memory of `megarl sft`, `rm` and `dpo` before they run."""

import json
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.plan.memory import GIB
from megarl.plan.memory_command import read_planned
from megarl.plan.micro_batch_memory import fitting_tokens
from megarl.plan.supervised import plan_of

QWEN = Path(__file__).resolve().parents[2] / "recipes" / "models" / "qwen2.5-7b"
KEYS = [f"model.path={QWEN}", "data.train_files=none", "data.max_length=2048", "data.train_batch_size=8",
        "optim.lr=1e-5", "trainer.n_gpus_per_node=8", "megatron.tensor_model_parallel_size=2"]  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "recipe.yaml").write_text("max_token_len_per_gpu: 8192\n")
    return str(tmp_path / "recipe.yaml")


def owners(recipe: str, command: str, *keys: str) -> dict[str, int]:
    config, inputs = read_planned(recipe, [*KEYS, *keys], command)
    return {owner.name: max(owner.stages) for owner in plan_of(config, inputs, 79 * GIB, 0).owners}


def test_one_model_holds_all_it_has_all_the_time(recipe: str, capsys: pytest.CaptureFixture) -> None:
    """Qwen2.5-7B has 7.6 G weights; of four data parallel ranks each has a fourth of 12 bytes of optimizer states."""
    arguments = ["plan", "memory", recipe, *KEYS, "--command", "sft", "--json", "--gpu-memory", "139"]
    assert main(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and list(plan["phases"]) == ["update"]
    update = plan["phases"]["update"]
    assert update["sft_weights"] == pytest.approx(7.6156e9, rel=1e-3)
    assert update["sft_gradients"] == 2 * update["sft_weights"]
    assert update["sft_optimizer"] == pytest.approx(7.6156e9 / 2 * 12 / 4, rel=1e-3)
    assert update["total"] == sum(size for name, size in update.items() if name != "total")
    assert plan["kv_tokens"] == 2048 and not plan["kv_token_bytes"]


def test_a_reward_model_has_a_head_of_one_row(recipe: str) -> None:
    sft, rm = owners(recipe, "sft"), owners(recipe, "rm")
    head = 2 * 152064 // 2 * 3584  # bytes of the half of the language model's, which is not tied
    assert sft["sft_weights"] - rm["rm_weights"] == head - 2 * 3584
    assert {"rm_evaluating", "rm_activations", "rm_working"} <= rm.keys()
    assert owners(recipe, "dpo").keys() == {name.replace("rm_", "dpo_") for name in rm}
    assert "sft_evaluating" not in sft  # there are no held-out examples
    assert "sft_evaluating" in owners(recipe, "sft", "data.val_files=none")


def test_adapters_have_gradients_and_states_alone(recipe: str) -> None:
    full, lora = owners(recipe, "dpo"), owners(recipe, "dpo", "model.lora.rank=16")
    assert lora["dpo_weights"] == full["dpo_weights"]
    assert lora["dpo_gradients"] == 2 * lora["dpo_adapters"] < full["dpo_gradients"] / 100


def test_sizes_of_micro_batches_are_chosen_by_the_same_formulas(recipe: str) -> None:
    config, inputs = read_planned(recipe, [*KEYS, "max_token_len_per_gpu=null"], "sft")
    del inputs
    tokens = fitting_tokens(config, 2048, 79 * GIB)
    fits = {
        number: plan_of(
            *read_planned(recipe, [*KEYS, f"max_token_len_per_gpu={number}"], "sft"), 79 * GIB
        ).fits
        for number in (tokens, 2 * tokens)
    }
    assert fits[tokens] and (2 * tokens > 65536 or not fits[2 * tokens])


def test_what_is_of_training_with_engines_alone_is_refused(
    recipe: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["plan", "memory", recipe, *KEYS, "--command", "rm", "--fit"]) == 2
    assert "--fit looks for layouts of `megarl train` alone" in capsys.readouterr().err
