"""Something to try megarl with: a tiny random model that can read arithmetic word problems, and the problems; or the same
with answers that are ranked, for the three stages from demonstrations to PPO with a reward model."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from megarl.examples.arithmetic import arithmetic_texts, write_arithmetic
from megarl.examples.preference_task import preference_texts, write_preference_task
from megarl.examples.tiny_model import make_tiny_model


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
    texts = arithmetic_texts(max_operand=max_operand, calculator=calculator)
    _write_model(folder / "model", texts, hidden_size, num_layers, seed)
    _report([folder / "model", *files.values()])


def make_preference_task(
    out: str,
    *,
    seed: int,
    max_operand: int,
    teacher_errors: float,
    label_noise: float,
    num_texts: int,
    num_sft: int,
    num_rankings: int,
    num_train: int,
    num_test: int,
    hidden_size: int,
    num_layers: int,
) -> None:
    """Write `<out>/model` and the files of `write_preference_task` into `<out>/data`."""
    folder = Path(out)
    files = write_preference_task(
        folder / "data",
        num_texts=num_texts,
        num_sft=num_sft,
        num_rankings=num_rankings,
        num_train=num_train,
        num_test=num_test,
        seed=seed,
        max_operand=max_operand,
        teacher_errors=teacher_errors,
        label_noise=label_noise,
    )
    _write_model(folder / "model", preference_texts(max_operand=max_operand), hidden_size, num_layers, seed)
    _report([folder / "model", *files.values()])


def _write_model(folder: Path, texts: list[str], hidden_size: int, num_layers: int, seed: int) -> None:
    make_tiny_model(
        folder,
        texts,
        hidden_size=hidden_size,
        ffn_hidden_size=3 * hidden_size,
        num_layers=num_layers,
        seed=seed,
    )


def _report(paths: list[Path]) -> None:
    console = Console()
    for path in paths:
        console.print(f"wrote {path}", highlight=False)
