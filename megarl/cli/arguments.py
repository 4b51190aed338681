"""The arguments of the `megarl` command, and their help texts."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megarl.config.schema.launch import add_launch
from megarl.config.schema.models import DTYPES

PLANS = PLAN_SYNC, PLAN_MEMORY, PLAN_STEP = "plan sync", "plan memory", "plan step"  # commands of two words
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
    "doctor": """examples:
  megarl doctor recipe:quickstart_ppo
  megarl doctor model FOLDER   whether a Hugging Face folder's model can be trained, and by what not
  megarl doctor --gpu
""",
}
KEYS = """
keys: docs/config.md, or `megarl config --reference`; `megarl config RECIPE --changed` prints those that a recipe sets
"""

RECIPE = "YAML file, or recipe:NAME (see `megarl recipes`), or the first key=value, without a file"
RECIPES = ("train", "sft", "rm", "dpo", "eval")

Runner = Callable[[argparse.Namespace], int | None]
"""Runs a command; returns its exit code, None for 0."""


class _Command(argparse.ArgumentParser):
    """The parser of a command."""

    def recipe(self, text: str = RECIPE, nargs: str | None = None) -> None:
        """Add arguments for the recipe and for keys that override its own."""
        self.add_argument("recipe", nargs=nargs, help=text)
        self.overrides("the recipe's values")

    def overrides(self, values: str) -> None:
        self.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=f"over {values}")

    def flag(self, name: str, text: str) -> None:
        self.add_argument(name, action="store_true", help=text)

    def option(self, name: str, metavar: str | None, text: str | None, **more: Any) -> None:
        self.add_argument(name, metavar=metavar, help=text, **more)


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
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Command)
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
        command.recipe(nargs="?" if name == "doctor" else None)  # without one it looks at this machine
        if name == "doctor":
            _doctor(command)
        command.set_defaults(run=runners[name])
    for name, (text, add_options) in _COMMANDS.items():
        if name == "recipes":
            add_launch(commands, RECIPES, runners["launch"])
        command = commands.add_parser(name, help=text, description=text)
        add_options(command)
        command.set_defaults(run=runners[name])
    return parser


def _doctor(command: _Command) -> None:
    command.flag("--gpu", "test this machine's GPUs in steps (docs/gpu.md); takes no recipe")
    command.option("--steps", "NAME,...", "of --gpu: these alone")
    command.option("--out", "FOLDER", "of --gpu: for the record [benchmarks/results/gpu]")
    command.option("--limit", "SECONDS", "of --gpu: most a step takes [480]", type=float, default=480.0)


def _replay(command: _Command) -> None:
    command.add_argument("folder", help="the run folder")
    command.overrides("the run's own config.yaml")
    command.option("--step", None, "counted from 1", type=int, required=True)
    command.option("--trajectories", "FILE", "of the step (default: the run's own rollouts/step-<n>.parquet)")
    text = "where to begin (default: the newest good one before the step; steps in between are replayed, too)"
    command.option("--checkpoint", "FOLDER", text)
    command.option("--out", "FOLDER", "write the policy after the step there, as a Hugging Face model")


def _report(command: _Command) -> None:
    text = "a run folder, also of a run that is still going"
    command.add_argument("folders", nargs="+", metavar="folder", help=text)
    text = "default: report.html in the run folder, of several runs in the current folder"
    command.option("--output", "FILE", text)
    text = "the GPUs of the runs, as of `megarl plan step`, with whose least seconds phases are compared (default: those that each run has recorded)"
    command.option("--hardware", "NAME", text)


def _config(command: _Command) -> None:
    command.recipe(nargs="?")
    text = "whose recipe it is (default: train)"
    command.option("--command", None, text, choices=RECIPES, default="train")
    command.flag("--json", "print JSON")
    command.flag("--changed", "print only what was given and is not the default")
    command.flag("--reference", "print the page docs/config.md: all keys of all commands")


def _make_task(command: _Command) -> None:
    command.add_argument("out", help="folder; gets model/ and data/")
    errors = "part of the sft answers that are one too many; --preferences: that lack each of three qualities"
    for name, default, text in (
        ("--seed", 1, None),
        ("--max-operand", 6, "numbers in the problems are 1 to this"),
        ("--teacher-errors", 0.7, errors),
        ("--num-sft", 4000, "problems for supervised fine-tuning"),
        ("--num-train", 6000, "problems for PPO"),
        ("--num-test", 300, "held-out problems"),
        ("--hidden-size", 128, None),
        ("--num-layers", 2, None),
        (
            "--family",
            "qwen2",
            "of the model (docs/models.md), by its model_type: the demo with experts, latent attention and others",
        ),
    ):
        command.option(name, None, text, type=type(default), default=default)
    command.flag("--calculator", "the sft rows get chats with a calculator, too (recipe:calculator_cpu)")
    text = "demonstrations, ranked answers and plain texts instead (examples/three_stages.py)"
    command.flag("--preferences", text)
    for name, default, text in (
        ("--num-texts", 4000, "plain texts"),
        ("--num-rankings", 4000, "problems whose answers are ranked"),
        ("--label-noise", 0.1, "part of the rankings in which the best answer is not the first"),
    ):
        command.option(name, None, f"--preferences: {text}", type=type(default), default=default)


def _verify(command: _Command) -> None:
    command.add_argument("model", help="Hugging Face folder, such as the one that `megarl train` exports")
    command.add_argument("trajectories", help="trajectories.parquet of `megarl eval` with temperature 0")
    command.option("--max-samples", None, None, type=int, default=64)


def _serve(command: _Command) -> None:
    command.add_argument("model", help="Hugging Face folder")
    command.option("--name", "NAME,...", "that requests call it by (default: the folder's)")
    command.option("--players", "NAME,...", "further names, of a game's players (default: none)")
    command.option(
        "--host", "ADDRESS", "of the interface to listen on; default: 127.0.0.1", default="127.0.0.1"
    )
    command.option("--port", "N", "0: any that is free; default: 8000", type=int, default=8000)
    command.option(
        "--key-file", "FILE", "whose text is the key of requests (default: a new one, which is printed)"
    )
    command.option(
        "--tool-parser",
        "NAME",
        "SGLang's, that reads the model's calls of tools, such as qwen25 (default: none)",
    )
    command.option(
        "--reasoning-parser", "NAME", "SGLang's, that reads its reasoning, such as qwen3 (default: none)"
    )
    command.option("--device", None, "default: cuda where there is a GPU", choices=("cpu", "cuda"))
    command.option("--tensor-parallel-size", "N", "devices of the engine; default: 1", type=int, default=1)
    dtypes = ("float32", "bfloat16", "float16")
    command.option("--dtype", None, "default: float32 on a CPU, else bfloat16", choices=dtypes)
    command.option(
        "--context-length", "N", "most tokens of prompt and answer (default: the model's)", type=int
    )
    command.option(
        "--max-new-tokens", "N", "most tokens of an answer (default: as many as there is room for)", type=int
    )
    command.option(
        "--requests-per-minute",
        "N",
        "most requests of a session, and of all that belong to none (default: any number)",
        type=int,
    )


def _convert(command: _Command) -> None:
    text = "a checkpoint of either kind; Megatron's may be of any parallel layout"
    command.add_argument("source", help=text)
    command.add_argument("target", help="the folder to write; with --verify the checkpoint to compare with")
    command.flag("--verify", "compare tensor by tensor; exit code 1: they differ")
    text = "folder of adapters in PEFT's format to merge into a Hugging Face folder"
    command.option("--merge", "ADAPTER", text)
    text = "default: what the source is not; with --merge hf; peft: the adapters of a Megatron checkpoint"
    command.option("--to", None, text, choices=("hf", "megatron", "peft"))
    dtypes = ("float32", "bfloat16", "float16")
    command.option("--dtype", None, "default: each tensor's own", choices=dtypes)
    command.option("--shard-size", None, "size of a file, such as 500MiB (default: 4GiB)", default="4GiB")
    text = "multi-token prediction layers (default: keep)"
    command.option("--mtp", None, text, choices=("keep", "drop"), default="keep")
    command.option("--hf", "FOLDER", "config and tokenizer for a Megatron checkpoint without an hf/ folder")


def _plan_sync(command: _Command) -> None:
    text = "of `megarl train`: YAML file, or recipe:NAME; or --model, --train, --rollout, --devices"
    command.recipe(text, nargs="?")
    command.option("--model", "PATH", "Hugging Face folder, or its config.json, or recipe:models/NAME")
    command.option("--train", "SIZES", "such as tp8-pp16-ep8-first3-last2 (also vpp, cp, etp)")
    command.option("--rollout", "SIZES", "of an engine, such as tp32-ep32 (also dp, of attention)")
    command.option("--devices", "N", "of the training", type=int)
    command.option("--devices-per-node", "N", "default: 8", type=int, default=8)
    command.option("--engines", "N", "default: as many as the training's devices hold", type=int)
    command.flag("--separate", "the engines have devices of their own")
    command.option("--dtype", None, "that travels; default: the recipe's, or bfloat16", choices=DTYPES)
    command.flag("--fp8", "projections travel in float8, with their scales")
    command.option("--bucket-mb", "N", "in MiB; default: the recipe's, or 256", type=int)
    # By the makers' figures for H100 nodes: memory of 3.35 TB/s, read and written; NVLink 4, 900 GB/s for both
    # directions; a network card of 400 Gb/s for each GPU.
    for link, rate in (("local", 1675.0), ("intra", 450.0), ("inter", 50.0)):
        text = f"GB/s of a device in each direction; default: {rate:g}"
        command.option(f"--bandwidth-{link}", "RATE", text, type=float, default=rate)
    command.flag("--json", "print JSON")


def _plan_memory(command: _Command) -> None:
    command.recipe(f"of `megarl train`, `sft`, `rm` or `dpo`: {RECIPE}")
    trained = [name for name in RECIPES if name != "eval"]
    command.option("--command", None, "whose recipe it is, where its keys do not say", choices=trained)
    _gpu(command, "79 (as sold: 80 GB)", 79.0)
    command.flag("--fit", "find the fewest nodes, and a layout, on which it fits")
    command.flag("--without-engines", "leave the engines out, as if they had devices of their own")
    command.option("--max-nodes", "N", "with --fit; default: 32", type=int, default=32)
    text = "run a rank of each class as a shadow (its CUDA branch, without a GPU) and print what it holds beside the plan"
    command.flag("--dry-run", text)
    text = "with --dry-run: classes (first, middle and last stage of each role) or numbers such as 0,8; default: classes"
    command.option("--ranks", "N,M", text, default="classes")
    text = "with --dry-run: run all ranks of each role together as well, on uneven data, and say whether their collectives fit"
    command.flag("--agree", text)
    text = "with --dry-run: exit code 1 where the plan is too small by more; default: 5"
    command.option("--tolerance", "PERCENT", text, type=float, default=5.0)
    text = "with --dry-run: write a page of each rank's peak by owner and by line, plan beside dry run"
    command.option("--html", "FILE", text)
    command.flag("--json", "print JSON, in bytes")


def _plan_step(command: _Command) -> None:
    command.recipe(f"of `megarl train`: {RECIPE}")
    text = "H100, H200, H20, A100 (of 80 GB) or B200; default: H100"
    command.option("--hardware", "NAME", text, default="H100")
    text = "instead of a guess that seconds rest on, such as matmul=0.4; the report prints them all"
    command.option("--assume", "NAME=VALUE", text, action="append", default=[])
    _gpu(command, "the hardware's")
    text = (
        "estimate the weight sync instead of planning every copy, which takes a minute for the largest models"
    )
    command.flag("--without-sync", text)
    text = "look for the layouts with the fastest steps on the recipe's devices, and print the keys for each"
    command.flag("--search", text)
    command.option("--top", "N", "with --search; default: 5", type=int, default=5)
    command.option("--html", "FILE", "write the report as a page, with a picture of the GPUs")
    command.flag("--json", "print JSON")


def _gpu(command: _Command, memory: str, default: float | None = None) -> None:
    """Add options for a GPU's memory and the part of it that is left out of plans; `memory`: the default in words."""
    command.option("--gpu-memory", "GIB", f"of a GPU; default: {memory}", type=float, default=default)
    text = "of it that is not planned owner by owner: CUDA, NCCL, fragments; default: by what is on a GPU"
    command.option("--reserve", "GIB", text, type=float)


def _recipes(command: _Command) -> None:
    command.add_argument("name", nargs="?", help="of the one to print")


def _requirements(command: _Command) -> None:
    command.add_argument("name", choices=("cpu", "gpu"), help="of machines without GPUs, or with them")


_COMMANDS: dict[str, tuple[str, Callable[[_Command], None]]] = {
    "replay": (
        "train a step of a `megarl train` run once more, from its checkpoint and its trajectories, without engines or rewards, "
        "and print the numbers beside those that were logged",
        _replay,
    ),
    "report": (
        "write a run, or several on the same charts, as one HTML page: final numbers, curves, where the time goes, memory, weight "
        "syncs, trajectories, failures, configuration",
        _report,
    ),
    "config": (
        "print the resolved configuration: every key, its value, and where that comes from; start nothing",
        _config,
    ),
    "make-task": ("make a tiny random model and arithmetic word problems to try megarl with", _make_task),
    "verify": (
        "check that transformers gives the same greedy answers as an `megarl eval` run of the same model",
        _verify,
    ),
    "serve": (
        "serve a model by OpenAI's and Anthropic's APIs, as the agents of a run see it (docs/gateway.md)",
        _serve,
    ),
    "convert": (
        "convert between Hugging Face folders and Megatron distributed checkpoints, merge adapters into a model, or "
        "compare two checkpoints, or two folders of adapters",
        _convert,
    ),
    PLAN_SYNC: (
        "what a weight sync will move: bytes by link, buckets, seconds, beside gathering every full tensor",
        _plan_sync,
    ),
    PLAN_MEMORY: (
        "what a job will hold on each GPU in each phase of a step, term by term, and whether it fits",
        _plan_memory,
    ),
    PLAN_STEP: (
        "memory, weight sync, pipeline and estimated seconds of a step of `megarl train` on stated GPUs; --search: layouts for them",
        _plan_step,
    ),
    "recipes": (
        "list the recipes that come with megarl, or print one; every command takes one as recipe:NAME",
        _recipes,
    ),
    "requirements": (
        "print the path of a requirements file: cpu, for pip install --no-deps --ignore-requires-python -r; or gpu, pins",
        _requirements,
    ),
}
"""By command, in the order of the help text: one line about it, and the function that adds its options."""


def help_of(commands: Sequence[str]) -> str:
    """A line about each command."""
    return "\n".join(f"megarl {command}: {_COMMANDS[command][0]}" for command in commands)
