"""Complete runs with adapters: fine-tuning with PEFT's results, and PPO with one frozen model for actor, reference and critic."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from megarl.data.loader import TableLoader
from megarl.data.sft import SftDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.trainer.run.logger import read_metrics
from tests.fixtures.runs import PPO, on, steps, succeed
from tests.trainer.test_runs import OFFLOAD, losses_of

RANK, ALPHA = 4, 8


@pytest.fixture(scope="module")
def begun(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter that changes the model's outputs."""
    folder = tmp_path_factory.mktemp("begun")
    torch.manual_seed(7)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(task / "model"),
        PeftConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder)
    return folder


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


@pytest.mark.slow
def test_sft_follows_peft(task: Path, begun: Path, tmp_path: Path) -> None:
    """Three steps from a PEFT adapter on TP2 x PP2; the exported adapter and the merged model equal PEFT's."""
    succeed(
        "sft", "recipes/quickstart_sft.yaml", f"data.train_files={task}/data/sft.parquet",
        f"model.path={task}/model", "data.train_batch_size=16", "trainer.total_training_steps=3",
        "trainer.test_freq=-1", f"trainer.default_local_dir={tmp_path}", "optim.lr_warmup_steps=0",
        "optim.lr=1e-3", "optim.weight_decay=0", f"model.lora.rank={RANK}", f"model.lora.alpha={ALPHA}",
        f"model.lora.adapter_path={begun}",
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(task / "model")
    model = PeftModel.from_pretrained(base, begun, is_trainable=True)
    dataset = SftDataset(
        str(task / "data/sft.parquet"), load_tokenizer(str(task / "model")), max_length=64,
        response_key="extra_info.answer",
    )  # fmt: skip
    expected = losses_of(model, TableLoader(dataset, 16, True, 1))
    assert [step["train/loss"] for step in read_metrics(tmp_path)] == pytest.approx(expected, rel=1e-5)
    before = logits(AutoModelForCausalLM.from_pretrained(task / "model"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(task / "model"), tmp_path / "adapter"
    )
    assert (logits(model) - before).abs().max() > 0.1
    for exported in (merged, adapted):
        torch.testing.assert_close(logits(exported.eval()), logits(model.eval()), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def ppo_run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on TP2 x PP2; memory that a phase does not use is off the devices."""
    out = tmp_path_factory.mktemp("run") / "ppo"
    _, *short = PPO
    succeed(
        "train", "recipes/lora_ppo_cpu.yaml", *short, *on(task, out), "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.rollout.free_cache_engine=true", "trainer.save_freq=1", "trainer.save_hf=true",
        *(f"actor_rollout_ref.actor.megatron.{key}=true" for key in OFFLOAD),
    )  # fmt: skip
    return out


def test_the_first_update_is_on_policy_and_engines_serve_what_was_trained(ppo_run: Path) -> None:
    first, second = steps(ppo_run)
    assert first["actor/ratio_mean"] == 1.0 and first["actor/ppo_kl"] == 0.0 == first["actor/ref_kl"]
    assert second["actor/ref_kl"] != 0.0
    for step in (first, second):
        assert step["training/rollout_log_prob_diff_max"] < 1e-4
        assert step["actor/grad_norm"] > 0 < step["critic/grad_norm"]


def test_one_frozen_model_is_all_there_is(ppo_run: Path) -> None:
    """Reference and critic have no weights of their own, and an update has only its role's adapters in addition to the model."""
    for step in steps(ppo_run):
        there = {
            phase: {
                name.rpartition("/")[2]
                for name, value in step.items()
                if name.startswith(f"memory/{phase}/")
                and not name.endswith(("_on_host", "_buffers", "/total"))
                and value
            }
            for phase in ("sync", "generate", "evaluate_models", "update_critic", "update_actor")
        }
        assert there == {
            "sync": {"actor_weights", "actor_adapters", "rollout_weights"},
            "generate": {"rollout_weights", "rollout_kv_cache"},
            "evaluate_models": {"actor_weights", "actor_adapters", "critic_adapters"},
            "update_critic": {"actor_weights", "critic_adapters", "critic_gradients", "critic_optimizer"},
            "update_actor": {"actor_weights", "actor_adapters", "actor_gradients", "actor_optimizer"},
        }
        trained = step["memory/update_actor/actor_adapters"]
        assert trained < step["memory/update_actor/actor_weights"]
        assert step["memory/update_actor/actor_gradients"] < 2 * trained


def test_checkpoints_hold_the_merged_model_and_its_adapters(ppo_run: Path, task: Path) -> None:
    first, last = ppo_run / "checkpoints" / "step-1", ppo_run
    base = AutoModelForCausalLM.from_pretrained(task / "model")
    plain, found = logits(base), []
    for folder in (first, last):
        merged = AutoModelForCausalLM.from_pretrained(folder / "hf")
        adapted = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(task / "model"), folder / "adapter"
        )
        torch.testing.assert_close(logits(merged), logits(adapted.eval()), atol=1e-5, rtol=1e-5)
        found.append(logits(merged))
    assert (found[0] - plain).abs().max() > 1e-3 < (found[1] - found[0]).abs().max()
