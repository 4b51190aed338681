"""The `megarl` command: `train`, `sft`, `rm`, `dpo`, `eval`, `config`, `make-task`, `verify`, `convert`, `plan`.

A mistake of the user's ends in one message without a traceback and exit code 2; a run that fails in one that
names the process, with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from megarl import __version__
from megarl.config import (
    DPOConfig,
    EvalConfig,
    RMConfig,
    SFTConfig,
    TrainConfig,
    TuningConfig,
    check_config,
    resolve,
)
from megarl.config.foreign import COMMANDS, flag_advice
from megarl.config.hub import fetch_models
from megarl.config.load import load_with_origins
from megarl.config.notes import notes, said_here
from megarl.config.reference import reference
from megarl.config.sections import DTYPES
from megarl.config.show import resolved_keys, yaml_text
from megarl.plugins import load_plugins

PLAN_MEMORY = "plan memory"  # a command of two words
C = TypeVar("C", bound=TrainConfig | TuningConfig | EvalConfig)

SCHEMAS = {"train": TrainConfig, "sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "eval": EvalConfig}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in COMMANDS:
        print(f"error: megarl has no command {arguments[0]!r}: {COMMANDS[arguments[0]]}", file=sys.stderr)
        return 2
    if arguments[:2] == PLAN_MEMORY.split():
        arguments[:2] = [PLAN_MEMORY]
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        advice = [text for text in map(flag_advice, unknown) if text is not None]
        parser.error("\n  ".join([f"unrecognized arguments: {' '.join(unknown)}", *advice]))
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
        ("train", _train, "reinforcement learning: PPO, GRPO and their kin"),
        ("sft", _sft, "supervised fine-tuning"),
        ("rm", _rm, "a reward model from preferences"),
        ("dpo", _dpo, "a policy from preferences"),
        ("eval", _eval, "accuracy of a model on held-out problems"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("recipe", help="YAML file (or the first key=value, without a file)")
        command.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
        )
        command.set_defaults(run=run)
    _add_config(commands)
    _add_make_task(commands)
    _add_verify(commands)
    _add_convert(commands)
    _add_plan(commands)
    _add_plan_memory(commands)
    return parser


def _add_config(commands: argparse._SubParsersAction) -> None:
    text = "print the resolved configuration: every key, its value, and where that comes from; start nothing"
    command = commands.add_parser("config", help=text, description=text)
    command.add_argument("recipe", nargs="?", help="YAML file (or the first key=value, without a file)")
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
    )
    command.add_argument(
        "--command", choices=tuple(SCHEMAS), default="train", help="whose recipe it is (default: train)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--reference", action="store_true", help="print the page docs/config.md: all keys of all commands"
    )
    command.set_defaults(run=_config)


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
    text = "the sft rows get chats with a calculator, too (recipes/calculator_cpu.yaml)"
    command.add_argument("--calculator", action="store_true", help=text)
    text = "demonstrations, ranked answers and plain texts instead (tools/three_stages.py)"
    command.add_argument("--preferences", action="store_true", help=text)
    for name, number, text in (
        ("--num-texts", 4000, "plain texts"),
        ("--num-rankings", 4000, "problems whose answers are ranked"),
    ):
        command.add_argument(name, type=int, default=number, help=f"--preferences: {text}")
    text = "--preferences: part of the rankings in which the best answer is not the first"
    command.add_argument("--label-noise", type=float, default=0.1, help=text)
    command.set_defaults(run=_make_task)


def _add_verify(commands: argparse._SubParsersAction) -> None:
    text = "check that transformers gives the same greedy answers as an `megarl eval` run of the same model"
    command = commands.add_parser("verify", help=text, description=text)
    command.add_argument("model", help="Hugging Face folder, such as the one that `megarl train` exports")
    command.add_argument("trajectories", help="trajectories.parquet of `megarl eval` with temperature 0")
    command.add_argument("--max-samples", type=int, default=64)
    command.set_defaults(run=_verify)


def _add_convert(commands: argparse._SubParsersAction) -> None:
    text = (
        "convert between Hugging Face folders and Megatron distributed checkpoints, merge adapters into a model, or "
        "compare two checkpoints, or two folders of adapters"
    )
    command = commands.add_parser("convert", help=text, description=text)
    command.add_argument(
        "source", help="a checkpoint of either kind; Megatron's may be of any parallel layout"
    )
    command.add_argument("target", help="the folder to write; with --verify the checkpoint to compare with")
    command.add_argument(
        "--verify", action="store_true", help="compare tensor by tensor; exit code 1: they differ"
    )
    command.add_argument(
        "--merge",
        metavar="ADAPTER",
        help="folder of adapters in PEFT's format to merge into a Hugging Face folder",
    )
    command.add_argument(
        "--to",
        choices=("hf", "megatron", "peft"),
        help="default: what the source is not; with --merge hf; peft: the adapters of a Megatron checkpoint",
    )
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: each tensor's own"
    )
    command.add_argument(
        "--shard-size", default="4GiB", help="size of a file, such as 500MiB (default: 4GiB)"
    )
    command.add_argument(
        "--mtp",
        choices=("keep", "drop"),
        default="keep",
        help="multi-token prediction layers (default: keep)",
    )
    command.add_argument(
        "--hf", metavar="FOLDER", help="config and tokenizer for a Megatron checkpoint without an hf/ folder"
    )
    command.set_defaults(run=_convert)


def _add_plan(commands: argparse._SubParsersAction) -> None:
    text = "what a weight sync will move: bytes by link, buckets, seconds, beside gathering every full tensor"
    command = commands.add_parser("plan", help=text, description=text)
    command.add_argument(
        "recipe", nargs="?", help="YAML file of `megarl train`; or --model, --train, --rollout, --devices"
    )
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
    )
    command.add_argument("--model", metavar="PATH", help="Hugging Face folder, or its config.json")
    command.add_argument(
        "--train", metavar="SIZES", help="such as tp8-pp16-ep8-first3-last2 (also vpp, cp, etp)"
    )
    command.add_argument(
        "--rollout", metavar="SIZES", help="of an engine, such as tp32-ep32 (also dp, of attention)"
    )
    command.add_argument("--devices", type=int, metavar="N", help="of the training")
    command.add_argument("--devices-per-node", type=int, default=8, metavar="N", help="default: 8")
    command.add_argument(
        "--engines", type=int, metavar="N", help="default: as many as the training's devices hold"
    )
    command.add_argument("--separate", action="store_true", help="the engines have devices of their own")
    command.add_argument("--dtype", choices=DTYPES, help="that travels; default: the recipe's, or bfloat16")
    command.add_argument("--fp8", action="store_true", help="projections travel in float8, with their scales")
    command.add_argument("--bucket-mb", type=int, metavar="N", help="in MiB; default: the recipe's, or 256")
    # By the makers' figures for H100 nodes: memory of 3.35 TB/s, read and written; NVLink 4, 900 GB/s for both
    # directions; a network card of 400 Gb/s for each GPU.
    for link, rate in (("local", 1675.0), ("intra", 450.0), ("inter", 50.0)):
        text = f"GB/s of a device in each direction; default: {rate:g}"
        command.add_argument(f"--bandwidth-{link}", type=float, default=rate, metavar="RATE", help=text)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_plan)


def _add_plan_memory(commands: argparse._SubParsersAction) -> None:
    text = "what a job will hold on each GPU in each phase of a step, term by term, and whether it fits"
    command = commands.add_parser(PLAN_MEMORY, help=text, description=text)
    command.add_argument(
        "recipe", help="YAML file of `megarl train` (or the first key=value, without a file)"
    )
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
    )
    text = "of a GPU; default: 79 (as sold: 80 GB)"
    command.add_argument("--gpu-memory", type=float, default=79.0, metavar="GIB", help=text)
    text = "of it that is not planned with: CUDA, NCCL, fragments; default: 6"
    command.add_argument("--reserve", type=float, default=6.0, metavar="GIB", help=text)
    command.add_argument(
        "--fit", action="store_true", help="find the fewest nodes, and a layout, on which it fits"
    )
    text = "leave the engines out, as if they had devices of their own"
    command.add_argument("--without-engines", action="store_true", help=text)
    command.add_argument("--max-nodes", type=int, default=32, metavar="N", help="with --fit; default: 32")
    command.add_argument("--json", action="store_true", help="print JSON, in bytes")
    command.set_defaults(run=_plan_memory)


def _read(schema: type[C], options: argparse.Namespace) -> tuple[C, dict[str, str]]:
    recipe, overrides = options.recipe, options.overrides
    if "=" in recipe and not Path(recipe).exists():
        recipe, overrides = None, [recipe, *overrides]
    return load_with_origins(schema, recipe, overrides)


def _configured(schema: type[C], options: argparse.Namespace) -> C:
    """The resolved configuration, with the user's own files imported and models on this machine."""
    if "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "torchrun started several copies of this command, each of which would start all processes of the run: "
            "run it once, without torchrun; trainer.nnodes and trainer.n_gpus_per_node say how many devices there are"
        )
    config, origins = _read(schema, options)
    check_config(config)
    for note in notes(config, said_here(origins, options.recipe)):
        print(f"note: {note}")
    if not isinstance(config, TuningConfig):
        load_plugins(config.plugins)
    return fetch_models(resolve(config))


def _config(options: argparse.Namespace) -> None:
    if options.reference:
        print(reference(), end="")
        return
    if options.recipe is None:
        raise ValueError("megarl config needs a recipe, key=value, or --reference")
    config, origins = _read(SCHEMAS[options.command], options)
    keys, remarks = resolved_keys(config, origins), notes(config, said_here(origins, options.recipe))
    if options.json:
        values = {key: {"value": value, "from": origin} for key, (value, origin) in keys.items()}
        print(json.dumps({"keys": values, "notes": remarks}, indent=2))
    else:
        print(yaml_text(keys), end="")
        for remark in remarks:
            print(f"# note: {remark}")
    check_config(config)  # last, so that what is wrong can be looked up above


# The commands import what they need when they run: `megarl --help` and a mistyped key answer at once.


def _train(options: argparse.Namespace) -> None:
    config = _configured(TrainConfig, options)
    from megarl.trainer.ppo import train

    train(config)


def _sft(options: argparse.Namespace) -> None:
    config = _configured(SFTConfig, options)
    from megarl.trainer.sft import train

    train(config)


def _rm(options: argparse.Namespace) -> None:
    config = _configured(RMConfig, options)
    from megarl.trainer.rm import train

    train(config)


def _dpo(options: argparse.Namespace) -> None:
    config = _configured(DPOConfig, options)
    from megarl.trainer.dpo import train

    train(config)


def _eval(options: argparse.Namespace) -> None:
    config = _configured(EvalConfig, options)
    from megarl.trainer.evaluate import evaluate, print_scores

    print_scores(evaluate(config), config.trainer.default_local_dir)


def _make_task(options: argparse.Namespace) -> None:
    from megarl.trainer.demo_task import make_preference_task, make_task

    names = (
        "seed",
        "max_operand",
        "teacher_errors",
        "num_sft",
        "num_train",
        "num_test",
        "hidden_size",
        "num_layers",
    )
    shared = {name: getattr(options, name) for name in names}
    if not options.preferences:
        make_task(options.out, **shared, calculator=options.calculator)
        return
    if options.calculator:
        raise ValueError("--calculator and --preferences are two tasks; give one of them")
    make_preference_task(
        options.out,
        **shared,
        label_noise=options.label_noise,
        num_texts=options.num_texts,
        num_rankings=options.num_rankings,
    )


def _verify(options: argparse.Namespace) -> None:
    from megarl.trainer.verify import verify_greedy

    verify_greedy(options.model, options.trajectories, options.max_samples)


def _convert(options: argparse.Namespace) -> None:
    from megarl.hybrid_engine.convert.command import run

    run(options)


def _plan(options: argparse.Namespace) -> None:
    from megarl.hybrid_engine.plan_command import run

    run(options)


def _plan_memory(options: argparse.Namespace) -> None:
    from megarl.trainer.memory_command import run

    run(options)


if __name__ == "__main__":
    sys.exit(main())
