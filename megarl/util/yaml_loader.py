"""YAML by libyaml's parser, where PyYAML was built with it, as its wheels are: that one takes a tenth of the time of PyYAML's own."""

from typing import Any

import yaml

SafeLoader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


def safe_load(text: str) -> Any:
    """What a text says, in plain types. Raises: yaml.YAMLError."""
    return SafeLoader(text).get_single_data()
