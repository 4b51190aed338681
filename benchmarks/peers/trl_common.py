"""The settings of the common task that both of TRL's trainers get."""

from task import LEARNING_RATE, NUM_PROMPTS, SAMPLES

BATCH = NUM_PROMPTS * SAMPLES
SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": BATCH,
    "gradient_accumulation_steps": 1,
    "temperature": 1.0,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "dataloader_pin_memory": False,
    "seed": 0,
}
