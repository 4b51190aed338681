"""How the configuration's errors read: all of them in one ValueError, with the nearest valid names; for keys, flags and commands of
other trainers with the ones to use instead (`aliases.yaml`).

An unknown key that aliases.yaml knows gets its advice in place of a guess at its spelling.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from megarl.util.yaml_loader import safe_load

NUM_SUGGESTIONS = 3
ALIKE = 0.7  # least likeness of two keys' last parts, where one key may have been meant by the other


@cache
def aliases() -> dict[str, Any]:
    """aliases.yaml: its sections `keys` (with `parts` filled in), `flags`, `commands` and `values`."""
    table = safe_load(Path(__file__).with_name("aliases.yaml").read_text(encoding="utf-8"))
    parts = table.pop("parts")
    filled = {
        re.sub(r"<(\w+)>", lambda found: parts[found[1]], key): advice
        for key, advice in table["keys"].items()
    }
    return table | {"keys": filled}


def key_advice(key: str) -> str | None:
    """Advice for someone who sets the unknown `key`; None: there is none."""
    return first_match(aliases()["keys"], key)


def flag_advice(flag: str) -> str | None:
    """Advice for someone who writes a flag such as `--rollout-batch-size`; None: there is none."""
    name = flag.lstrip("-").partition("=")[0].replace("_", "-")
    advice = aliases()["flags"].get(name)
    return None if advice is None else f"--{name} is slime's; megarl has keys: write {advice}"


def first_match(table: Mapping[str, str], key: str) -> str | None:
    """The text of the first pattern that fits the whole key, with `{0}`, `{1}` replaced by what its groups matched; None: none fits."""
    for pattern, text in table.items():
        found = re.fullmatch(pattern, key)
        if found is not None:
            return text.format(*(group for group in found.groups() if group is not None))
    return None


def raise_if_any(subject: str, problems: Sequence[str]) -> None:
    """Raise one ValueError that lists all problems of `subject`, if there are any."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ValueError("\n  - ".join([f"{subject}: {count}", *problems]))


def nearest_keys(key: str, keys: Iterable[str]) -> list[str]:
    """Up to three of the dotted `keys` that `key` may have been meant as, best first; perhaps none.

    Last parts must be alike (in any order of their words); among those the sections decide. So a key in the
    wrong section and a misspelt one in the right section are both found. A name without a section stands for the
    keys of that name, in the order of `keys`.
    """
    keys = list(keys)
    *sections, last = key.split(".")
    named = [candidate for candidate in keys if candidate.rpartition(".")[2] == last.lower()]
    if named and not sections:
        return named[:NUM_SUGGESTIONS]
    scored = []
    for candidate in keys:
        *others, other = candidate.split(".")
        name = max(_ratio(last, other, ALIKE), _ratio(_sorted_words(last), _sorted_words(other), ALIKE))
        if name >= ALIKE:
            shared = len(set(sections) & set(others)) / max(1, len(set(sections)))
            scored.append((-(2 * name + _ratio(key, candidate) + shared) / 4, candidate))
    scored.sort()
    # Others only where they are about as likely as the best.
    return [candidate for score, candidate in scored[:NUM_SUGGESTIONS] if score <= scored[0][0] + 0.05]


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """`; did you mean x?` where other trainers call a choice `value`, or a choice is near in spelling; else ""."""
    choices = list(choices)
    near = [name for name in aliases()["values"].get(value.lower(), ()) if name in choices]
    near = near or get_close_matches(value.lower(), choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _sorted_words(name: str) -> str:
    return "_".join(sorted(name.split("_")))


def _ratio(a: str, b: str, least: float = 0.0) -> float:
    """How alike two names are, 0 to 1; 0 where a quick upper bound is below `least`."""
    if 2 * min(len(a), len(b)) < least * (len(a) + len(b)):
        return 0.0
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    return matcher.ratio() if matcher.quick_ratio() >= least else 0.0
