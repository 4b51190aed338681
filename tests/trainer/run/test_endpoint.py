"""Metrics of a run as Prometheus reads them."""

import math
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from megarl.config import SFTConfig, load_config, resolve
from megarl.trainer.run.endpoint import prometheus_name, serve_metrics
from megarl.trainer.run.logger import RunLogger
from megarl.trainer.run.start import open_run

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "quickstart_sft.yaml"


# A sample in Prometheus's text format, version 0.0.4, with the labels of the run below.
SAMPLE = re.compile(
    r'(?P<name>[a-zA-Z_][a-zA-Z0-9_]*){project="a project",run="ppo \\"2\\"",metric="(?P<metric>[^"\\]*)"} (?P<value>\S+)'
)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        return server.getsockname()[1]


def scraped(port: int) -> Mapping[tuple[str, str], float]:
    """The value of each sample, by its name and the metric in its label."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = response.read().decode().splitlines()
    types = [line.split()[2:] for line in lines if line.startswith("#")]
    assert all(kind == "gauge" for _, kind in types) and len({name for name, _ in types}) == len(types)
    samples = [SAMPLE.fullmatch(line) for line in lines if not line.startswith("#")]
    return {(one["name"], one["metric"]): float(one["value"]) for one in samples}


def test_the_newest_value_of_each_metric_is_served_until_the_run_ends(tmp_path: Path) -> None:
    port = free_port()
    with (
        serve_metrics(port, "a project", 'ppo "2"') as trackers,
        RunLogger(tmp_path, [], trackers=trackers) as logger,
    ):
        assert scraped(port) == {}
        logger.log(1, {"actor/entropy": 1.5, "val/pass@4": 0.25, "val/pass_at_4": 7.0})
        logger.log(2, {"actor/entropy": math.nan, "actor/ratio_max": math.inf})
        found = dict(scraped(port))
        assert found.pop(("megarl_step_end_time_seconds", "step_end_time_seconds")) > 1.7e9
        assert math.isnan(found.pop(("megarl_actor_entropy", "actor/entropy")))
        assert found == {
            ("megarl_step", "step"): 2,
            ("megarl_actor_ratio_max", "actor/ratio_max"): math.inf,
            ("megarl_val_pass_at_4", "val/pass@4"): 0.25,  # from the step before: step 2 has none
            ("megarl_val_pass_at_4", "val/pass_at_4"): 7.0,
        }
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://127.0.0.1:{port}/", timeout=10)
    with pytest.raises(URLError):
        scraped(port)


def test_a_run_whose_port_is_taken_ends_before_its_cluster_starts(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        keys = [f"trainer.metrics_port={port}", f"trainer.default_local_dir={tmp_path}"]
        config = resolve(load_config(SFTConfig, RECIPE, keys))
        with (
            pytest.raises(ValueError, match=rf"trainer\.metrics_port={port}: .*; give a port that is free"),
            open_run(config, 1),
        ):
            pass


def test_names_are_of_letters_digits_and_underscores() -> None:
    assert prometheus_name("timing_s/step") == "megarl_timing_s_step"
    assert prometheus_name("val/größe µ:x") == "megarl_val_gr__e___x"
