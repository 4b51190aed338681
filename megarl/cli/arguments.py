"""The arguments of the `megarl` command, and their help texts."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping

from megarl.config.schema.launch import add_launch
from megarl.config.schema.models import DTYPES

PLAN_MEMORY, PLAN_STEP = "plan memory", "plan step"  # commands of two words
DOCTOR = "look at configuration, models, data and machines before a run of `megarl train`; exit code 1: it would fail"

FIRST = """\
first, in any folder, on any machine, without a GPU, in minutes:
  megarl make-task outputs/demo                     a tiny model, and word problems for it
  megarl sft recipe:quickstart_sft                  teaches it the format of answers
  megarl train recipe:quickstart_ppo                PPO: its accuracy rises

a recipe is a YAML file; every key may be given after it, over the recipe's value:
  megarl train recipe:quickstart_ppo trainer.total_training_steps=3 trainer.seed=7

docs: README.md; `megarl recipes` (one for each model and method); docs/config.md (every key, also printed by
`megarl config --reference`); docs/launch.md (clusters); docs/planning.md (what fits on which GPUs)
"""
EXAMPLES = {
    "train": """\
examples:
  megarl train recipe:quickstart_ppo                              on any machine (after make-task and sft)
  megarl train recipe:qwen2.5_7b_ppo_gsm8k trainer.logger=wandb   on GPUs; each recipe's head says how many
  megarl train recipe:quickstart_ppo trainer.save_freq=10         goes on from a checkpoint when started again
  megarl doctor recipe:quickstart_ppo                             what would go wrong, before it does
""",
    "sft": "example:\n  megarl sft recipe:quickstart_sft optim.lr=1e-3\n",
    "rm": "example:\n  megarl rm recipe:preference_rm trainer.total_epochs=1\n",
    "dpo": "example:\n  megarl dpo recipe:three_stages_dpo_cpu dpo.beta=0.1\n",
    "eval": "example:\n  megarl eval recipe:quickstart_eval model.path=outputs/demo/ppo/hf\n",
    "doctor": "examples:\n  megarl doctor recipe:quickstart_ppo\n  megarl doctor --gpu\n",
}
KEYS = """
keys: docs/config.md, or `megarl config --reference`; `megarl config RECIPE --changed` prints those that a recipe sets
"""

RECIPE = "YAML file, or recipe:NAME (see `megarl recipes`), or the first key=value, without a file"
RECIPES = ("train", "sft", "rm", "dpo", "eval")

Runner = Callable[[argparse.Namespace], int | None]
"""Runs a command; returns its exit code, None for 0."""


def make_parser(version: str, runners: Mapping[str, Runner]) -> argparse.ArgumentParser:
    """The parser of all commands.

    Args:
        runners: by command, the function that its options are given to, as `run`.
    """
    parser = argparse.ArgumentParser(
        prog="megarl",
        description="Reinforcement learning of large language models.",
        epilog=FIRST,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megarl {version}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, text in (
        ("train", "reinforcement learning: PPO, GRPO and their kin"),
        ("sft", "supervised fine-tuning"),
        ("rm", "a reward model from preferences"),
        ("dpo", "a policy from preferences"),
        ("eval", "accuracy of a model on held-out problems"),
        ("doctor", DOCTOR),
    ):
        command = commands.add_parser(
            name,
            help=text,
            description=textwrap.fill(text, 100),
            epilog=EXAMPLES[name] + KEYS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        optional = "?" if name == "doctor" else None  # without one it looks at this machine
        command.add_argument("recipe", nargs=optional, help=RECIPE)
        command.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
        )
        if name == "doctor":
            _add_gpu_test(command)
        command.set_defaults(run=runners[name])
    _add_replay(commands, runners["replay"])
    _add_report(commands, runners["report"])
    _add_config(commands, runners["config"])
    _add_make_task(commands, runners["make-task"])
    _add_verify(commands, runners["verify"])
    _add_convert(commands, runners["convert"])
    _add_plan(commands, runners["plan"])
    _add_plan_memory(commands, runners[PLAN_MEMORY])
    _add_plan_step(commands, runners[PLAN_STEP])
    add_launch(commands, RECIPES, runners["launch"])
    _add_recipes(commands, runners["recipes"])
    _add_requirements(commands, runners["requirements"])
    return parser


def _add_gpu_test(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gpu", action="store_true", help="test this machine's GPUs in steps (docs/gpu.md); takes no recipe"
    )
    command.add_argument("--steps", metavar="NAME,...", help="of --gpu: these alone")
    command.add_argument("--out", metavar="FOLDER", help="of --gpu: for the record [benchmarks/results/gpu]")
    command.add_argument(
        "--limit", type=float, default=480.0, metavar="SECONDS", help="of --gpu: most a step takes [480]"
    )


def _add_recipes(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = "list the recipes that come with megarl, or print one; every command takes one as recipe:NAME"
    command = commands.add_parser("recipes", help=text, description=text)
    command.add_argument("name", nargs="?", help="of the one to print")
    command.set_defaults(run=run)


def _add_requirements(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = "print the path of a requirements file: cpu, for pip install --no-deps --ignore-requires-python -r; or gpu, pins"
    command = commands.add_parser("requirements", help=text, description=text)
    command.add_argument("name", choices=("cpu", "gpu"), help="of machines without GPUs, or with them")
    command.set_defaults(run=run)


def _add_replay(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = (
        "train a step of a `megarl train` run once more, from its checkpoint and its trajectories, without engines or rewards, "
        "and print the numbers beside those that were logged"
    )
    command = commands.add_parser("replay", help=text, description=text)
    command.add_argument("folder", help="the run folder")
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="over the run's own config.yaml"
    )
    command.add_argument("--step", type=int, required=True, help="counted from 1")
    command.add_argument(
        "--trajectories",
        metavar="FILE",
        help="of the step (default: the run's own rollouts/step-<n>.parquet)",
    )
    command.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="where to begin (default: the newest good one before the step; steps in between are replayed, too)",
    )
    command.add_argument(
        "--out", metavar="FOLDER", help="write the policy after the step there, as a Hugging Face model"
    )
    command.set_defaults(run=run)


def _add_report(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = (
        "write a run, or several on the same charts, as one HTML page: final numbers, curves, where the time goes, memory, weight "
        "syncs, trajectories, failures, configuration"
    )
    command = commands.add_parser("report", help=text, description=text)
    command.add_argument(
        "folders", nargs="+", metavar="folder", help="a run folder, also of a run that is still going"
    )
    text = "default: report.html in the run folder, of several runs in the current folder"
    command.add_argument("--output", metavar="FILE", help=text)
    command.set_defaults(run=run)


def _add_config(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = "print the resolved configuration: every key, its value, and where that comes from; start nothing"
    command = commands.add_parser("config", help=text, description=text)
    command.add_argument("recipe", nargs="?", help=RECIPE)
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
    )
    command.add_argument(
        "--command", choices=RECIPES, default="train", help="whose recipe it is (default: train)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--changed", action="store_true", help="print only what was given and is not the default"
    )
    command.add_argument(
        "--reference", action="store_true", help="print the page docs/config.md: all keys of all commands"
    )
    command.set_defaults(run=run)


def _add_make_task(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = "make a tiny random model and arithmetic word problems to try megarl with"
    command = commands.add_parser("make-task", help=text, description=text)
    command.add_argument("out", help="folder; gets model/ and data/")
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--max-operand", type=int, default=6, help="numbers in the problems are 1 to this")
    text = "part of the sft answers that are one too many; --preferences: that lack each of three qualities"
    command.add_argument("--teacher-errors", type=float, default=0.7, help=text)
    command.add_argument("--num-sft", type=int, default=4000, help="problems for supervised fine-tuning")
    command.add_argument("--num-train", type=int, default=6000, help="problems for PPO")
    command.add_argument("--num-test", type=int, default=300, help="held-out problems")
    command.add_argument("--hidden-size", type=int, default=128)
    command.add_argument("--num-layers", type=int, default=2)
    text = "the sft rows get chats with a calculator, too (recipe:calculator_cpu)"
    command.add_argument("--calculator", action="store_true", help=text)
    text = "demonstrations, ranked answers and plain texts instead (examples/three_stages.py)"
    command.add_argument("--preferences", action="store_true", help=text)
    for name, number, text in (
        ("--num-texts", 4000, "plain texts"),
        ("--num-rankings", 4000, "problems whose answers are ranked"),
    ):
        command.add_argument(name, type=int, default=number, help=f"--preferences: {text}")
    text = "--preferences: part of the rankings in which the best answer is not the first"
    command.add_argument("--label-noise", type=float, default=0.1, help=text)
    command.set_defaults(run=run)


def _add_verify(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = "check that transformers gives the same greedy answers as an `megarl eval` run of the same model"
    command = commands.add_parser("verify", help=text, description=text)
    command.add_argument("model", help="Hugging Face folder, such as the one that `megarl train` exports")
    command.add_argument("trajectories", help="trajectories.parquet of `megarl eval` with temperature 0")
    command.add_argument("--max-samples", type=int, default=64)
    command.set_defaults(run=run)


def _add_convert(commands: argparse._SubParsersAction, run: Runner) -> None:
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
    command.set_defaults(run=run)


def _add_plan(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = "what a weight sync will move: bytes by link, buckets, seconds, beside gathering every full tensor"
    others = (
        f"{PLAN_MEMORY}: memory; {PLAN_STEP}: these, pipeline and estimated seconds, --search for layouts"
    )
    command = commands.add_parser("plan", help=text, description=f"{text} ({others})")
    command.add_argument(
        "recipe",
        nargs="?",
        help="of `megarl train`: YAML file, or recipe:NAME; or --model, --train, --rollout, --devices",
    )
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
    )
    command.add_argument(
        "--model", metavar="PATH", help="Hugging Face folder, or its config.json, or recipe:models/NAME"
    )
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
    command.set_defaults(run=run)


def _add_plan_memory(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = "what a job will hold on each GPU in each phase of a step, term by term, and whether it fits"
    command = commands.add_parser(PLAN_MEMORY, help=text, description=text)
    command.add_argument("recipe", help=f"of `megarl train`, `sft`, `rm` or `dpo`: {RECIPE}")
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
    )
    text = "whose recipe it is, where its keys do not say"
    command.add_argument("--command", choices=[name for name in RECIPES if name != "eval"], help=text)
    text = "of a GPU; default: 79 (as sold: 80 GB)"
    command.add_argument("--gpu-memory", type=float, default=79.0, metavar="GIB", help=text)
    text = "of it that is not planned owner by owner: CUDA, NCCL, fragments; default: by what is on a GPU"
    command.add_argument("--reserve", type=float, metavar="GIB", help=text)
    command.add_argument(
        "--fit", action="store_true", help="find the fewest nodes, and a layout, on which it fits"
    )
    text = "leave the engines out, as if they had devices of their own"
    command.add_argument("--without-engines", action="store_true", help=text)
    command.add_argument("--max-nodes", type=int, default=32, metavar="N", help="with --fit; default: 32")
    text = "run a rank of each class as a shadow (its CUDA branch, without a GPU) and print what it holds beside the plan"
    command.add_argument("--dry-run", action="store_true", help=text)
    text = "with --dry-run: classes (first, middle and last stage of each role) or numbers such as 0,8; default: classes"
    command.add_argument("--ranks", default="classes", metavar="N,M", help=text)
    text = "with --dry-run: run all ranks of each role together as well, on uneven data, and say whether their collectives fit"
    command.add_argument("--agree", action="store_true", help=text)
    text = "with --dry-run: exit code 1 where the plan is too small by more; default: 5"
    command.add_argument("--tolerance", type=float, default=5.0, metavar="PERCENT", help=text)
    text = "with --dry-run: write a page of each rank's peak by owner and by line, plan beside dry run"
    command.add_argument("--html", metavar="FILE", help=text)
    command.add_argument("--json", action="store_true", help="print JSON, in bytes")
    command.set_defaults(run=run)


def _add_plan_step(commands: argparse._SubParsersAction, run: Runner) -> None:
    text = "memory, weight sync, pipeline and estimated seconds of a step of `megarl train` on stated GPUs; --search: layouts for them"
    command = commands.add_parser(PLAN_STEP, help=text, description=text)
    command.add_argument("recipe", help=f"of `megarl train`: {RECIPE}")
    command.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
    )
    command.add_argument(
        "--hardware",
        default="H100",
        metavar="NAME",
        help="H100, H200, H20, A100 (of 80 GB) or B200; default: H100",
    )
    text = "instead of a guess that seconds rest on, such as matmul=0.4; the report prints them all"
    command.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "of a GPU; default: the hardware's"
    command.add_argument("--gpu-memory", type=float, metavar="GIB", help=text)
    text = "of it that is not planned owner by owner: CUDA, NCCL, fragments; default: by what is on a GPU"
    command.add_argument("--reserve", type=float, metavar="GIB", help=text)
    text = (
        "estimate the weight sync instead of planning every copy, which takes a minute for the largest models"
    )
    command.add_argument("--without-sync", action="store_true", help=text)
    text = "look for the layouts with the fastest steps on the recipe's devices, and print the keys for each"
    command.add_argument("--search", action="store_true", help=text)
    command.add_argument("--top", type=int, default=5, metavar="N", help="with --search; default: 5")
    command.add_argument(
        "--html", metavar="FILE", help="write the report as a page, with a picture of the GPUs"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)
