"""The options of `megarl launch`: one for each key that the kind of cluster reads."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from megarl.config.schema.launch import KubeRayConfig, LaunchConfig, SkyPilotConfig, SlurmConfig
from megarl.config.schema.options import field_types, members, section_type

TARGETS = {
    "local": ("on this machine, as `megarl train` would", None),
    "slurm": ("as a job of Slurm's, by sbatch", SlurmConfig),
    "kuberay": ("on Kubernetes with the KubeRay operator, by kubectl", KubeRayConfig),
    "skypilot": ("on clouds or Kubernetes as a task of SkyPilot's, by sky", SkyPilotConfig),
}


def add_launch(
    commands: argparse._SubParsersAction,
    recipes: Sequence[str],
    run: Callable[[argparse.Namespace], int | None],
) -> None:
    """Add `megarl launch TARGET RECIPE`; what is given of LaunchConfig's keys is in `options.launch`, by dotted key.

    Args:
        recipes: the commands that run a recipe, the default first.
    """
    text = "run a recipe on this machine, on Slurm, on Kubernetes or by SkyPilot (docs/launch.md)"
    targets = commands.add_parser("launch", help=text, description=text).add_subparsers(
        required=True, metavar="where", dest="target"
    )
    for name, (text, schema) in TARGETS.items():
        target = targets.add_parser(name, help=text, description=f"Run a recipe {text}.")
        target.add_argument("recipe", help="YAML file, or recipe:NAME (see `megarl recipes`)")
        target.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="over the recipe's values"
        )
        target.add_argument(
            "--command",
            choices=recipes,
            default=recipes[0],
            help=f"whose recipe it is (default: {recipes[0]})",
        )
        target.add_argument("--job", metavar="FILE", help="YAML file of the options below, as keys")
        target.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
        _add_keys(target, LaunchConfig, "")
        if schema is not None:
            _add_keys(target, schema, f"{name}.")
        target.set_defaults(run=run, launch=None)


def _add_keys(parser: argparse.ArgumentParser, schema: type, prefix: str) -> None:
    for member in fields(schema):
        kind = field_types(schema)[member.name]
        if section_type(kind) is not None:
            continue
        kinds = members(kind)
        help = member.metadata["help"].replace("%", "%%")
        options: dict[str, Any] = {"dest": "launch", "action": _Given, "help": help}
        if bool in kinds:
            options |= {"nargs": 0, "const": True}
        else:
            options |= {
                "type": int if int in kinds else str,
                "metavar": "N" if int in kinds else "TEXT",
                "choices": member.metadata["choices"],
                "const": any(typing.get_origin(one) is tuple for one in kinds),
            }
        action = parser.add_argument(f"--{member.name.replace('_', '-')}", **options)
        assert isinstance(action, _Given)
        action.key = f"{prefix}{member.name}"


class _Given(argparse.Action):
    """Notes what was given, by the dotted key `key`. const: a flag's value, or whether the option can be repeated."""

    key: str

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = dict(namespace.launch or {})
        if self.nargs == 0:
            given[self.key] = self.const
        else:
            given[self.key] = [*given.get(self.key, []), values] if self.const else values
        namespace.launch = given
