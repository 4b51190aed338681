"""The resolved configuration as it is printed: every key, its value, and where that comes from."""

import json
import re
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from megarl.config.loading.document import YamlDumper
from megarl.config.loading.load import plain_value
from megarl.config.resolve import CHOSEN_MULTIPLE, CHOSEN_TOKENS, resolve
from megarl.config.schema.commands import EvalConfig, TrainConfig
from megarl.config.schema.options import field_types, is_free, walk
from megarl.config.schema.supervised import TuningConfig

Config = TrainConfig | TuningConfig | EvalConfig

_POLICY = r"actor_rollout_ref"
_ROLE = r"(actor_rollout_ref\.(?:actor|ref)|critic|reward_model)"
# (pattern of a key that `resolve` fills in or changes, where its value comes from); the first that fits counts.
_SOURCES: tuple[tuple[str, str], ...] = (
    (r"data\.gen_batch_size", "data.train_batch_size"),
    (r"trainer\.max_staleness", "trainer.mode"),
    (r"data\.tokenizer", "moved to actor_rollout_ref.model.tokenizer_path"),
    (r"actor_rollout_ref\.model\.tokenizer_path", "data.tokenizer or actor_rollout_ref.model.path"),
    (r"((?:.*\.)?model)\.tokenizer_path", "{0}.path"),
    (r"(actor_rollout_ref\.actor|critic)\.optim\.clip_grad", "{0}.grad_clip"),
    (r"(actor_rollout_ref\.actor|critic)\.grad_clip", "moved to {0}.optim.clip_grad"),
    (r"actor_rollout_ref\.actor\.clip_range", "moved to actor_rollout_ref.actor.clip_ratio_low and clip_ratio_high"),
    (r"actor_rollout_ref\.actor\.clip_ratio_(?:low|high)", "actor_rollout_ref.actor.clip_range or clip_ratio"),
    (r"actor_rollout_ref\.actor\.loss_agg_mode", "actor_rollout_ref.actor.policy_loss.loss_mode"),
    (r"actor_rollout_ref\.actor\.loss_scale_factor", "data.max_response_length"),
    (r"actor_rollout_ref\.actor\.ppo_m\w+_per_gpu", "actor_rollout_ref.actor.use_dynamic_bsz"),
    (r"max_token_len_per_gpu", "data.max_length"),
    (
        r"critic\.(ppo_m\w+_per_gpu|use_dynamic_bsz)",
        "critic.use_dynamic_bsz and actor_rollout_ref.actor.{0}",
    ),
    (r"critic\.(ppo_mini_batch_size|ppo_epochs|resource_pool)", "actor_rollout_ref.actor.{0}"),
    (r"critic\.model\.path", "actor_rollout_ref.model.path"),
    (
        r"actor_rollout_ref\.ref\.log_prob_\w+",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz and the actor's micro-batches",
    ),
    (r"reward_model\.m\w+_per_gpu", "the actor's micro-batches"),
    (r"reward_model\.max_length", "data.max_prompt_length + data.max_response_length"),
    (r"actor_rollout_ref\.actor\.resource_pool", "resource_pools"),
    (_ROLE + r"\.resource_pool|actor_rollout_ref\.rollout\.resource_pool", "actor_rollout_ref.actor.resource_pool"),
    (r"rollout\.resource_pool", "evaluation's only pool"),
    (
        r"(?:actor_rollout_ref\.)?rollout\.num_engines",
        "the devices of the pool over rollout.tensor_model_parallel_size",
    ),
    (
        r"(?:actor_rollout_ref\.)?rollout\.nodes_per_engine",
        "rollout.tensor_model_parallel_size over the pool's n_gpus_per_node",
    ),
    (
        r"actor_rollout_ref\.actor\.megatron\.recompute_granularity",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
    ),
    (r"megatron\.recompute_granularity", "model.enable_gradient_checkpointing"),
    (r"critic\.megatron\.(recompute_granularity)", "critic.model.enable_gradient_checkpointing or the actor's {0}"),
    (r"(?:.*\.)?megatron\.sequence_parallel", "tensor_model_parallel_size beside it"),
    (r"resource_pools\.global\.(nnodes|n_gpus_per_node)", "trainer.{0}"),
    (r"trainer\.default_local_dir", "trainer.project_name and trainer.experiment_name"),
    (r"trainer\.rollout_data_dir", "trainer.default_local_dir"),
)  # fmt: skip

# The sizes of micro-batches that are chosen where none is given.
_CHOSEN = r"(?:actor_rollout_ref\.actor\.ppo_m\w+|max_token_len)_per_gpu"


def resolved_keys(config: Config, origins: dict[str, str]) -> dict[str, tuple[Any, str]]:
    """Every key of the resolved configuration: dotted key -> (value, where it comes from).

    Args:
        config: unresolved.
        origins: those of `load_with_origins`.
    """
    before, after = _flat(config), _flat(resolve(config))
    return {key: (value, _origin(key, value, before, origins)) for key, value in after.items()}


def changed_keys(config: Config, origins: dict[str, str]) -> dict[str, tuple[Any, str]]:
    """The keys that were given a value other than their default, as `resolved_keys` has them; what follows from them is left out."""
    defaults = {key: plain_value(member.default) for key, member, _ in walk(type(config))}
    flat = _flat(config)
    found = {}
    for key, value in flat.items():
        given = _given(key, origins)
        if given is not None and (key not in defaults or value != defaults[key]):
            found[key] = value, given
    return found


def yaml_text(keys: dict[str, tuple[Any, str]]) -> str:
    """The keys as a YAML file, each with a comment that says where its value comes from."""
    lines: list[str] = []
    open_sections: list[str] = []
    for key, (value, origin) in keys.items():
        *sections, name = key.split(".")
        shared = 0
        while shared < min(len(sections), len(open_sections)) and sections[shared] == open_sections[shared]:
            shared += 1
        lines += [f"{'  ' * depth}{_scalar(sections[depth])}:" for depth in range(shared, len(sections))]
        open_sections = sections
        lines.append(f"{'  ' * len(sections)}{_scalar(name)}: {_scalar(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def source_of(key: str) -> str | None:
    """Where a value comes from that `resolve` filled in or changed; None: it never does."""
    for pattern, source in _SOURCES:
        found = re.fullmatch(pattern, key)
        if found is not None:
            return source.format(*(group for group in found.groups() if group is not None))
    return None


def _origin(key: str, value: Any, before: dict[str, Any], origins: dict[str, str]) -> str:
    given = _given(key, origins)
    if key in before and before[key] == value:
        return given or "default"
    if before.get(key) is None and re.fullmatch(_CHOSEN, key):
        most = f"{CHOSEN_MULTIPLE} times what it must hold, up to {CHOSEN_TOKENS} tokens"
        return f"chosen: {most} (on GPUs what their memory holds)"
    source = _inherited(key, before) or str(source_of(key))
    source = source if source.startswith("moved to ") else f"from {source}"
    if key in origins and before.get(key) is not None:
        return f"{source} ({_scalar(before[key])} in {given})"
    return source


def _given(key: str, origins: dict[str, str]) -> str | None:
    """Where a key was given, or what it is an element of, or (a free mapping) an element of it; None: nowhere."""
    parts = key.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    names += [name for name in origins if name.startswith(f"{key}.")]
    return next((origins[name] for name in names if name in origins), None)


def _inherited(key: str, before: dict[str, Any]) -> str | None:
    """The actor's key, for a key of a layout that was null as a whole."""
    section, _, name = key.partition(".megatron.")
    return f"actor_rollout_ref.actor.megatron.{name}" if name and f"{section}.megatron" in before else None


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; a section that is null is a key."""
    flat: dict[str, Any] = {}
    kinds = field_types(type(config))
    for member in fields(config):
        key, value = f"{prefix}{member.name}", getattr(config, member.name)
        if is_dataclass(value):
            flat |= _flat(value, f"{key}.")
        elif isinstance(value, dict) and value and not is_free(kinds[member.name]):
            for name, entry in value.items():
                flat |= _flat(entry, f"{key}.{name}.")
        else:
            flat[key] = list(value) if isinstance(value, tuple) else value
    return flat


def _scalar(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)  # a text in double quotes means the same in both
    text = yaml.dump(
        value,
        Dumper=YamlDumper,
        default_flow_style=True,
        allow_unicode=True,
        width=float("inf"),
        sort_keys=False,
    )
    return text.removesuffix("\n").removesuffix("\n...")
