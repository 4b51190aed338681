"""Checks of what a policy is compared with: the reference, a teacher in its place, several teachers."""

import re
from collections.abc import Iterator

from megarl.config.resolve import (
    full_kl_in_loss,
    full_kl_in_reward,
    has_teacher,
    needs_ref_log_probs,
    needs_reference,
)
from megarl.config.schema.commands import POLICY, TrainConfig


def reference_problems(config: TrainConfig) -> Iterator[str]:
    actor, given = config.actor_rollout_ref.actor, f"{POLICY}.ref.model.path"
    if has_teacher(config) and not needs_reference(config):
        yield (
            f"{given}: nothing compares the policy with a reference; set {POLICY}.actor.use_kl_loss=true or algorithm.use_kl_in_reward=true, "
            "or leave it out"
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
