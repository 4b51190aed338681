"""The manifests in launch/ and the commands that make them."""

import shlex
from pathlib import Path


def examples(folder: Path) -> dict[str, list[str]]:
    """File of a folder with a `make_examples.sh` -> the arguments of the command that makes it."""
    text = (folder / "make_examples.sh").read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("megarl ")]
    return {Path(command[-1]).name: command[1:-2] for command in commands}
