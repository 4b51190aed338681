"""What users are shown of a configuration: the resolved keys with the source of each value; notes on keys without effect, and on keys
that such runs usually have; and docs/config.md, every key of every command."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.config import engine_options, megatron_options
from megarl.config.loading import SCHEMAS, plain_value
from megarl.config.loading.document import YamlDumper
from megarl.config.options import cell, options_text
from megarl.config.problems import aliases, first_match
from megarl.config.resolve import CHOSEN_MULTIPLE, CHOSEN_TOKENS, megatron_sections, needs_reference, resolve
from megarl.config.schema import (
    field_types,
    is_required,
    section_type,
    table_type,
    type_text,
    walk,
    walk_values,
)
from megarl.config.schema.commands import (
    POLICY,
    ActorConfig,
    CriticConfig,
    EvalConfig,
    RefConfig,
    TrainConfig,
)
from megarl.config.schema.supervised import RMConfig, SFTConfig, TuningConfig

Config = TrainConfig | TuningConfig | EvalConfig

_REFERENCE = r"actor_rollout_ref\.(?:ref|teachers\.\w+)"
_ROLE = rf"(actor_rollout_ref\.actor|{_REFERENCE}|critic|reward_model)"
# Pattern of a key that `resolve` fills in or changes: where its value comes from. The first that fits counts.
_SOURCES: Mapping[str, str] = {
    r"data\.gen_batch_size": "data.train_batch_size",
    r"data\.return_raw_input_ids": "actor_rollout_ref.rollout.gateway.enable",
    r"trainer\.max_staleness": "trainer.mode",
    r"data\.tokenizer": "moved to actor_rollout_ref.model.tokenizer_path",
    r"actor_rollout_ref\.model\.tokenizer_path": "data.tokenizer or actor_rollout_ref.model.path",
    r"((?:.*\.)?model)\.tokenizer_path": "{0}.path",
    r"(actor_rollout_ref\.actor|critic)\.optim\.clip_grad": "{0}.grad_clip",
    r"(actor_rollout_ref\.actor|critic)\.grad_clip": "moved to {0}.optim.clip_grad",
    r"actor_rollout_ref\.actor\.clip_range": "moved to actor_rollout_ref.actor.clip_ratio_low and clip_ratio_high",
    r"actor_rollout_ref\.actor\.clip_ratio_(?:low|high)": "actor_rollout_ref.actor.clip_range or clip_ratio",
    r"actor_rollout_ref\.actor\.loss_agg_mode": "actor_rollout_ref.actor.policy_loss.loss_mode",
    r"actor_rollout_ref\.actor\.loss_scale_factor": "data.max_response_length",
    r"actor_rollout_ref\.actor\.ppo_m\w+_per_gpu": "actor_rollout_ref.actor.use_dynamic_bsz",
    r"max_token_len_per_gpu": "data.max_length",
    r"critic\.(ppo_m\w+_per_gpu|use_dynamic_bsz)": "critic.use_dynamic_bsz and actor_rollout_ref.actor.{0}",
    r"critic\.(ppo_mini_batch_size|ppo_epochs|resource_pool)": "actor_rollout_ref.actor.{0}",
    rf"(?:critic|{_REFERENCE})\.model\.path": "actor_rollout_ref.model.path",
    rf"({_REFERENCE})\.log_prob_\w+": "{{0}}.log_prob_use_dynamic_bsz and the actor's micro-batches",
    r"reward_model\.m\w+_per_gpu": "the actor's micro-batches",
    r"reward_model\.max_length": "data.max_prompt_length + data.max_response_length",
    r"actor_rollout_ref\.actor\.resource_pool": "resource_pools",
    _ROLE + r"\.resource_pool|actor_rollout_ref\.rollout\.resource_pool": "actor_rollout_ref.actor.resource_pool",
    r"rollout\.resource_pool": "evaluation's only pool",
    r"(?:actor_rollout_ref\.)?rollout\.num_engines": "the devices of the pool over rollout.tensor_model_parallel_size",
    r"(?:actor_rollout_ref\.)?rollout\.nodes_per_engine": "rollout.tensor_model_parallel_size over the pool's n_gpus_per_node",
    rf"({_REFERENCE})\.engine\.num_engines": "the devices of the pool over {{0}}.engine.tensor_model_parallel_size",
    rf"({_REFERENCE})\.engine\.nodes_per_engine": "{{0}}.engine.tensor_model_parallel_size over the pool's n_gpus_per_node",
    r"actor_rollout_ref\.actor\.megatron\.recompute_granularity": "actor_rollout_ref.model.enable_gradient_checkpointing",
    r"megatron\.recompute_granularity": "model.enable_gradient_checkpointing",
    r"critic\.megatron\.(recompute_granularity)": "critic.model.enable_gradient_checkpointing or the actor's {0}",
    r"(?:.*\.)?megatron\.sequence_parallel": "tensor_model_parallel_size beside it",
    r"resource_pools\.global\.(nnodes|n_gpus_per_node)": "trainer.{0}",
    r"trainer\.default_local_dir": "trainer.project_name and trainer.experiment_name",
    r"trainer\.rollout_data_dir": "trainer.default_local_dir",
}  # fmt: skip

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
    """The keys that were given a value other than their default, as `resolved_keys` has them, without the values that follow from them."""
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
    """The source of a key's value that `resolve` filled in or changed; None: it never does."""
    return first_match(_SOURCES, key)


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
    """Where a key was given, or the key that it is an element of, or (a free mapping) an element of it; None: nowhere."""
    parts = key.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    names += [name for name in origins if name.startswith(f"{key}.")]
    return next((origins[name] for name in names if name in origins), None)


def _inherited(key: str, before: dict[str, Any]) -> str | None:
    """The actor's key, for a key of a layout that was null as a whole."""
    section, _, name = key.partition(".megatron.")
    return f"actor_rollout_ref.actor.megatron.{name}" if name and f"{section}.megatron" in before else None


def _flat(config: Any) -> dict[str, Any]:
    """Dotted key -> plain value; a section that is null is a key."""
    return {key: plain_value(value) for key, _, value in walk_values(config)}


def _scalar(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)  # double quotes mean the same in JSON and YAML
    text = yaml.dump(
        value,
        Dumper=YamlDumper,
        default_flow_style=True,
        allow_unicode=True,
        width=float("inf"),
        sort_keys=False,
    )
    return text.removesuffix("\n").removesuffix("\n...")


def notes(config: TrainConfig | TuningConfig | EvalConfig, given: Collection[str]) -> list[str]:
    """A line for each key that was given without effect, or that is missing.

    Args:
        config: unresolved, accepted by `check_config`.
        given: the dotted keys that the recipe (but not its base) and its overrides give.
    """
    if isinstance(config, TuningConfig):
        return list(_unused_tuning(config, given))
    if not isinstance(config, TrainConfig):
        return []
    return [
        *_overruled_sizes(config),
        *_large_micro_batches(config),
        *_unused_reference(config, given),
        *_unused_algorithm(config, given),
        *_uncorrected(config),
    ]


def said_here(origins: Mapping[str, str], recipe: str | Path | None) -> list[str]:
    """The keys that were given by overrides or by the recipe itself, not by the files that it names as its base.

    Args:
        origins: those of `load_with_origins`.
    """
    return [key for key, where in origins.items() if where.startswith(("override ", f"{recipe} line "))]


def _overruled_sizes(config: TrainConfig) -> Iterator[str]:
    """Sizes of micro-batches that use_dynamic_bsz overrules."""
    shared = config.actor_rollout_ref.actor.use_dynamic_bsz
    for key, section in megatron_sections(config).items():
        if key == "reward_model":  # it has no such switch
            continue
        prefix, first = ("log_prob_", "log_prob_") if isinstance(section, RefConfig) else ("", "ppo_")
        tokens, trajectories = f"{first}max_token_len_per_gpu", f"{first}micro_batch_size_per_gpu"
        own = getattr(section, f"{prefix}use_dynamic_bsz")
        dynamic = shared if own is None else own
        unused = {True: trajectories, False: tokens, None: None}[dynamic]
        if unused is None or getattr(section, unused) is None:
            continue
        place = f"{POLICY}.actor.use_dynamic_bsz" if own is None else f"{key}.{prefix}use_dynamic_bsz"
        size = (
            f"by tokens, at most {key}.{tokens}"
            if dynamic
            else f"by trajectories, at most {key}.{trajectories}"
        )
        yield f"{key}.{unused}={getattr(section, unused)} is not used: {place}={str(dynamic).lower()} cuts micro-batches {size}"


def _large_micro_batches(config: TrainConfig) -> Iterator[str]:
    for key, section in megatron_sections(config).items():
        if not isinstance(section, ActorConfig | CriticConfig):
            continue
        micro = section.ppo_micro_batch_size_per_gpu
        mini = section.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
        size = mini * config.actor_rollout_ref.rollout.n
        if micro is not None and not section.use_dynamic_bsz and micro > size:
            yield (
                f"{key}.ppo_micro_batch_size_per_gpu={micro} is never reached: a mini-batch has {size} trajectories in all"
            )


def _unused_reference(config: TrainConfig, given: Collection[str]) -> Iterator[str]:
    if needs_reference(config):
        if config.actor_rollout_ref.teachers is not None:
            yield from _without_effect(given, (f"{POLICY}.ref.",), f"{POLICY}.teachers=null")
        if not config.algorithm.use_kl_in_reward:
            yield from _without_effect(
                given, ("algorithm.kl_ctrl.", "algorithm.kl_penalty"), "algorithm.use_kl_in_reward=true"
            )
        return
    yield from _without_effect(
        given,
        (
            f"{POLICY}.ref.",
            f"{POLICY}.teachers.",
            "algorithm.kl_ctrl.",
            "algorithm.kl_penalty",
            f"{POLICY}.actor.kl_loss_",
        ),
        f"algorithm.use_kl_in_reward=true (KL in the reward) or {POLICY}.actor.use_kl_loss=true (in the loss)",
    )


def _unused_algorithm(config: TrainConfig, given: Collection[str]) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type != "adaptive":
        keys = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")
        yield from _without_effect(given, keys, "algorithm.kl_ctrl.type=adaptive")
    if algorithm.adv_estimator == "grpo":
        yield from _without_effect(given, ("algorithm.lam", "algorithm.gamma"), "algorithm.adv_estimator=gae")
    if not config.reward_model.enable:
        yield from _without_effect(
            [key for key in given if not key.startswith("reward_model.overlong_buffer")],
            (
                "reward_model.model.",
                "reward_model.micro_batch",
                "reward_model.max_",
                "reward_model.step_",
                "reward_model.megatron.",
            ),
            "reward_model.enable=true",
        )


def _uncorrected(config: TrainConfig) -> Iterator[str]:
    """Trajectories of older weights, and nothing that corrects for it."""
    correction = config.algorithm.rollout_correction
    corrected = correction.bypass_mode or correction.rollout_is or correction.rollout_rs
    if config.trainer.mode != "sync" and not corrected:
        yield (
            f"trainer.mode={config.trainer.mode} trains on responses of older weights, for which nothing corrects: set "
            "algorithm.rollout_correction.rollout_is=token (truncated importance weights), rollout_rs (masks), or bypass_mode=true "
            "(ratios to the engine's log-probs)"
        )


def _unused_tuning(config: TuningConfig, given: Collection[str]) -> Iterator[str]:
    if config.trainer.early_stop_patience is None:
        yield from _without_effect(given, ("trainer.early_stop_min_delta",), "trainer.early_stop_patience")
    if isinstance(config, SFTConfig):
        if config.data.text_key is None:
            yield from _without_effect(given, ("data.append_eos",), "data.text_key")
        elif "data.prompt_key" in given:
            yield "data.prompt_key has no effect with data.text_key, which reads plain text"
        if config.data.text_key is None and config.data.response_key is None:
            yield from _without_effect(given, ("data.prompt_key",), "data.response_key")
    if isinstance(config, RMConfig) and config.data.normalize == "none":
        yield from _without_effect(given, ("data.normalize_max_samples",), "data.normalize")


def _without_effect(given: Collection[str], prefixes: tuple[str, ...], needed: str) -> Iterator[str]:
    found = [key for key in given if key.startswith(prefixes)]
    if found:
        verb = "has" if len(found) == 1 else "have"
        yield f"{', '.join(found)} {verb} no effect without {needed}"


_INTRODUCTION = """\
# Configuration

Made by `megarl config --reference > docs/config.md` from the schema itself; not edited by hand.

A run is described by a YAML file (a recipe) and by overrides on the command line, `megarl train RECIPE key=value ...`; later
ones win, and a recipe may name another as its `base`. Values are YAML 1.2: `null`, `1e-6`, `[0.2, 0.3]`; a single value
stands for a list of one. Hydra's `+key=value` and `++key=value` mean `key=value`. `${trainer.seed}` stands for another key's value. A leading `~` in a path is expanded.

Every key is read or refused: unknown keys with the nearest valid one, keys of verl and flags of slime with what to write
instead, values out of range and values that do not fit each other, the files, the devices or the model: all in one message,
before anything is started. `megarl config RECIPE key=value ...` prints the resolved configuration, with the file and line,
the override, the default or the key that each value comes from, and names keys that have no effect; with `--changed` it prints
only what was given and is not the default.

Batch sizes count over all devices; `_per_gpu` is for one device, which is a GPU or, on a machine without any, a process.
`required` keys have no default. Where a model is asked for, a folder in Hugging Face format or an id on the Hugging Face Hub
(`Qwen/Qwen2.5-0.5B-Instruct`) is given; the latter is downloaded into the Hub's cache, which on several hosts must lie on a
file system that they share (`HF_HOME`).
"""


def reference() -> str:
    """The page, as Markdown."""
    parts = [_INTRODUCTION]
    for command, schema in SCHEMAS.items():
        parts.append(f"## megarl {command}\n\n{schema.__doc__}\n")
        parts += _sections(schema, "", {})
    parts.append(_options())
    parts.append(_flags())
    return "\n".join(parts)


def _sections(schema: type, prefix: str, seen: dict[type, str]) -> Iterator[str]:
    """The tables of a section and of the sections inside it.

    `seen`: section class -> the key at which its table stands, for sections that share it.
    """
    kinds = field_types(schema)
    rows, inner = [], []
    for member in fields(schema):
        kind = kinds[member.name]
        section = section_type(kind) or table_type(kind)
        if section is None or not is_dataclass(section):
            rows.append(_row(f"{prefix}{member.name}", member, kind))
            continue
        if table_type(kind) is not None:
            rows.append(_row(f"{prefix}{member.name}", member, kind))
        inner.append((member, section, "<name>." if table_type(kind) is not None else ""))
    if rows:
        head = "| key | type | default | meaning |\n|---|---|---|---|\n"
        yield head + "\n".join(rows) + "\n"
    for member, section, name in inner:
        key = f"{prefix}{member.name}.{name}"
        optional = " May be null." if member.default is None and not name else ""
        yield f"### `{key.rstrip('.')}`\n\n{cell(member.metadata['help'])}{optional}\n"
        if section in seen:
            yield f"The keys of `{seen[section]}`.\n"
        else:
            seen[section] = key.rstrip(".")
            yield from _sections(section, key, seen)


def _row(key: str, member: Field, kind: Any) -> str:
    rules = member.metadata
    valid = []
    if rules.get("choices"):
        valid.append(", ".join(f"`{choice}`" for choice in rules["choices"]))
    bounds = [f"{sign} {rules[name]:g}" for name, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
              if rules.get(name) is not None]  # fmt: skip
    if bounds:
        valid.append(" and ".join(bounds))
    meaning = rules["help"] + "".join(f" Valid: {text}." for text in valid)
    if rules.get("formula"):
        meaning += f" `{rules['formula']}`"
    return f"| `{key}` | {type_text(kind)} | {_default(member)} | {cell(meaning)} |"


def _default(member: Field) -> str:
    if is_required(member):
        return "required"
    value = plain_value(member.default)
    if isinstance(value, bool) or value is None:
        return f"`{'null' if value is None else str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{', '.join(str(item) for item in value)}]`"
    return f"`{value}`" if value != "" else '`""`'


def _options() -> str:
    sections = (
        ("SGLang's server arguments: `rollout.engine_kwargs`", engine_options.TABLE),
        ("Megatron-core's settings: `megatron.override_transformer_config`", megatron_options.TRANSFORMER),
        ("Megatron-core's data parallelism: `megatron.override_ddp_config`", megatron_options.DDP),
    )
    parts = [
        "## Options of SGLang and Megatron-core\n\n[Engine and Megatron options](options.md) says how they are checked. Options that are in "
        "neither list are passed on with a warning in the log, since nothing is known of their effect on megarl's guarantees.\n"
    ]
    for title, table in sections:
        parts += [f"### {title}\n", *options_text(table)]
    return "\n".join(parts)


def _flags() -> str:
    rows = "\n".join(f"| `--{flag}` | {cell(advice)} |" for flag, advice in aliases()["flags"].items())
    return (
        "## For users of slime\n\nmegarl has keys, not flags. What a flag of slime's is called here:\n\n"
        f"| flag | megarl |\n|---|---|\n{rows}\n"
    )
