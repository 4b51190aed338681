"""Checks of agents as programs: section rollout.gateway."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from megarl.config.checks.values import given_keys
from megarl.config.schema.commands import EvalConfig, TrainConfig, rollout_section
from megarl.config.schema.rollout import CONTAINERS, SANDBOXES, GatewayConfig

_NO_SESSIONS = {
    "remax": "compares with greedy answers, and a session has no greedy answer of its own",
    "gigpo": "compares the states of an environment, about which an agent tells nothing",
}


def gateway_problems(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Problems of the section gateway in a resolved configuration."""
    key, rollout = rollout_section(config)
    prefix, gateway = f"{key}.gateway", rollout.gateway
    if not gateway.enable:
        if given := given_keys(gateway):
            names = ", ".join(f"{prefix}.{name}" for name in given)
            yield f"{names}: without {prefix}.enable=true there are no agents"
        return
    yield from _agent_problems(prefix, gateway)
    yield from _sandbox_problems(prefix, gateway)
    if rollout.multi_turn.enable:
        yield f"{prefix}.enable=true and multi_turn.enable=true: an agent or an environment plays the turns; choose one"
    served = (*gateway.models, *gateway.players)
    if not served or not all(served):
        yield f"{prefix}.models={list(gateway.models)}: agents need a name to ask by, such as policy"
    if len(gateway.players) == 1:
        yield f"{prefix}.players={list(gateway.players)}: one player is none; name all that the policy plays, or write []"
    if twice := sorted({name for name in served if served.count(name) > 1}):
        yield f"{prefix}.models={list(gateway.models)} and players={list(gateway.players)} have {', '.join(twice)} twice"
    if isinstance(config, TrainConfig):
        yield from _training_problems(prefix, config)


def _sandbox_problems(prefix: str, gateway: GatewayConfig) -> Iterator[str]:
    name, own = gateway.sandbox, ":" in gateway.sandbox
    if own:
        yield from _function_problems(f"{prefix}.sandbox", name, "NAME")
    elif name not in SANDBOXES:
        yield f"{prefix}.sandbox={name!r} must be one of {', '.join(SANDBOXES)}, or FILE.py:NAME for one of your own"
        return
    if name == "none":
        if given := given_keys(gateway, ("readable", "memory_mb", "image")):
            names = ", ".join(f"{prefix}.{key}" for key in given)
            yield f"{names} has no effect without a sandbox, such as {prefix}.sandbox=namespaces"
        return
    if gateway.preload:
        yield f"{prefix}.preload with {prefix}.sandbox={name}: an agent in a sandbox is no copy of a process outside; leave one of them out"
    if name in CONTAINERS and gateway.python is not None:
        yield f"{prefix}.python={gateway.python!r} with {prefix}.sandbox={name}: agents have the image's python3; leave python out"
    if not own and gateway.host != "127.0.0.1":
        yield f"{prefix}.host={gateway.host!r} with {prefix}.sandbox={name}: the sandbox is on the engine's machine; leave host out"
    if name in CONTAINERS and not gateway.image:
        yield f"{prefix}.sandbox={name} needs {prefix}.image, such as python:3.12-slim"
    if name in ("namespaces", "bubblewrap") and gateway.image is not None:
        yield f"{prefix}.image={gateway.image!r} has no effect with {prefix}.sandbox={name}; containers are {' and '.join(CONTAINERS)}"
    for folder in gateway.readable:
        if not Path(folder).expanduser().is_dir():
            yield f"{prefix}.readable: {folder} is no folder (working directory {Path.cwd()})"


def _agent_problems(prefix: str, gateway: GatewayConfig) -> Iterator[str]:
    if bool(gateway.command) == (gateway.agent is not None):
        yield f"{prefix}.command (a program and its arguments) or {prefix}.agent (FILE.py:FUNCTION): give one of them"
    if gateway.agent is None and (given := given_keys(gateway, ("python", "preload"))):
        names = ", ".join(f"{prefix}.{name}" for name in given)
        yield f"{names}: for {prefix}.agent=FILE.py:FUNCTION alone; {prefix}.command names its own program"
    if gateway.python is not None and shutil.which(str(Path(gateway.python).expanduser())) is None:
        yield f"{prefix}.python={gateway.python!r}: there is no such program (working directory {Path.cwd()})"
    for name in ("agent", "score"):
        if (value := getattr(gateway, name)) is not None:
            yield from _function_problems(f"{prefix}.{name}", value, "FUNCTION")


def _function_problems(key: str, value: str, noun: str) -> Iterator[str]:
    file, _, function = value.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        yield f"{key}={value!r} must be FILE.py:{noun}"
    elif not Path(file).expanduser().is_file():
        yield f"{key}: the file {file} does not exist (working directory {Path.cwd()})"


def _training_problems(prefix: str, config: TrainConfig) -> Iterator[str]:
    estimator, phase = config.algorithm.adv_estimator, config.trainer.phase_timeout
    if estimator in _NO_SESSIONS:
        yield (
            f"{prefix}.enable=true with algorithm.adv_estimator={estimator!r}, which {_NO_SESSIONS[estimator]}; use grpo"
        )
    if config.reward_model.enable:
        yield (
            f"{prefix}.enable=true with reward_model.enable=true: a reward model would score each path of a session; have the agent ask it, and "
            "post the score"
        )
    if config.reward_model.overlong_buffer.enable:
        yield (
            f"{prefix}.enable=true with reward_model.overlong_buffer.enable=true: a session has no one length; have the agent count, and post "
            "a lower score"
        )
    if config.data.ref_prompt_key is not None:
        yield (
            f"{prefix}.enable=true with data.ref_prompt_key={config.data.ref_prompt_key}: the prompts are the agent's, and the reference would "
            "read another; leave one out"
        )
    timeout = config.actor_rollout_ref.rollout.gateway.timeout
    if phase is not None and timeout >= phase:
        yield (
            f"{prefix}.timeout={timeout:g} must be less than trainer.phase_timeout={phase:g}, after which a run that waits for agents counts "
            "as broken"
        )
