"""The newest metrics of a run for Prometheus, at http://<machine of the controller>:<trainer.metrics_port>/metrics."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from megarl.trainer.run.logger import Tracker

LABELS = ("project", "run", "metric")


class Endpoint(Tracker, Collector):
    """Keeps the newest value of each metric; one that a step lacks, such as of a validation, stays."""

    def __init__(self, project: str, run: str) -> None:
        self._labels = (project, run)
        self._values: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # One assignment, since `collect` runs in threads of the server.
        self._values = self._values | metrics | {"step": step, "step_end_time_seconds": time.time()}

    def log_samples(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prometheus has no texts."""

    def finish(self, error: BaseException | None) -> None:
        """The server ends with `serve_metrics`."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metrics as Prometheus reads them, each with its own name as a label."""
        families = defaultdict(list)
        for name, value in self._values.items():
            families[prometheus_name(name)].append((name, value))
        for family, members in families.items():
            gauge = GaugeMetricFamily(family, "", labels=LABELS)
            for name, value in members:
                gauge.add_metric((*self._labels, name), value)
            yield gauge


def prometheus_name(metric: str) -> str:
    """A metric's name in Prometheus, which knows letters, digits and `_` alone: `val/pass@4` is `megarl_val_pass_at_4`."""
    return "megarl_" + re.sub(r"\W", "_", metric.replace("@", "_at_"), flags=re.ASCII)


@contextmanager
def serve_metrics(port: int | None, project: str, run: str) -> Iterator[list[Tracker]]:
    """Serve what the yielded tracker is given until the end, on all interfaces; None: nothing is served.

    Raises:
        ValueError: the port is taken, or this user may not open it.
    """
    if port is None:
        yield []
        return
    endpoint, registry = Endpoint(project, run), CollectorRegistry()
    registry.register(endpoint)
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"trainer.metrics_port={port}: {reason}; give a port that is free, or leave it out"
        ) from error
    try:
        yield [endpoint]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
