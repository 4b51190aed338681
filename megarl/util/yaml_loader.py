"""PyYAML's safe loader, with libyaml's parser where PyYAML was built with it, as its wheels are: that one takes a tenth of the time."""

from typing import Any

import yaml

SafeLoader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
