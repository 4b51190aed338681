"""Checks of how a run proceeds: its mode, runs that only generate or only train, checkpoints, traces, and which keys may change when a
run resumes.
"""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megarl.config.checks.values import given_keys
from megarl.config.loading import to_dict
from megarl.config.resolve import megatron_sections, validates_concurrently
from megarl.config.schema.commands import POLICY, STREAMED, TrainConfig, TrainerConfig
from megarl.config.schema.run import SavingConfig
from megarl.config.schema.supervised import TuningConfig
from megarl.util.files import check_url, is_url
from megarl.util.yaml_loader import safe_load

_SAVING = (
    "save_freq",
    "save_minutes",
    "best_metric",
    "max_run_minutes",
    "checkpoint_url",
    "resume_from_path",
    "max_restarts",
)


def run_problems(config: TrainConfig | TuningConfig) -> Iterator[str]:
    """Problems of how the run of a resolved configuration proceeds."""
    trainer = config.trainer
    yield from _saving_problems(trainer, trainer.test_freq)
    if not trainer.profile_steps and given_keys(trainer, ("profile_ranks",)):
        yield "trainer.profile_ranks is of traces: give trainer.profile_steps"
    has_validation = config.data.val_files is not None
    if isinstance(config, TrainConfig):
        yield from _offline_problems(config)
        yield from _mode_problems(config)
        yield from _eval_mode_problems(config)
        has_validation = has_validation or bool(config.data.val_sets)
        if config.trainer.val_before_train and not has_validation:
            yield "trainer.val_before_train=true needs data.val_files"
    if trainer.test_freq > 0 and not has_validation:
        yield f"trainer.test_freq={trainer.test_freq} needs data.val_files"


def _mode_problems(config: TrainConfig) -> Iterator[str]:
    trainer, policy = config.trainer, config.actor_rollout_ref
    if trainer.max_staleness is not None and trainer.mode not in STREAMED:
        yield (
            f"trainer.max_staleness={trainer.max_staleness}: trainer.mode={trainer.mode} does not read it; leave it out, or set the mode "
            f"to {' or '.join(STREAMED)}"
        )
    if trainer.mode == "sync":
        return
    mode = f"trainer.mode={trainer.mode}"
    for key, given in (
        ("rollout_only", trainer.rollout_only),
        ("train_only", trainer.train_only is not None),
    ):
        if given:
            yield f"trainer.{key}: {mode} both generates and trains; leave one of the two out"
    if trainer.mode == "partial_rollouts":
        return
    if trainer.mode == "fully_async" and policy.rollout.free_cache_engine:
        yield (
            f"{POLICY}.rollout.free_cache_engine=true: {mode} generates all the time, so the engines' memory never goes; leave it out"
        )
    trained = {
        key: section.resource_pool
        for key, section in megatron_sections(config).items()
        if key != "reward_model"
    }
    collecting = {f"{POLICY}.rollout": policy.rollout.resource_pool}
    if config.reward_model.enable:
        collecting["reward_model"] = config.reward_model.resource_pool
    for role, pool in collecting.items():
        shared = [other for other, name in trained.items() if name == pool]
        if shared:
            yield (
                f"{role}.resource_pool={pool!r} is also that of {', '.join(shared)}: with {mode} both work at the same time; name "
                "another pool of resource_pools, such as {train: {n_gpus_per_node: 4}, rollout: {n_gpus_per_node: 4}}"
            )


def _eval_mode_problems(config: TrainConfig) -> Iterator[str]:
    """Problems of concurrent validation."""
    trainer, pools = config.trainer, config.resource_pools or {}
    pool, mode = trainer.eval_resource_pool, "trainer.eval_mode=concurrent"
    if not validates_concurrently(config):
        if pool is not None:
            yield (
                f"trainer.eval_resource_pool={pool!r}: trainer.eval_mode={trainer.eval_mode} validates with the engines of the rollouts; leave "
                "it out, or set trainer.eval_mode=concurrent"
            )
        return
    if trainer.test_freq <= 0 and not trainer.val_before_train:
        yield f"{mode}: nothing is validated; set trainer.test_freq, or leave it out"
    roles = {key: section.resource_pool for key, section in megatron_sections(config).items()}
    roles[f"{POLICY}.rollout"] = config.actor_rollout_ref.rollout.resource_pool
    shared = [role for role, name in roles.items() if name == pool]
    advice = "such as resource_pools={train: {n_gpus_per_node: 7}, eval: {n_gpus_per_node: 1}}"
    if pool not in pools:
        yield (
            f"{mode} needs devices of its own, the pool trainer.eval_resource_pool={pool!r}, which is none of {', '.join(pools)}; add it, {advice}"
        )
    elif shared:
        yield (
            f"trainer.eval_resource_pool={pool!r} is also that of {', '.join(shared)}: with {mode} both work at the same time; name another "
            f"pool, {advice}"
        )
    if config.reward_model.enable:
        yield (
            f"{mode} with reward_model.enable=true: training and validation would ask the reward model at the same time, and its ranks would get "
            "their calls in different orders; set trainer.eval_mode=blocking, or score by rules, a function or reward.rule=llm_judge"
        )
    if trainer.best_metric is not None:
        yield (
            f"trainer.best_metric={trainer.best_metric!r} with {mode}: when a result comes, training has already changed the weights it is about; leave "
            "one of them out (trainer.save_freq=trainer.test_freq keeps the weights of every validation)"
        )


def _offline_problems(config: TrainConfig) -> Iterator[str]:
    """Problems of trainer.rollout_only and trainer.train_only."""
    trainer = config.trainer
    if not trainer.rollout_only and trainer.train_only is None:
        return
    key = "trainer.rollout_only" if trainer.rollout_only else "trainer.train_only"
    if trainer.rollout_only and trainer.train_only is not None:
        yield "trainer.rollout_only and trainer.train_only: give one of them, or neither, which is both in turns"
    for name, off in _not_off(trainer, ("test_freq", "val_before_train")):
        yield f"trainer.{name}: with {key} nothing is validated; megarl eval does that. Set trainer.{name}={off}"
    if trainer.rollout_only:
        yield from _rollout_only_problems(config)
    elif trainer.train_only is not None and not Path(trainer.train_only).is_dir():
        yield f"trainer.train_only={trainer.train_only}: there is no such folder"


def _rollout_only_problems(config: TrainConfig) -> Iterator[str]:
    for name, off in _not_off(config.trainer, _SAVING):
        yield f"trainer.{name}: with trainer.rollout_only no model changes, and there are no checkpoints; set trainer.{name}={off}"
    if config.actor_rollout_ref.model.lora.rank:
        yield (
            "actor_rollout_ref.model.lora.rank: trainer.rollout_only has no adapters; leave it out, or give the merged model "
            "(the folder hf of the run that trained them) as actor_rollout_ref.model.path"
        )


def _not_off(trainer: TrainerConfig, names: Collection[str]) -> list[tuple[str, str]]:
    """(name, value that switches it off, as YAML) of keys that are not switched off, as they are by default."""
    return [(name, json.dumps(getattr(TrainerConfig, name))) for name in given_keys(trainer, names)]


def _saving_problems(trainer: SavingConfig, test_freq: int) -> Iterator[str]:
    if trainer.resume_mode == "path" and trainer.resume_from_path is None:
        yield "trainer.resume_mode=path needs trainer.resume_from_path, the folder of a checkpoint"
    if trainer.resume_mode != "path" and trainer.resume_from_path is not None:
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path} is for trainer.resume_mode=path, which is "
            f"{trainer.resume_mode}"
        )
    if trainer.resume_from_path is not None and not Path(trainer.resume_from_path).is_dir():
        yield f"trainer.resume_from_path={trainer.resume_from_path}: there is no such folder"
    if trainer.best_metric is not None and test_freq <= 0:
        yield f"trainer.best_metric={trainer.best_metric!r} is of validations: it needs trainer.test_freq"
    if trainer.checkpoint_url is not None:
        if not is_url(trainer.checkpoint_url):
            yield (
                f"trainer.checkpoint_url={trainer.checkpoint_url!r} must be a URL, such as s3://bucket/run; a folder that is "
                "mounted is given as trainer.default_local_dir"
            )
        else:
            try:
                check_url(trainer.checkpoint_url)
            except ValueError as error:
                yield f"trainer.checkpoint_url: {error}"
    yield from _idle_keys(trainer)


def _idle_keys(trainer: SavingConfig) -> Iterator[str]:
    """Keys of checkpoints in a run that saves none."""
    if trainer.save_freq > 0 or trainer.save_minutes is not None or trainer.best_metric is not None:
        return
    for name in given_keys(trainer, ("keep_every", "save_hf", "async_save")):
        yield f"trainer.{name} is of checkpoints: give trainer.save_freq or trainer.save_minutes"


_ABSENT = "(not there)"
# (pattern of a key, reason why a run cannot go on with another value of it)
_FIXED: tuple[tuple[str, str], ...] = (
    (r"critic", "the checkpoint has the states of other models"),
    (
        r"(?:(?:actor_rollout_ref|critic)\.)?model\.(?:lora\.(?:rank|alpha|target_modules|exclude_modules|use_rslora|use_dora"
        r"|shared_a|expert_groups|base_dtype|base_block)|share_base)",
        "the checkpoint has adapters of another kind",
    ),
    (
        r"(?:actor_rollout_ref\.)?model\.mtp",
        "the checkpoint has multi-token prediction layers, or has none",
    ),
    (
        r"(?:actor_rollout_ref\.)?model\.indexer",
        "the checkpoint has optimizer states of indexers, or has none",
    ),
    (r"(?:.*\.)?megatron\.dtype", "the checkpoint has weights and optimizer states of another kind"),
    (r"(?:.*\.)?optim\.optimizer", "the checkpoint has the states of another optimizer"),
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
# Values that runs had before these keys existed.
_BEFORE = {
    "trainer.mode": "sync",
    "trainer.max_staleness": None,
    "trainer.eval_mode": "blocking",
    "trainer.eval_resource_pool": None,
    "actor_rollout_ref.actor.optim.optimizer": "adam",
    "critic.optim.optimizer": "adam",
    "optim.optimizer": "adam",
}


def changed_keys(config: Any, saved: Path) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value in the file `saved`, value in `config`), of keys that differ.

    Args:
        config: resolved, like the one that `save_config` wrote to `saved`.
    """
    after = flat(to_dict(config))
    before = {key: value for key, value in _BEFORE.items() if key in after}
    before |= flat(safe_load(saved.read_text(encoding="utf-8")))
    return {
        key: (before.get(key, _ABSENT), after.get(key, _ABSENT))
        for key in dict.fromkeys([*before, *after])
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    }


def refused_changes(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    """The changes (of `changed_keys`) with which a run cannot go on, each as a sentence."""
    found = []
    for key, (before, after) in changes.items():
        reasons = [reason for pattern, reason in _FIXED if re.fullmatch(pattern, key)]
        # Without train the change concerns the exported model alone, or an older configuration that lacks the key.
        if key.endswith(("model.mtp", "model.indexer")) and "train" not in (before, after):
            continue
        found += [f"{key} was {before!r}, is {after!r} now: {reason}" for reason in reasons[:1]]
    return found


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves of a configuration by dotted key; an empty section is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{key}.")
        else:
            leaves[key] = value
    return leaves
