"""The script of the three stages: its commands, and in a slow test what each stage gains."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.three_stages import DEFAULT_OUT, POLICIES, commands
from megarl.config import TrainConfig, resolve, to_dict
from megarl.config.loading import SCHEMAS, load_config

REPOSITORY = Path(__file__).resolve().parents[2]


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from texts(part)
    elif isinstance(value, str):
        yield value


def test_all_commands_stay_in_the_folder_that_is_asked_for() -> None:
    """No resolved command has the recipes' own folder left; every seed is the one asked for."""
    stages = commands("elsewhere", seed=7)
    assert stages.pop("make_task")[:5] == ("make-task", "elsewhere", "--preferences", "--seed", "7")
    for name, (command, recipe, *overrides) in stages.items():
        config = to_dict(resolve(load_config(SCHEMAS[command], recipe, overrides)))
        paths = [text for text in texts(config) if DEFAULT_OUT in text or text.startswith("elsewhere")]
        assert paths and all(path.startswith("elsewhere/") for path in paths), (name, paths)
        assert config["trainer"]["default_local_dir"] == f"elsewhere/{name.replace('_', '-')}"
        seeds = [
            config[section]["seed"] for section in ("data", "rollout") if "seed" in config.get(section, {})
        ]
        assert 7 in seeds, name
    config = to_dict(resolve(load_config(TrainConfig, stages["ppo"][1], stages["ppo"][2:])))
    assert config["trainer"]["seed"] == config["actor_rollout_ref"]["rollout"]["seed"] == 7


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_each_stage_gains(tmp_path: Path) -> None:
    """The margins leave room below the worse of the two runs in docs/three_stages.md: another processor rounds differently, and its training
    takes another course."""
    out = tmp_path / "three"
    done = subprocess.run(
        [sys.executable, "examples/three_stages.py", "--out", str(out), "--seed", "2"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=2300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    rule = summary["rule"]
    assert set(rule) == set(POLICIES)
    assert rule["pretrain"]["perfect"] < 0.05
    assert rule["sft"]["perfect"] > rule["pretrain"]["perfect"] + 0.15
    *_, accuracy = summary["rm_accuracy"].values()
    assert accuracy > 0.75
    assert rule["ppo"]["perfect"] > rule["sft"]["perfect"] + 0.12
    for quality in ("name", "thing", "tone"):
        assert rule["ppo"][quality] > rule["sft"][quality] - 0.05, quality
    assert rule["dpo"]["perfect"] > rule["sft"]["perfect"]
    assert summary["reward"][1] > summary["reward"][0]
    assert summary["ptx_loss"][1] < summary["ptx_loss"][0]
