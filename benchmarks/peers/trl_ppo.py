"""The common task by TRL's experimental PPOTrainer: python trl_ppo.py TASK_FOLDER STEPS OUT_FOLDER. Runs in an environment of
TRL 1.12.0, the last that has it.

It takes its rewards from a reward model only: the rule's stand in its place, and no reward model is run. It always runs a
reference model.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from reward import digit_share
from steps import StepClock
from task import NUM_PROMPTS, RESPONSE_TOKENS, SAMPLES
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
from trl_common import BATCH, SETTINGS

CLOCK = StepClock()


class Trainer(PPOTrainer):
    """PPOTrainer that ends a step where it is logged."""

    def log(self, logs, *args, **kwargs):
        super().log(logs, *args, **kwargs)
        if "objective/scores" in logs:
            CLOCK.end(reward=logs["objective/scores"])


def put_in_rule(reward_model, tokenizer) -> None:
    """Time what PPOTrainer calls by the names of its module, and have the rule score in the reward model's place."""
    without_gradient = lambda: not torch.is_grad_enabled()  # noqa: E731
    values = CLOCK.timed("values", ppo_trainer.get_reward, without_gradient)

    def get_reward(model, tokens, pad_token_id, context_length):
        if model is not reward_model:
            return values(model, tokens, pad_token_id, context_length)
        with CLOCK.phase("reward"):
            texts = tokenizer.batch_decode(tokens[:, context_length:], skip_special_tokens=True)
            return None, torch.tensor([digit_share(text) for text in texts]), None

    ppo_trainer.get_reward = get_reward
    ppo_trainer.batch_generation = CLOCK.timed("generate", ppo_trainer.batch_generation)
    ppo_trainer.forward = CLOCK.timed("ref_log_probs", ppo_trainer.forward, without_gradient)


def main() -> None:
    task, steps, out = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    config = PPOConfig(
        output_dir=out,
        **SETTINGS,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=BATCH * steps,
        local_rollout_forward_batch_size=BATCH,
        response_length=RESPONSE_TOKENS,
        stop_token="eos",
        num_sample_generations=0,
    )
    model = task / "model"
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    prompts = load_dataset("parquet", data_files=str(task / "train.parquet"), split="train", cache_dir=out)
    chats = [
        tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        for row in prompts.select(range(NUM_PROMPTS * steps))
    ]
    ids = [tokenizer(chat)["input_ids"] for chat in chats for _ in range(SAMPLES)]
    policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    value, rule = (
        AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
        for _ in range(2)
    )
    trainer = Trainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=rule,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
    )
    put_in_rule(trainer.reward_model, tokenizer)
    CLOCK.begin()
    trainer.train()


if __name__ == "__main__":
    main()
