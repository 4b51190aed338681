"""Every recipe for GPUs in its real size: ranks of its first, middle and last stages, against the plan."""

import pytest

from megarl.plan.inputs import read_inputs
from megarl.plan.memory import GIB, plan_memory
from megarl.shadow.comparison import compare
from megarl.shadow.dry_run import CLASSES, chosen_ranks, run_ranks
from tests.test_recipes import ON_GPUS, ROOT

TOLERANCE = 0.05


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", ON_GPUS)
def test_its_ranks_take_what_was_planned(machine, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    path = f"recipes/{recipe}.yaml"
    config, inputs = read_inputs(path, [], check=False)
    ranks = chosen_ranks(config, inputs, CLASSES)
    plan = plan_memory(config, inputs, 80 * GIB, 0)
    for report in run_ranks(path, [], ranks):
        rows = list(compare(plan, report))
        trains = report["role"] in ("actor", "critic")  # a reference and a reward model do not
        phases = {"always", "evaluate", "release", *(["update"] if trains else [])}
        assert {row.phase for row in rows} >= phases
        for row in rows:
            if row.phase == "always":
                assert row.planned == pytest.approx(row.found, rel=1e-3), row
            else:
                assert row.difference > -TOLERANCE, row
        # flash-linear-attention (0.6.0) keeps the indices of its last chunks of sequences (fla/utils/decorators.py, tensor_cache).
        kept = 0 if inputs.model.delta_net is None else 1 << 20
        assert not trains or 0 <= report["phases"]["update"]["left"] <= kept
        # A bucket for the engines takes few kernel launches to pack, however many slices it has, and whatever they are computed from.
        if report["role"] == "actor":
            assert report["sent_buckets"] and max(launches for _, launches in report["sent_buckets"]) <= 10
            assert max(slices for slices, _ in report["sent_buckets"]) > 10
