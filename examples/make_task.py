"""`megarl make-task`: a tiny random model that can read arithmetic word problems, and the problems; or the same with
answers that are ranked, for the three stages from demonstrations to PPO with a reward model."""

import argparse
from pathlib import Path

from rich.console import Console

from examples.arithmetic import arithmetic_texts, write_arithmetic
from examples.preference_task import preference_texts, write_preference_task
from examples.tiny_model import make_tiny_model


def run(options: argparse.Namespace) -> None:
    """Write `<out>/model` (Hugging Face format) and the task's Parquet files into `<out>/data`.

    Args:
        options: those of `megarl make-task` (megarl/cli/arguments.py).

    Raises:
        ValueError: two tasks at once, an unknown family, or numbers that the task refuses (`write_arithmetic`, `write_preference_task`).
    """
    folder, operands = Path(options.out), options.max_operand
    shared = {"seed": options.seed, "max_operand": operands, "teacher_errors": options.teacher_errors}
    sizes = {"num_sft": options.num_sft, "num_train": options.num_train, "num_test": options.num_test}
    if options.preferences and options.calculator:
        raise ValueError("--calculator and --preferences are two tasks; give one of them")
    if options.preferences:
        files = write_preference_task(
            folder / "data",
            **shared,
            **sizes,
            num_texts=options.num_texts,
            num_rankings=options.num_rankings,
            label_noise=options.label_noise,
        )
        texts = preference_texts(max_operand=operands)
    else:
        files = write_arithmetic(folder / "data", **shared, **sizes, calculator=options.calculator)
        texts = arithmetic_texts(max_operand=operands, calculator=options.calculator)
    model = make_tiny_model(
        folder / "model",
        texts,
        hidden_size=options.hidden_size,
        ffn_hidden_size=3 * options.hidden_size,
        num_layers=options.num_layers,
        family=options.family,
        seed=options.seed,
    )
    console = Console()
    for path in (model, *files.values()):
        console.print(f"wrote {path}", highlight=False)
