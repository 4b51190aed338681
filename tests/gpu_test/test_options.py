"""The parts of the steps with short runs and options that need no GPU."""

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
from megarl.gpu_test.runner import LOG
from megarl.models import read_model_config
from megarl.trainer.run.logger import RunLogger
from megarl.util.packages import shipped


@pytest.mark.parametrize(
    ("settings", "case"),
    [
        *((ONE, case) for case in (*OPTIONS, *ENGINES, *FAMILIES)),
        *((TWO, case) for case in (*LAYOUTS, *EXPERTS, *DEEPEP)),
    ],
)
def test_the_keys_fit_the_recipe_and_the_model(tmp_path: Path, settings: tuple[str, ...], case: Case) -> None:
    make_tiny_model(tmp_path / "model", ["two words"], family=case.family, **options.sizes(case))
    (tmp_path / "train.parquet").touch()
    paths = [f"actor_rollout_ref.model.path={tmp_path}/model", f"data.train_files={tmp_path}/train.parquet"]
    config = load_config(
        TrainConfig, shipped() / "recipes" / "quickstart_ppo.yaml", [*settings, *case.keys, *paths]
    )
    check_config(config)
    model = read_model_config(tmp_path / "model")
    check_models(resolve(config), model, model, None)
    assert config.trainer.total_training_steps == NUM_STEPS


def test_the_engine_of_deepep_has_a_width_that_its_kernels_take() -> None:
    """The widths that its kernels for decode steps support (DeepEP 1.2.1, csrc/kernels/launch.cuh)."""
    for case in DEEPEP:
        assert options.sizes(case)["hidden_size"] in (2048, 2560, 4096, 5120, 6144, 7168, 8192)


def test_every_run_is_judged_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With runs that only write metrics: one ends well, one ends too early, one has an infinite gradient, one has a difference of NaN."""
    figures = iter(((1.0, 0.01), (2.0, 0.02), (float("inf"), 0.01), (1.0, float("nan"))))

    def run(command: list[str], check: bool) -> object:
        folder = Path(next(key for key in command if "default_local_dir" in key).partition("=")[2])
        norm, difference = next(figures)
        with RunLogger(folder, []) as logger:
            for step in range(1, 2 if "early" in command else 3):
                logger.log(step, {options.NORM: norm, options.DIFFERENCE: difference})
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(options.subprocess, "run", run)
    cases = (Case("as it is"), Case("cut", ("early",)), Case("wild"), Case("lost"))
    checks = list(options.run_all(tmp_path, ONE, cases, close=0.015))
    assert [check.ok for check in checks] == [
        *(True, None, True), *(False, None, False), *(False, None, True), *(False, None, False),
    ]  # fmt: skip
    assert checks[4].found == "2, of the model's first run 1"
    assert checks[5].found == "0.02 nats apart in the mean (at most 0.015)"
    assert "not finite: actor/grad_norm" in checks[6].found
    assert "not finite: training/rollout_log_prob_diff_mean" in checks[9].found
    assert judged("killed", -9, []).ok is False


def test_a_failed_run_comes_with_the_end_of_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run's output follows in the step's log, of whose lines the step's record has only the last ones."""

    def run(command: list[str], check: bool) -> object:
        with (tmp_path / LOG).open("a") as log:
            log.write("error: the card is on fire\n" if "bad" in command else "fine\n" * 100)
        return type("Done", (), {"returncode": int("bad" in command)})

    monkeypatch.setattr(options.subprocess, "run", run)
    checks = list(options.run_all(tmp_path, ONE, (Case("one", ("bad",)), Case("two"))))
    assert "the card is on fire" in checks[0].found and "fine" not in checks[1].found
