"""The newest metrics of a run for Prometheus, at http://<machine of the controller>:<trainer.metrics_port>/metrics.

Python's own server, and Prometheus' text format (version 0.0.4): with the package prometheus_client installed Ray (2.60.0) starts more
processes of its own on each node, which outlive a raylet that is killed.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megarl.trainer.run.logger import Tracker

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Endpoint(Tracker):
    """Keeps the newest value of each metric; a metric that a step lacks, such as a validation's, stays as it was."""

    def __init__(self, project: str, run: str) -> None:
        self._labels = {"project": project, "run": run}
        self._values: dict[str, float] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # One assignment, since `text` is read in threads of the server.
        self._values = self._values | metrics | {"step": step, "step_end_time_seconds": time.time()}

    def log_late(
        self,
        step: int,
        now: int,
        metrics: Mapping[str, float],
        samples: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> None:
        self._values = self._values | metrics

    def log_samples(self, step: int, tag: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prometheus has no texts."""

    def finish(self, error: BaseException | None) -> None:
        """The server ends with `serve_metrics`."""

    def text(self) -> str:
        """The metrics as Prometheus reads them, each with its own name as a label."""
        families = defaultdict(list)
        for name, value in self._values.items():
            families[prometheus_name(name)].append((name, value))
        lines = []
        for family, members in families.items():
            lines.append(f"# TYPE {family} gauge")
            for name, value in members:
                labels = {**self._labels, "metric": name}.items()
                given = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
                lines.append(f"{family}{{{given}}} {_number(value)}")
        return "".join(f"{line}\n" for line in lines)


def prometheus_name(metric: str) -> str:
    """A metric's name in Prometheus, which allows letters, digits and `_` alone: `val/pass@4` is `megarl_val_pass_at_4`."""
    return "megarl_" + re.sub(r"\W", "_", metric.replace("@", "_at_"), flags=re.ASCII)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


@contextmanager
def serve_metrics(port: int | None, project: str, run: str) -> Iterator[list[Tracker]]:
    """Serve the metrics of the yielded tracker during the block, on all interfaces; `port` None: nothing is served.

    Raises:
        ValueError: the port is taken, or this user may not open it.
    """
    if port is None:
        yield []
        return
    endpoint = Endpoint(project, run)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = endpoint.text().encode() if found else b"the metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: Any) -> None:
            """Requests are not printed among the run's lines."""

    try:
        server = ThreadingHTTPServer(("", port), Handler)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"trainer.metrics_port={port}: {reason}; give a port that is free, or leave it out"
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield [endpoint]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
