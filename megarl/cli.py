"""The `megarl` command: `train`, `sft`, `eval`, `make-task`, `verify`.

A mistake of the user's ends in one message without a traceback and exit code 2; a run that fails in one that
names the process, with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TypeVar

from megarl import __version__
from megarl.config import EvalConfig, SFTConfig, TrainConfig, check_config, load_config, resolve

C = TypeVar("C", TrainConfig, SFTConfig, EvalConfig)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {_plain_words(error)}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _plain_words(error: OSError) -> str:
    """Such as "/data/run/metrics.jsonl: No space left on device"."""
    return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl", description="Reinforcement learning of large language models."
    )
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, run, text in (
        ("train", _train, "PPO or GRPO"),
        ("sft", _sft, "supervised fine-tuning"),
        ("eval", _eval, "accuracy of a model on held-out problems"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("recipe", help="YAML file")
        command.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
        )
        command.set_defaults(run=run)
    _add_make_task(commands)
    _add_verify(commands)
    return parser


def _add_make_task(commands: argparse._SubParsersAction) -> None:
    text = "make a tiny random model and arithmetic word problems to try megarl with"
    command = commands.add_parser("make-task", help=text, description=text)
    command.add_argument("out", help="folder; gets model/ and data/")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--max-operand", type=int, default=6, help="numbers in the problems are 1 to this")
    command.add_argument(
        "--teacher-errors", type=float, default=0.7, help="part of the sft answers that are one too many"
    )
    command.add_argument("--num-sft", type=int, default=4000, help="problems for supervised fine-tuning")
    command.add_argument("--num-train", type=int, default=6000, help="problems for PPO")
    command.add_argument("--num-test", type=int, default=300, help="held-out problems")
    command.add_argument("--hidden-size", type=int, default=128)
    command.add_argument("--num-layers", type=int, default=2)
    command.set_defaults(run=_make_task)


def _add_verify(commands: argparse._SubParsersAction) -> None:
    text = "check that transformers gives the same greedy answers as an `megarl eval` run of the same model"
    command = commands.add_parser("verify", help=text, description=text)
    command.add_argument("model", help="Hugging Face folder, such as the one that `megarl train` exports")
    command.add_argument("trajectories", help="trajectories.parquet of `megarl eval` with temperature 0")
    command.add_argument("--max-samples", type=int, default=64)
    command.set_defaults(run=_verify)


def _configured(schema: type[C], options: argparse.Namespace) -> C:
    config = load_config(schema, options.recipe, options.overrides)
    check_config(config)
    return resolve(config)


# The commands import what they need when they run: `megarl --help` and a mistyped key answer at once.


def _train(options: argparse.Namespace) -> None:
    config = _configured(TrainConfig, options)
    from megarl.trainer.ppo import train

    train(config)


def _sft(options: argparse.Namespace) -> None:
    config = _configured(SFTConfig, options)
    from megarl.trainer.sft import train

    train(config)


def _eval(options: argparse.Namespace) -> None:
    config = _configured(EvalConfig, options)
    from megarl.trainer.evaluate import evaluate, print_scores

    print_scores(evaluate(config), config.trainer.default_local_dir)


def _make_task(options: argparse.Namespace) -> None:
    from megarl.trainer.demo_task import make_task

    make_task(
        options.out,
        seed=options.seed,
        max_operand=options.max_operand,
        teacher_errors=options.teacher_errors,
        num_sft=options.num_sft,
        num_train=options.num_train,
        num_test=options.num_test,
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
    )


def _verify(options: argparse.Namespace) -> None:
    from megarl.trainer.verify import verify_greedy

    verify_greedy(options.model, options.trajectories, options.max_samples)


if __name__ == "__main__":
    sys.exit(main())
