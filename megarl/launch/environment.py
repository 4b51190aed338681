"""Files of environment variables: lines `NAME=value`, taken as they are, without quotes or expansion."""

import re
from pathlib import Path

from megarl.config.loading.problems import raise_if_any

_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def read_variables(path: str | Path) -> dict[str, str]:
    """The variables of a file; empty lines and lines that begin with # are left out.

    Raises:
        ValueError: no such file, or, all in one message: lines that are no `NAME=value`, values in quotes, which would be part
            of them, names that stand twice.
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
