"""From an environment's name in the configuration to its class."""

import inspect
from collections.abc import Mapping
from typing import Any

from megarl.environments import calculator
from megarl.environments.environment import ENVIRONMENTS, Environment

BUILT_IN = (calculator.Calculator,)  # registered by being imported


def find_environment(name: str, options: Mapping[str, Any]) -> type[Environment]:
    """The class of a name, of which objects can be made with `options`. Users' plugins have been imported.

    Raises:
        ValueError: an unknown name, no class of environments, or options that it does not take.
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
