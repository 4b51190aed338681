"""Steps of short runs with options: what of them needs no GPU."""

from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from megarl.config import TrainConfig, check_config, load_config, resolve
from megarl.config.model_fit import check_models
from megarl.gpu_test import options
from megarl.gpu_test.options import (
    DEEPEP,
    ENGINES,
    EXPERTS,
    FAMILIES,
    LAYOUTS,
    NUM_STEPS,
    ONE,
    OPTIONS,
    TWO,
    Case,
    judged,
)
from megarl.models import read_model_config
from megarl.util.packages import shipped


@pytest.mark.parametrize(
    ("settings", "case"),
    [
        *((ONE, case) for case in (*OPTIONS, *ENGINES, *FAMILIES)),
        *((TWO, case) for case in (*LAYOUTS, *EXPERTS, *DEEPEP)),
    ],
)
def test_the_keys_fit_the_recipe_and_the_model(tmp_path: Path, settings: tuple[str, ...], case: Case) -> None:
    make_tiny_model(tmp_path / "model", ["two words"], family=case.family, **options.sizes(case.family))
    (tmp_path / "train.parquet").touch()
    paths = [f"actor_rollout_ref.model.path={tmp_path}/model", f"data.train_files={tmp_path}/train.parquet"]
    config = load_config(
        TrainConfig, shipped() / "recipes" / "quickstart_ppo.yaml", [*settings, *case.keys, *paths]
    )
    check_config(config)
    model = read_model_config(tmp_path / "model")
    check_models(resolve(config), model, model, None)
    assert config.trainer.total_training_steps == NUM_STEPS


def test_every_run_is_judged_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With runs that write their metrics alone: one that ends well, one that ends too early, one whose gradient is infinite."""
    norms = iter((1.0, 2.0, float("inf")))

    def run(command: list[str], check: bool) -> object:
        folder = Path(next(key for key in command if "default_local_dir" in key).partition("=")[2])
        folder.mkdir()
        norm, steps = next(norms), 1 if "early" in command else 2
        difference = f'"training/rollout_log_prob_diff_mean": {0.01 * norm}'
        lines = [
            f'{{"step": {step}, "actor/grad_norm": {norm}, {difference}}}\n' for step in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(lines).replace(": inf", ": Infinity"))
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(options.subprocess, "run", run)
    cases = (Case("as it is"), Case("cut", ("early",)), Case("wild"))
    checks = list(options.run_all(tmp_path, ONE, cases, close=0.015))
    assert [check.ok for check in checks] == [True, None, True, False, None, False, False, None, False]
    assert checks[4].found == "2, of the model's first run 1"
    assert checks[5].found == "0.02 nats apart in the mean (at most 0.015)"
    assert "not finite: actor/grad_norm" in checks[6].found
    assert judged("killed", -9, []).ok is False
