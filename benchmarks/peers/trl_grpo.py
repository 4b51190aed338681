"""The common task by TRL's GRPOTrainer: python trl_grpo.py TASK_FOLDER STEPS OUT_FOLDER. Runs in TRL's environment."""

import sys
from pathlib import Path

import torch
from datasets import load_dataset
from reward import digit_share
from steps import StepClock
from task import RESPONSE_TOKENS, SAMPLES
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_common import SETTINGS

CLOCK = StepClock()


class Trainer(GRPOTrainer):
    """GRPOTrainer with its phases timed. With one update a batch, TRL needs no forward pass for old log-probs."""

    _generate = CLOCK.timed("generate", GRPOTrainer._generate)
    _calculate_rewards = CLOCK.timed("reward", GRPOTrainer._calculate_rewards)
    training_step = CLOCK.timed("all", GRPOTrainer.training_step)
    _generate_and_score_completions = CLOCK.timed("collect", GRPOTrainer._generate_and_score_completions)
    _get_per_token_logps_and_entropies = CLOCK.timed(
        "log_probs", GRPOTrainer._get_per_token_logps_and_entropies, lambda: not torch.is_grad_enabled()
    )


class Report(TrainerCallback):
    """Ends a step where TRL logs it."""

    def on_train_begin(self, *args, **kwargs):
        CLOCK.begin()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None and "reward" in logs:
            phases = CLOCK.phases  # the rest of a step is the update, the optimizer's part included
            collect = phases.pop("collect")
            phases.pop("all")
            phases["other"] = collect - sum(phases.values())
            CLOCK.end(reward=logs["reward"], response_tokens=logs["completions/mean_length"], collect=collect)


def reward(completions, **columns):
    return [digit_share(completion[0]["content"]) for completion in completions]


def main() -> None:
    task, steps, out = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    config = GRPOConfig(
        output_dir=out,
        **SETTINGS,
        num_generations=SAMPLES,
        max_completion_length=RESPONSE_TOKENS,
        max_steps=steps,
        beta=0.0,
        num_iterations=1,
    )
    prompts = load_dataset("parquet", data_files=str(task / "train.parquet"), split="train", cache_dir=out)
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32),
        args=config,
        train_dataset=prompts,
        reward_funcs=reward,
        processing_class=AutoTokenizer.from_pretrained(task / "model", padding_side="left"),
        callbacks=[Report()],
    ).train()


if __name__ == "__main__":
    main()
