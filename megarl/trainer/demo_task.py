"""Something to try megarl with: a tiny random model that can read arithmetic word problems, and the problems."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from megarl.data.arithmetic import arithmetic_texts, write_arithmetic
from megarl.models.tiny import make_tiny_model


def make_task(
    out: str,
    *,
    seed: int,
    max_operand: int,
    teacher_errors: float,
    num_sft: int,
    num_train: int,
    num_test: int,
    hidden_size: int,
    num_layers: int,
    calculator: bool = False,
) -> None:
    """Write `<out>/model` (Hugging Face format) and `<out>/data/{sft,train,test}.parquet`.

    Args:
        calculator: for trajectories of several turns, see `write_arithmetic`.
    """
    folder = Path(out)
    files = write_arithmetic(
        folder / "data",
        num_sft,
        num_train,
        num_test,
        seed,
        max_operand=max_operand,
        teacher_errors=teacher_errors,
        calculator=calculator,
    )
    model = make_tiny_model(
        folder / "model",
        arithmetic_texts(max_operand=max_operand, calculator=calculator),
        hidden_size=hidden_size,
        ffn_hidden_size=3 * hidden_size,
        num_layers=num_layers,
        seed=seed,
    )
    console = Console()
    for path in (model, *files.values()):
        console.print(f"wrote {path}", highlight=False)
