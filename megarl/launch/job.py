"""A job: a recipe and the machines that it runs on, checked against each other; and files of environment variables.

Guarantee: a job has the nodes and the devices that its recipe is made for, whichever of the two gives their number.
"""

import posixpath
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from megarl.config import EvalConfig, TrainConfig, TuningConfig, resolve
from megarl.config.checks.layout import engine_problems, layout_problems, pool_problems, update_problems
from megarl.config.checks.values import value_problems
from megarl.config.loading import SCHEMAS, load_config, load_with_origins
from megarl.config.loading.document import (
    Entry,
    Tree,
    YamlDumper,
    merge,
    parse_override,
    plain,
    read_file,
)
from megarl.config.loading.recipes import recipe_path
from megarl.config.problems import raise_if_any
from megarl.config.schema.launch import LaunchConfig

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>\d\d):(?P<seconds>\d\d)|(?P<only>\d+)")
# Valid as a Kubernetes label and as a Slurm job name; at most 47 characters, since KubeRay appends to them and a label has 63.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
_SIZES = {"nodes": "nnodes", "gpus_per_node": "n_gpus_per_node"}
_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")


@dataclass(frozen=True)
class Job:
    """A command of megarl, its recipe, and the machines that run it.

    Attributes:
        command: megarl's command: train, sft, rm, dpo or eval.
        recipe: the recipe's file; `recipe:NAME` is a file of this installation of megarl.
        overrides: overrides of the user and of the launch options.
        run_folder: trainer.default_local_dir as the recipe has it.
        checkpoint_url: trainer.checkpoint_url, from which another start can continue even if the run folder is lost.
        saves: whether the run writes checkpoints from which another start continues.
        resume_mode: trainer.resume_mode, by which it does.
        launch: with name, nodes and gpus_per_node filled in.
    """

    command: str
    recipe: Path
    overrides: tuple[str, ...]
    run_folder: str
    checkpoint_url: str | None
    saves: bool
    resume_mode: str
    launch: LaunchConfig

    @property
    def nodes(self) -> int:
        assert self.launch.nodes is not None
        return self.launch.nodes

    @property
    def devices(self) -> int:
        """Devices of each node."""
        assert self.launch.gpus_per_node is not None
        return self.launch.gpus_per_node

    @property
    def seconds(self) -> int | None:
        """The time limit."""
        return None if self.launch.time is None else seconds_of(self.launch.time)

    def run_folder_in(self, work_dir: str) -> PurePosixPath:
        """The run folder on the machines, where relative paths count from `work_dir`; without `..`, which may lead out of a volume."""
        return PurePosixPath(posixpath.normpath(PurePosixPath(work_dir) / self.run_folder))

    def recipe_text(self) -> str:
        """The recipe as one YAML document, including its bases and the overrides."""
        tree = read_file(self.recipe)
        for override in self.overrides:
            tree = merge(tree, parse_override(override))
        return yaml.dump(
            _as_written(tree), Dumper=_RecipeDumper, sort_keys=False, allow_unicode=True, width=110
        )


class _Number(str):
    """The text of a number, which keys that are texts keep as it is: trainer.experiment_name=1.10 is another run than 1.1."""


class _RecipeDumper(YamlDumper):
    """Writes numbers as their texts, without quotes."""


def _number(dumper: _RecipeDumper, text: _Number) -> yaml.ScalarNode:
    return dumper.represent_scalar(dumper.resolve(yaml.ScalarNode, text, (True, False)), text)


_RecipeDumper.add_representer(_Number, _number)


def _as_written(tree: Tree | Entry) -> Any:
    """`plain(tree)`, with numbers as `_Number`."""
    if isinstance(tree, dict):
        return {name: _as_written(value) for name, value in tree.items()}
    if isinstance(tree.value, list):
        return [_as_written(item) for item in tree.value]
    number = isinstance(tree.value, int | float) and not isinstance(tree.value, bool)
    return _Number(tree.text) if number and tree.text else plain(tree)


class _BlockTextDumper(YamlDumper):
    """Writes texts of several lines as block scalars, line by line."""


def _block_text(dumper: _BlockTextDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_BlockTextDumper.add_representer(str, _block_text)


def yaml_text(*documents: dict[str, Any]) -> str:
    """Documents as YAML, their keys in the given order."""
    options = {"sort_keys": False, "allow_unicode": True, "explicit_start": True, "width": 110}
    return yaml.dump_all(documents, Dumper=_BlockTextDumper, **options)


def matched(key: str, value: str, pattern: str | re.Pattern[str], expected: str) -> re.Match[str]:
    """The match of a whole value. Raises ValueError where there is none: names the key and says in words what is `expected`."""
    found = re.fullmatch(pattern, value)
    if found is None:
        raise ValueError(f"{key}: expected {expected}, found {value!r}")
    return found


def check_image(launch: LaunchConfig) -> None:
    """Raises ValueError where `image` is not the name of an image."""
    if launch.image is not None:
        matched("image", launch.image, r"\S*", "the name of a container image")


def make_job(
    command: str, recipe: str, overrides: list[str], job_file: str | None, options: list[str]
) -> Job:
    """The job that a recipe, a job's file and the command's options describe.

    Args:
        overrides: overrides of the recipe, `key=value` each.
        job_file: YAML with keys of LaunchConfig; None: no file.
        options: `key=value` each with keys of LaunchConfig; they take precedence over the file.

    Raises:
        ValueError: the recipe or the description is not valid, or they contradict each other; names both.
    """
    launch = load_config(LaunchConfig, job_file, options)
    config: Any
    config, origins = load_with_origins(SCHEMAS[command], recipe, overrides)
    overrides = list(overrides)
    # The job's file and the recipe may both give a size. A size that only the job gives becomes an override of the recipe.
    sizes = {}
    for name, key in _SIZES.items():
        given, in_recipe = getattr(launch, name), getattr(config.trainer, key)
        origin = origins.get(f"trainer.{key}")
        if given is not None and given != in_recipe and origin is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} {given} and trainer.{key}={in_recipe} ({origin}) contradict each other: leave {flag} out, or say "
                f"trainer.{key}={given} behind the recipe"
            )
        sizes[name] = in_recipe if given is None else given
        if sizes[name] != in_recipe:
            overrides.append(f"trainer.{key}={given}")
    config = load_config(SCHEMAS[command], recipe, overrides)
    file = recipe_path(recipe)
    # Both are complete now, and are checked together.
    launch = replace(launch, **sizes, name=launch.name or name_of(file.name))
    raise_if_any("recipe", [*_layout_problems(config)])
    raise_if_any("job", [*_job_problems(launch, config)])
    folder: str | None = resolve(config).trainer.default_local_dir
    assert folder is not None
    saves, url = True, None
    mode = "auto"
    if not isinstance(config, EvalConfig):
        url = config.trainer.checkpoint_url
        mode = config.trainer.resume_mode
        saves = config.trainer.save_freq > 0 or config.trainer.save_minutes is not None
    return Job(command, file, tuple(overrides), folder, url, saves, mode, launch)


def name_of(recipe: str) -> str:
    """A job's name, from its recipe's name: "qwen2-5-72b-grpo" for recipes/qwen2.5_72B_grpo.yaml."""
    name = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:47].rstrip("-")


def seconds_of(time: str) -> int:
    """Seconds of a duration: minutes alone, HH:MM:SS or D-HH:MM:SS, as Slurm has them.

    Raises:
        ValueError: it is none of these, or 0.
    """
    found = _TIME.fullmatch(time)
    if found is None:
        raise ValueError(f"time: expected minutes, HH:MM:SS or D-HH:MM:SS, found {time!r}")
    parts = {name: int(value or 0) for name, value in found.groupdict().items()}
    hours = parts["days"] * 24 + parts["hours"]
    seconds = (hours * 60 + parts["minutes"] + parts["only"]) * 60 + parts["seconds"]
    if seconds == 0:
        raise ValueError(f"time: {time!r} is no time at all")
    return seconds


def read_variables(path: str | Path) -> dict[str, str]:
    """The variables of a file with lines `NAME=value`, without quotes or expansion; empty lines and lines that begin with # are skipped.

    Raises:
        ValueError: no such file; or, all in one message: lines that are not `NAME=value`, values in quotes, which would become part
            of the value, names that occur twice.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"env_file: {path} does not exist (working directory {Path.cwd()})")
    variables: dict[str, str] = {}
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            problems.append(f"line {number}: expected NAME=value, found {line!r}")
            continue
        name, value = found.groups()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            problems.append(f"line {number}: {name}: the quotes would be part of the value; leave them out")
        elif name in variables:
            problems.append(f"line {number}: {name} stands twice")
        variables[name] = value
    raise_if_any(f"env_file {path}", problems)
    return variables


def _layout_problems(config: TrainConfig | TuningConfig | EvalConfig) -> list[str]:
    """Problems with values and layouts. Files and models are not checked: they are on the machines that run the job."""
    problems, written = list(value_problems(config)), config
    config = resolve(written)
    if isinstance(config, TrainConfig) and isinstance(written, TrainConfig):
        problems += [*pool_problems(config, written), *layout_problems(config), *update_problems(config)]
    elif isinstance(config, TuningConfig):
        problems += [*layout_problems(config), *update_problems(config)]
    if isinstance(config, TrainConfig | EvalConfig):
        problems += engine_problems(config)
    return problems


def _job_problems(launch: LaunchConfig, config: Any) -> list[str]:
    problems = list(value_problems(launch))
    assert launch.name is not None
    if not _NAME.fullmatch(launch.name):
        problems.append(
            f"name={launch.name}: expected 1 to 47 lower-case letters, digits and hyphens, a letter first, no hyphen last"
        )
    if launch.time is not None:
        try:
            seconds_of(launch.time)
        except ValueError as error:
            problems.append(str(error))
    if config.trainer.ray_address is not None:
        problems.append(
            f"trainer.ray_address={config.trainer.ray_address}: the job starts a cluster of its own; leave it out"
        )
    return problems
