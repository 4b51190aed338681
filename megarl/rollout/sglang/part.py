"""The TP ranks of an engine on a node other than its first.

Requests come to the first node's process (`sglang_engine`) and from there, over the ranks' own group, to all TP ranks.
So there is nothing to call here: this process starts its node's ranks, is their parent, and ends with them, as that one
does. A rank that is lost takes those of all nodes with it, since they wait for each other.
"""

import threading
from typing import Any

from megarl.rollout.engine import EngineConfig
from megarl.rollout.sglang.model import read_model
from megarl.rollout.sglang.start import start_owned


class SGLangPart:
    """Owns the TP ranks of node `config.node`, which is not the first."""

    def __init__(self, config: EngineConfig) -> None:
        assert 0 < config.node < config.nodes, config
        self.config = config
        self._engine: Any = None
        self._closing = threading.Event()

    def start(self) -> None:
        """Start the node's ranks; returns when those of all nodes are up.

        Raises:
            ValueError, EngineError: as `RolloutEngine.start`.
        """
        self._engine = start_owned(self.config, read_model(self.config), self._closing)

    def pids(self) -> list[int]:
        """The processes of the node's ranks."""
        return list(self._engine.get_all_child_pids())

    def shutdown(self) -> None:
        """End them; returns when they are gone."""
        self._closing.set()
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
