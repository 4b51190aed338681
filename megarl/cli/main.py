"""The `megarl` command: `train`, `sft`, `rm`, `dpo`, `eval`, `doctor`, `replay`, `config`, `make-task`, `verify`, `serve`, `convert`,
`plan`, `launch`, `report`, `recipes`, `requirements`.

A mistake of the user's ends in one message without a traceback and exit code 2; a run that fails in one that
names the process, with exit code 1. A run that has saved its state and is to be started again ends with 75.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TypeVar

from megarl import __version__
from megarl.cli.arguments import PLAN_MEMORY, PLAN_STEP, PLAN_SYNC, PLANS, Runner, help_of, make_parser
from megarl.config import EvalConfig, TrainConfig, TuningConfig, check_config, resolve
from megarl.config.loading import SCHEMAS, TRAINING, load_with_origins
from megarl.config.loading.hub import fetch_models
from megarl.config.problems import aliases, did_you_mean, flag_advice
from megarl.config.show import changed_keys, notes, reference, resolved_keys, said_here, yaml_text
from megarl.trainer.run.preemption import ending_at_once
from megarl.util.packages import require, requirements
from megarl.util.plugins import load_plugins
from megarl.util.signals import JOB_SIGNALS

C = TypeVar("C", bound=TrainConfig | TuningConfig | EvalConfig)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in {"plan", *RUNNERS}:
        advice = aliases()["commands"].get(arguments[0])
        guess = did_you_mean(arguments[0], ["plan", *RUNNERS]) or f"; there are {', '.join(RUNNERS)}"
        hint = guess if advice is None else f": {advice}"
        print(f"error: megarl has no command {arguments[0]!r}{hint}", file=sys.stderr)
        return 2
    if arguments[:1] == ["plan"]:
        words = [command.removeprefix("plan ") for command in PLANS]
        word = arguments[1] if len(arguments) > 1 else ""
        if word in ("-h", "--help"):
            print(help_of(PLANS))
            return 0
        if word in words:
            arguments[:2] = [f"plan {word}"]
        elif word and (Path(word).exists() or not word.isalpha()):
            arguments[0] = PLAN_SYNC  # a recipe or options, without a command
        else:
            hint = did_you_mean(word, words) or f"; there are {', '.join(words)}"
            print(f"error: megarl plan has no command {word!r}{hint}", file=sys.stderr)
            return 2
    parser = make_parser(__version__, RUNNERS)
    options, unknown = parser.parse_known_args(arguments)
    if "overrides" in options and all("=" in text and not text.startswith("-") for text in unknown):
        options.overrides, unknown = [*options.overrides, *unknown], []  # argparse takes none after options
    if unknown:
        advice = [text for text in map(flag_advice, unknown) if text is not None]
        parser.error("\n  ".join([f"unrecognized arguments: {' '.join(unknown)}", *advice]))
    try:
        local = arguments[:2] == ["launch", "local"]
        with _told_to_end(options.command if local else arguments[0]):
            code = options.run(options) or 0
            sys.stdout.flush()
            return code
    except BrokenPipeError as error:
        if not _reader_is_gone():
            print(f"error: {_plain_words(error)}", file=sys.stderr)
            return 1
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, RuntimeError) as error:
        print(f"error: {_plain_words(error)}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _told_to_end(command: str) -> AbstractContextManager[None]:
    """The end of a run that is told to end, with the exit code that asks for another; a training loop has handlers of its own."""
    if command in TRAINING:
        return ending_at_once()
    return ending_at_once("ending, to be started again") if command in SCHEMAS else nullcontext()


def _reader_is_gone() -> bool:
    """Whether the reader of the output has ended, as in `megarl config ... | head`; later output is then discarded."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    gone = any(events & select.POLLERR for _, events in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own output at its end
    return gone


def _write_out() -> None:
    """Flush the output if its reader still exists; else Python would print an error at its end."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _reader_is_gone()


def _plain_words(error: Exception) -> str:
    """The message of an error; of a file's error such as "/data/run/metrics.jsonl: No space left on device"."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


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
    from megarl.doctor.preflight import check_environment, preflight
    from megarl.plan.micro_batches import with_chosen_size

    config, origins = _read(schema, options)
    preflight(config)
    remarks = notes(config, said_here(origins, options.recipe))
    config, chosen = with_chosen_size(config)
    for note in (*remarks, *chosen):
        print(f"note: {note}")
    require(["megatron-core"] if isinstance(config, TuningConfig) else ["megatron-core", "sglang"])
    if not isinstance(config, TuningConfig):
        load_plugins(config.plugins)
        check_environment(config)
    return fetch_models(resolve(config))


def _config(options: argparse.Namespace) -> None:
    if options.reference:
        print(reference(), end="")
        return
    if options.recipe is None:
        raise ValueError("megarl config needs a recipe, key=value, or --reference")
    config, origins = _read(SCHEMAS[options.command], options)
    keys = changed_keys(config, origins) if options.changed else resolved_keys(config, origins)
    remarks = notes(config, said_here(origins, options.recipe))
    if options.json:
        values = {key: {"value": value, "from": origin} for key, (value, origin) in keys.items()}
        print(json.dumps({"keys": values, "notes": remarks}, indent=2))
    else:
        print(yaml_text(keys), end="")
        for remark in remarks:
            print(f"# note: {remark}")
    check_config(config)  # last, so that wrong keys can be looked up in the output


# Commands import their modules when they run, so that `megarl --help` and a mistyped key are answered at once.


def _train(options: argparse.Namespace) -> None:
    config = _configured(TrainConfig, options)
    if config.trainer.train_only is not None:
        _run_with_restarts("offline", config, "learn_only")
        return
    if not config.trainer.rollout_only:
        _run_with_restarts("ppo", config)
        return
    from megarl.trainer.run.cluster_setup import cluster_setup_of

    with cluster_setup_of(config) as cluster_setup:  # it has no checkpoint from which it could go on
        from megarl.trainer.loops.offline import generate_only

        generate_only(config, cluster_setup)


def _supervised(command: str) -> Runner:
    return lambda options: _run_with_restarts(command, _configured(SCHEMAS[command], options))


def _passed_to(module: str, function: str = "run") -> Runner:
    return lambda options: getattr(import_module(module), function)(options)


def _report(options: argparse.Namespace) -> None:
    from megarl.plan.run_floors import run_floors
    from megarl.report.page import run

    run(options, lambda found: run_floors(found, options.hardware))


def _run_with_restarts(module: str, config: TrainConfig | TuningConfig, function: str = "train") -> None:
    """Run a function of a module of trainer/loops, with restarts."""
    from megarl.trainer.run.cluster_setup import cluster_setup_of

    with cluster_setup_of(config) as cluster_setup:  # fork servers import while this process does
        from megarl.trainer.run.failures import with_restarts

        train = getattr(import_module(f"megarl.trainer.loops.{module}"), function)
        with_restarts(config, train, cluster_setup)


def _eval(options: argparse.Namespace) -> None:
    config = _configured(EvalConfig, options)
    from megarl.trainer.run.cluster_setup import cluster_setup_of

    with cluster_setup_of(config) as cluster_setup:
        from megarl.trainer.loops.evaluate import evaluate, print_scores

        print_scores(evaluate(config, cluster_setup), config.trainer.default_local_dir)


def _make_task(options: argparse.Namespace) -> None:
    from megarl.util.packages import example

    example("make_task").run(options)


def _verify(options: argparse.Namespace) -> None:
    from megarl.trainer.run.export import verify_greedy

    verify_greedy(options.model, options.trajectories, options.max_samples)


def _plan_memory(options: argparse.Namespace) -> int | None:
    if options.dry_run:
        from megarl.shadow.dry_run import run as dry_run

        return dry_run(options)
    if options.agree:
        raise ValueError("--agree runs ranks as --dry-run does: give --dry-run --agree")
    from megarl.plan.commands import run_memory

    return run_memory(options)


def _doctor(options: argparse.Namespace) -> int:
    if options.gpu:
        from megarl.gpu_test.command import run

        return run(options)
    if options.recipe == "model":
        if len(options.overrides) != 1:
            raise ValueError(f"megarl doctor model takes one folder, found {len(options.overrides)}")
        from megarl.doctor.doctor import print_findings
        from megarl.doctor.model import examine_model

        return print_findings(examine_model(options.overrides[0]))
    config = None if options.recipe is None else _read(TrainConfig, options)[0]
    from megarl.doctor.doctor import examine, examine_here, print_findings

    return print_findings(examine_here() if config is None else examine(config))


def _replay(options: argparse.Namespace) -> None:
    from megarl.trainer.loops.offline import Request, replay

    paths = {
        name: None if getattr(options, name) is None else Path(getattr(options, name))
        for name in ("trajectories", "checkpoint", "out")
    }
    replay(Request(Path(options.folder), options.step, options.overrides, **paths))


def _launch(options: argparse.Namespace) -> int:
    from megarl.launch.command import launch

    return launch(options, RUNNERS)


def _recipes(options: argparse.Namespace) -> None:
    """Print the list of the recipes that come with megarl, or the file of `options.name`.

    Raises:
        ValueError: there is no recipe of that name; names the nearest.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from megarl.config.loading.recipes import PREFIX, recipe_path, recipes

    if options.name is None:
        table = Table("megarl", "recipe", "what", box=SIMPLE_HEAD, pad_edge=False)
        table.columns[1].no_wrap = True
        for recipe in recipes():
            table.add_row(recipe.command, f"{PREFIX}{recipe.name}", escape(recipe.text))
        Console().print(table)
        return
    path = recipe_path(f"{PREFIX}{options.name.removeprefix(PREFIX)}")
    file = path / "config.json" if path.is_dir() else path
    print(file.read_text(encoding="utf-8"), end="")


RUNNERS: dict[str, Runner] = {
    "train": _train,
    "sft": _supervised("sft"),
    "rm": _supervised("rm"),
    "dpo": _supervised("dpo"),
    "eval": _eval,
    "config": _config,
    "make-task": _make_task,
    "verify": _verify,
    "serve": _passed_to("megarl.gateway.serve"),
    "convert": _passed_to("megarl.checkpoints.convert.command"),
    PLAN_SYNC: _passed_to("megarl.plan.commands", "run_sync"),
    PLAN_MEMORY: _plan_memory,
    PLAN_STEP: _passed_to("megarl.plan.commands", "run_step"),
    "doctor": _doctor,
    "replay": _replay,
    "report": _report,
    "launch": _launch,
    "recipes": _recipes,
    "requirements": lambda options: print(requirements(options.name)),
}


def program() -> NoReturn:
    """The command `megarl`: `main`, and the process ends with its exit code whatever signals come on the way out."""
    try:
        try:
            sys.exit(main())
        finally:
            _write_out()
            gc.freeze()  # or Python's last collection looks at all objects of all modules, which takes seconds
    finally:  # Python takes a second to end, in which a job's signal would turn success into failure
        for number in JOB_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    program()
