"""What has changed in a configuration since the checkpoint that a run goes on from."""

import re
from pathlib import Path
from typing import Any

import yaml

from megarl.config.loading.load import to_dict

_ABSENT = "(not there)"
# (pattern of a key, why a run cannot go on with another value of it)
_FIXED: tuple[tuple[str, str], ...] = (
    (r"critic", "the checkpoint has the states of other models"),
    (
        r"(?:(?:actor_rollout_ref|critic)\.)?model\.(?:lora\.(?:rank|alpha|target_modules|exclude_modules|use_rslora|use_dora"
        r"|shared_a|expert_groups|base_dtype|base_block)|share_base)",
        "the checkpoint has adapters of another kind",
    ),
    (r"(?:.*\.)?megatron\.dtype", "the checkpoint has weights and optimizer states of another kind"),
    (
        r"data\.(?:train_batch_size|gen_batch_size|shuffle|seed|streaming|sampler\..*|mixture\..*|ptx\.batch_size)",
        "the position in the data means other rows",
    ),
    (r"trainer\.train_only", "a run on trajectories that are there has no position in the prompts"),
    (
        r"trainer\.mode",
        "in other modes than sync the position in the prompts is further, by what the checkpoint has; go on in the same mode",
    ),
    (r"algorithm\.kl_ctrl\.type", "the coefficient so far is that of another controller"),
)  # fmt: skip
# What a run did before there was a key that says so.
_BEFORE = {"trainer.mode": "sync", "trainer.max_staleness": None}


def changed_keys(config: Any, saved: Path) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value in the file `saved`, value in `config`), of keys that differ.

    Args:
        config: resolved, as the one was that `save_config` wrote to `saved`.
    """
    after = _flat(to_dict(config))
    before = {key: value for key, value in _BEFORE.items() if key in after}
    before |= _flat(yaml.safe_load(saved.read_text(encoding="utf-8")))
    return {
        key: (before.get(key, _ABSENT), after.get(key, _ABSENT))
        for key in dict.fromkeys([*before, *after])
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    }


def refused_changes(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    """Of `changed_keys` those with which a run cannot go on, each as a sentence."""
    found = []
    for key, (before, after) in changes.items():
        reasons = [reason for pattern, reason in _FIXED if re.fullmatch(pattern, key)]
        found += [f"{key} was {before!r}, is {after!r} now: {reason}" for reason in reasons[:1]]
    return found


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; an empty section is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            leaves |= _flat(value, f"{key}.")
        else:
            leaves[key] = value
    return leaves
