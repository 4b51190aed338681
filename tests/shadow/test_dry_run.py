"""`megarl plan memory --dry-run`: which ranks it runs, what it refuses, what it prints."""

import json
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.plan.inputs import read_inputs
from megarl.shadow import device, dry_run
from megarl.shadow.comparison import Comparison
from megarl.shadow.dry_run import chosen_ranks
from tests.shadow.conftest import RECIPE, overrides

ROOT = RECIPE.parents[1]
DEEPSEEK = ROOT / "recipes" / "deepseek_v3_grpo_512x80gb.yaml"


def test_a_rank_of_each_class_is_chosen(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.chdir(ROOT)
    config, inputs = read_inputs(str(DEEPSEEK), [], check=False)
    assert chosen_ranks(config, inputs, "classes") == [("actor", 0), ("actor", 256), ("actor", 480)]
    config, inputs = read_inputs(str(RECIPE), overrides(model), check=False)
    assert chosen_ranks(config, inputs, "classes") == [
        ("actor", 0), ("actor", 2), ("critic", 0), ("critic", 2),
    ]  # fmt: skip
    assert chosen_ranks(config, inputs, "1,3") == [("actor", 1), ("actor", 3), ("critic", 1), ("critic", 3)]
    with pytest.raises(ValueError, match="ranks 0 to 3, not 4"):
        chosen_ranks(config, inputs, "0,4")
    with pytest.raises(ValueError, match="give classes or numbers"):
        chosen_ranks(config, inputs, "first")


def test_a_plan_that_is_too_small_is_negative() -> None:
    assert Comparison("actor 0", "actor_working", "update", 90, 100).difference == pytest.approx(-0.1)
    assert Comparison("actor 0", "actor_working", "update", 5, 0).difference == 1.0
    assert Comparison("actor 0", "actor_working", "update", 0, 0).difference == 0.0


def test_what_a_machine_lacks_is_said(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(device, "PACKAGES", tmp_path)
        assert main(["plan", "memory", str(RECIPE), "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert f"pip install --no-deps --target {tmp_path} -r {ROOT}/requirements/shadow.txt" in told
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["plan", "memory", str(RECIPE), "--dry-run"]) == 2
    assert "--dry-run: a shadow run compiles its device once, with g++" in capsys.readouterr().err


def test_ranks_agree_in_a_dry_run_only(capsys) -> None:
    assert main(["plan", "memory", str(RECIPE), "--agree"]) == 2
    assert "give --dry-run --agree" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--gpu-memory", "--reserve"])
def test_negative_memory_is_refused_by_its_option(option: str, capsys) -> None:
    assert main(["plan", "memory", str(RECIPE), "--dry-run", option, "-1"]) == 2
    assert f"{option} is -1 GiB; it must be at least 0" in capsys.readouterr().err


def test_engines_are_left_out_on_request(machine, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        dry_run, "run_ranks", lambda recipe, keys, ranks, **options: asked.append(ranks) or []
    )
    arguments = ["plan", "memory", str(RECIPE), *overrides(model), "--dry-run", "--ranks", "1"]
    assert main(arguments) == main([*arguments, "--without-engines"]) == 0
    assert asked == [[("actor", 1), ("critic", 1), ("rollout", 0)], [("actor", 1), ("critic", 1)]]


@pytest.mark.slow
def test_the_command_prints_the_comparison(machine, small: Path, capsys) -> None:
    arguments = ["plan", "memory", str(RECIPE), *overrides(small), "--dry-run", "--ranks", "1,3"]
    assert main([*arguments, "--agree", "--json"]) in (0, 1)
    printed = json.loads(capsys.readouterr().out)
    assert {row["owner"] for row in printed["comparisons"]} >= {
        "actor_weights",
        "critic_optimizer",
        "ref_weights",
        "rollout_weights",
        "rollout_kv_cache",
    }
    assert [(report["role"], report["rank"]) for report in printed["ranks"]] == [
        ("actor", 1), ("actor", 3), ("critic", 1), ("critic", 3), ("rollout", 0),
    ]  # fmt: skip
    assert set(printed["agreement"]) == {"actor", "critic"}
    for agreement in printed["agreement"].values():
        assert agreement["ranks"] == [0, 1, 2, 3] and agreement["problems"] == []
        assert agreement["matched"] > 0 and agreement["open_ended"] == 0
