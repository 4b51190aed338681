"""Checks of the models that a policy is compared with: the reference, a teacher in its place, several teachers, served ones."""

import re
from collections.abc import Iterator

from megarl.config.resolve import (
    full_kl_in_loss,
    full_kl_in_reward,
    has_teacher,
    megatron_sections,
    needs_ref_log_probs,
    needs_reference,
    validates_concurrently,
)
from megarl.config.schema.commands import POLICY, RefConfig, TrainConfig


def reference_problems(config: TrainConfig) -> Iterator[str]:
    actor, given = config.actor_rollout_ref.actor, f"{POLICY}.ref.model.path"
    if has_teacher(config) and not needs_reference(config):
        yield (
            f"{given}: nothing compares the policy with a reference; set {POLICY}.actor.use_kl_loss=true or algorithm.use_kl_in_reward=true, "
            "or leave it out"
        )
    if config.actor_rollout_ref.ref.engine is not None and not needs_reference(config):
        yield (
            f"{POLICY}.ref.engine: nothing compares the policy with a reference; set {POLICY}.actor.use_kl_loss=true or "
            "algorithm.use_kl_in_reward=true, or leave it out"
        )
    key = f"data.ref_prompt_key={config.data.ref_prompt_key}"
    if config.data.ref_prompt_key is not None and not needs_ref_log_probs(config):
        yield (
            f"{key}: the reference judges responses after another prompt by their sampled tokens or its most likely ones; "
            f"set {POLICY}.actor.use_kl_loss=true with kl_loss_type=k2 or top_k, or algorithm.use_kl_in_reward=true with kl_penalty=kl"
        )
    if config.data.ref_prompt_key is not None and config.actor_rollout_ref.rollout.multi_turn.enable:
        yield f"{key}: an environment adds to prompts what the reference would not see; leave one out"
    if not (actor.pg_loss_coef or actor.use_kl_loss or actor.entropy_coeff or actor.ptx_coef):
        yield f"{POLICY}.actor.pg_loss_coef=0: the policy would learn from nothing; set use_kl_loss=true beside it, or leave it out"


def teacher_problems(config: TrainConfig) -> Iterator[str]:
    """Several teachers, each of which judges its own rows."""
    policy, key = config.actor_rollout_ref, f"{POLICY}.teachers"
    if policy.teachers is None:
        if config.data.teacher_key is not None:
            yield f"data.teacher_key={config.data.teacher_key} needs {key} beside it; nothing reads it otherwise"
        return
    if not policy.teachers:
        yield f"{key} is empty; give at least one: <name>: {{model: {{path: ...}}}}"
    if not needs_reference(config):
        yield (
            f"{key}: nothing compares the policy with a teacher; set {POLICY}.actor.use_kl_loss=true or algorithm.use_kl_in_reward=true, or "
            "leave it out"
        )
    if full_kl_in_loss(config) or full_kl_in_reward(config):
        full = f"{POLICY}.actor.kl_loss_type" if full_kl_in_loss(config) else "algorithm.kl_penalty"
        other = "top_k" if full_kl_in_loss(config) else "kl"
        yield f"{full}=full compares whole distributions in the actor's processes, where there is one reference; with {key} choose {other}"
    if has_teacher(config):
        yield f"{POLICY}.ref.model.path: with {key} each row is judged by one of these; make it one of them"
    if policy.ref.engine is not None:
        yield f"{POLICY}.ref.engine: with {key} each row is judged by one of these; give {key}.<name>.engine"
    of_source: dict[str, str] = {}
    for name, teacher in policy.teachers.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            yield (
                f"{key}: the name {name!r} is part of metrics and of file names, and may have letters, digits, _ and -; give the data source as one "
                "of its sources"
            )
        for source in teacher.sources if teacher.sources is not None else (name,):
            if source in of_source:
                yield f"{key}.{name}.sources: {source!r} is a source of {of_source[source]}, too; a row has one teacher"
            of_source[source] = name
        if teacher.sources == ():
            yield f"{key}.{name}.sources is empty; name the values of data.teacher_key that it judges, or leave it out"


_MEGATRONS = (
    "megatron",
    "log_prob_max_token_len_per_gpu",
    "log_prob_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz",
)


def served_reference_problems(config: TrainConfig) -> Iterator[str]:
    """References that engines serve: the keys of their sections, and their devices, on which nothing else is."""
    policy = config.actor_rollout_ref
    sections: dict[str, RefConfig] = {f"{POLICY}.ref": policy.ref}
    if policy.teachers is not None:
        sections = {f"{POLICY}.teachers.{name}": section for name, section in policy.teachers.items()}
    served = {key: section for key, section in sections.items() if section.engine is not None}
    others = {key: section.resource_pool for key, section in megatron_sections(config).items()}
    others[f"{POLICY}.rollout"] = policy.rollout.resource_pool
    if validates_concurrently(config):
        others["trainer.eval_mode=concurrent"] = config.trainer.eval_resource_pool
    advice = "name a pool of its own, such as resource_pools={train: {n_gpus_per_node: 6}, teacher: {n_gpus_per_node: 2}} with resource_pool: teacher"
    for key, section in served.items():
        for name in _MEGATRONS:
            if getattr(section, name) is not None:
                yield f"{key}.{name} is of Megatron models, and engines judge here ({key}.engine); leave one of the two out"
        pool = section.resource_pool
        # These engines' memory never leaves its devices: no sync could bring weights back that were loaded from a folder.
        if pool is None:
            yield f"{key}.engine: the engines of a teacher stay on devices of their own, and {key}.resource_pool is null; {advice}"
            continue
        shared = [other for other, name in others.items() if name == pool]
        shared += [other for other, one in served.items() if other != key and one.resource_pool == pool]
        if shared:
            yield (
                f"{key}.resource_pool={pool!r} is also that of {', '.join(shared)}: the engines of a teacher stay on devices of their own; {advice}"
            )
    if policy.teachers is None and policy.ref.engine is not None:
        for key, full, other in (
            (f"{POLICY}.actor.kl_loss_type", full_kl_in_loss(config), "top_k (its most likely tokens) or k2"),
            ("algorithm.kl_penalty", full_kl_in_reward(config), "kl"),
        ):
            if full:
                yield (
                    f"{key}=full compares whole distributions, and an engine gives log-probs of sampled tokens or its most likely ones alone: choose "
                    f"{other}, or leave {POLICY}.ref.engine out"
                )
