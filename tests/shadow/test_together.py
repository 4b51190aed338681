"""All ranks of tiny jobs at the same time, on uneven data: their collectives fit together, and an omitted one is named."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.plan.inputs import read_inputs
from megarl.shadow.agree import Agreement
from megarl.shadow.agreement import agreements, all_ranks
from megarl.shadow.collectives import Collective
from megarl.shadow.dry_run import ENVIRONMENT
from tests.shadow.conftest import RECIPE, expert_overrides, overrides
from tests.shadow.together_cases import Case

WITHOUT_CRITIC = ["critic=null", "algorithm.adv_estimator=grpo"]
FOUR = [("actor", rank) for rank in range(4)]


def run(cases: list[Case], out: Path) -> list[list[dict]]:
    """The reports of each case."""
    environment = {**os.environ, **ENVIRONMENT}
    process = subprocess.run(
        [sys.executable, "-m", "tests.shadow.together_cases", str(out)],
        input=json.dumps([asdict(case) for case in cases]),
        env=environment,
        cwd=RECIPE.parents[1],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))


def logs(reports: list[dict]) -> dict[int, list[Collective]]:
    return {report["rank"]: [Collective.from_json(one) for one in report["log"]] for report in reports}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together-experts") / "model"
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 2}
    return make_tiny_model(folder, ["two words"], family="deepseek_v3", **sizes)


@pytest.fixture(scope="module")
def cases(machine: None, small: Path, experts: Path, tmp_path_factory) -> dict[str, list[dict]]:
    """Reports by case: TP2 PP2 without and with a fault, and experts with TP2 EP2."""
    dense = [*overrides(small), *WITHOUT_CRITIC]
    found = {
        "dense": Case(str(RECIPE), dense, FOUR, 3),
        "send": Case(str(RECIPE), dense, FOUR, 3, fault="send", faulty=1),
        "experts": Case(str(RECIPE), expert_overrides(experts), FOUR, 1),
    }
    out = tmp_path_factory.mktemp("cases") / "reports.json"
    return dict(zip(found, run(list(found.values()), out), strict=True))


def of_actor(reports: list[dict]) -> Agreement:
    return agreements(reports)["actor"]


@pytest.mark.slow
def test_ranks_with_uneven_micro_batches_agree(cases) -> None:
    found = of_actor(cases["dense"])
    assert found.problems == [] and found.open_ended == 0 and found.matched > 150
    # Stage 0 tells stage 1 the shapes of its outputs: three micro-batches of three sizes.
    received = {
        one.sizes for one in logs(cases["dense"])[2] if one.operation == "recv_" and one.sizes[0][0] > 3
    }
    assert len(received) == 3


@pytest.mark.slow
def test_ranks_with_uneven_experts_agree(cases) -> None:
    found = of_actor(cases["experts"])
    assert found.problems == [] and found.open_ended == 0
    exchanges = [
        [one for one in log if one.operation == "alltoall_base_"] for log in logs(cases["experts"]).values()
    ]
    assert all(len(of_rank) == len(exchanges[0]) >= 6 for of_rank in exchanges)
    uneven = [one for of_rank in exchanges for one in of_rank if len(set(one.sends)) > 1]
    assert len(uneven) >= 8
    # A rank expects other sizes than it sends: its peers told it the sizes.
    assert any(one.sends != one.expects for one in uneven)


@pytest.mark.slow
def test_a_send_that_a_worker_leaves_out_shows_in_its_receivers_shapes(cases) -> None:
    """Rank 3 takes the next output for the omitted one, while its neighbour gets the right one; the other ranks are stopped."""
    reports = cases["send"]
    assert [report["rank"] for report in reports if report.get("stopped")] == [0, 1, 2]
    (problem, *_) = of_actor(reports).problems
    assert "of group [2, 3] is not the same on its ranks: rank 2 calls all_gather of " in problem, problem
    assert ", rank 3 all_gather of " in problem


def test_a_world_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    root = RECIPE.parents[1]
    monkeypatch.chdir(root)
    config, inputs = read_inputs(str(root / "recipes" / "deepseek_v3_grpo_512x80gb.yaml"), [], check=False)
    with pytest.raises(ValueError, match="at most 64, and the actor has 512"):
        all_ranks(config, inputs, ["actor"])
