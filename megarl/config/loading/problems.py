"""How the configuration's errors read: all of them in one ValueError, with the nearest valid names."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches

NUM_SUGGESTIONS = 3
# What people call values that have another name here, for any key that takes one of these.
VALUES: Mapping[str, tuple[str, ...]] = {
    "ppo": ("gae", "vanilla"),
    "reinforce": ("reinforce_plus_plus",),
    "reinforce++": ("reinforce_plus_plus",),
    "reinforce++_baseline": ("reinforce_plus_plus_baseline",),
    "bf16": ("bfloat16",),
    "fp16": ("float16",),
    "half": ("float16",),
    "fp32": ("float32",),
    "tb": ("tensorboard",),
    "stdout": ("console",),
    "jsonl": ("file",),
    "async": ("fully_async",),
    "cos": ("cosine",),
    "dpo": ("sigmoid",),
}


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
        name = max(_ratio(last, other), _ratio(_sorted_words(last), _sorted_words(other)))
        shared = len(set(sections) & set(others)) / max(1, len(set(sections)))
        if name >= 0.7:
            scored.append((-(2 * name + _ratio(key, candidate) + shared) / 4, candidate))
    scored.sort()
    # Others only where they are about as likely as the best.
    return [candidate for score, candidate in scored[:NUM_SUGGESTIONS] if score <= scored[0][0] + 0.05]


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """`; did you mean x?` where others call a choice so, or a choice is near in spelling; else nothing."""
    choices = list(choices)
    near = [name for name in VALUES.get(value.lower(), ()) if name in choices]
    near = near or get_close_matches(value.lower(), choices, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _sorted_words(name: str) -> str:
    return "_".join(sorted(name.split("_")))


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b, autojunk=False).ratio()
