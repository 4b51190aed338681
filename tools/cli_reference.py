"""The page docs/cli.md: every command of `megarl`, from the argument parser.

    python tools/cli_reference.py > docs/cli.md

The page does not depend on the version of Python: argparse's own help texts, whose form changes between versions, are not used.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator

from megarl.cli.arguments import make_parser

HEAD = """\
# Command line

Made by `python tools/cli_reference.py > docs/cli.md` from the argument parser; not edited by hand. `megarl COMMAND --help` prints
the same. Keys of recipes are in [config.md](config.md).
"""


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, one-line help and parser of each command, in the order of the parser; commands of commands after their own."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for entry in action._choices_actions:
                found = action.choices[entry.dest]
                yield found.prog, entry.help or "", found
                yield from commands(found)


def parser() -> argparse.ArgumentParser:
    return make_parser("", defaultdict(lambda: lambda options: 0))


def page() -> str:
    megarl = parser()
    found = list(commands(megarl))
    lines = [HEAD, "| command | what it does |", "|---|---|"]
    lines += [f"| [`{name}`](#{_anchor(name)}) | {_cell(text)} |" for name, text, _ in found]
    lines += ["", "```text", (megarl.epilog or "").strip(), "```"]
    for name, _, command in found:
        lines += ["", *_section(name, command)]
    return "\n".join(lines) + "\n"


def _section(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    yield from (f"## `{name}`", "", _cell(command.description or ""))
    actions = [action for action in command._actions if not isinstance(action, argparse._HelpAction)]
    nested = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    if nested:
        targets = ", ".join(f"`{target}`" for target in nested[0].choices)
        yield from ("", f"Followed by one of {targets}, each with options of its own.")
        return
    positional = [action for action in actions if not action.option_strings]
    optional = [action for action in actions if action.option_strings]
    usage = " ".join([name, *map(_place, positional), *(["[options]"] if optional else [])])
    yield from ("", "```text", usage, "```")
    for head, part in (("argument", positional), ("option", optional)):
        if part:
            yield from ("", f"| {head} | values | default | meaning |", "|---|---|---|---|")
            yield from (_row(action) for action in part)
    if command.epilog:
        yield from ("", "```text", command.epilog.strip(), "```")


def _place(action: argparse.Action) -> str:
    shown = str(action.metavar or action.dest)
    return {"?": f"[{shown}]", "*": f"[{shown} ...]", "+": f"{shown} [{shown} ...]"}.get(action.nargs, shown)


def _row(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    values = ""
    if action.choices is not None:
        values = ", ".join(f"`{choice}`" for choice in action.choices)
    elif action.option_strings and action.nargs != 0:
        kind = {int: "N", float: "NUMBER"}.get(action.type, action.dest.upper())
        values = f"`{action.metavar or kind}`"
    if action.required and action.option_strings:
        default = "required"
    else:
        default = "" if action.default in (None, False, [], argparse.SUPPRESS) else f"`{action.default}`"
    text = (action.help or "").replace("%%", "%")
    return f"| `{name}` | {values} | {default} | {_cell(text)} |"


def _cell(text: str) -> str:
    """One line of Markdown, with nothing in it that ends a cell or opens a tag."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", "\\|"))
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in parts)


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


if __name__ == "__main__":
    print(page(), end="")
