"""Environments: the policy's counterpart between the turns of a trajectory, such as a tool, a game or a user.

Promises: an environment sees one trajectory, from its `reset` to its end, and no other; an exception of an environment, or an
answer that never comes, costs that trajectory alone.

Must not know of tokens' log-probs, engines, Ray or Megatron: it is given text, and gives text or chat messages.

Files: `environment` is the interface and the registry, `calculator` is a tool, `openenv` asks an OpenEnv server. `find_environment` looks a name
up.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from megarl.environments import calculator, openenv
from megarl.environments.environment import ENVIRONMENTS, Environment

BUILT_IN = (calculator.Calculator, openenv.OpenEnv)  # registered by being imported


def find_environment(name: str, options: Mapping[str, Any]) -> type[Environment]:
    """The class that a configuration names, once its `options` are known to fit. Users' plugins have been imported by then.

    Raises:
        ValueError: an unknown name, an entry that is not an environment class, or options that the class does not take.
    """
    found = ENVIRONMENTS[name]
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise ValueError(f"{ENVIRONMENTS.key}={name!r} is {found!r}, not a class derived from Environment")
    if inspect.isabstract(found):
        raise ValueError(f"{ENVIRONMENTS.key}={name!r}: the class {found.__name__} has no method step")
    signature = inspect.signature(found)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ValueError(
            f"rollout.multi_turn.options={dict(options)}: {found.__name__}{signature} does not take them: {error}"
        ) from error
    return found
