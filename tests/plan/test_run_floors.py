"""The floors in a run's report: computed from the run's own configuration and lengths; if there are none, the report says why."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.cli.main import main
from megarl.config import TrainConfig, load_config, resolve, save_config
from megarl.plan.run_floors import run_floors
from megarl.report.data import RunRecord, read_run
from megarl.trainer.run.facts import RunFacts, RunGpus
from tests.report.folders import Page, write_run

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "recipes" / "models" / "qwen2.5-7b"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return configured(write_run(tmp_path / "run"), MODEL)


def configured(run: Path, model: Path) -> Path:
    """The run with a configuration for eight GPUs."""
    keys = [f"actor_rollout_ref.model.path={model}", "data.max_response_length=1024"]
    config = load_config(TrainConfig, str(ROOT / "recipes" / "qwen2.5_7b_dapo.yaml"), keys)
    save_config(resolve(config), run / "config.yaml")
    return run


def report(capsys: pytest.CaptureFixture, folder: Path, *options: str) -> tuple[int, str, str]:
    """Exit code, text of the page, text on standard error."""
    code = main(["report", str(folder), *options])
    page = folder / "report.html"
    text = re.sub(r"\s+", " ", Page(page.read_text(encoding="utf-8")).text) if code == 0 else ""
    return code, text, capsys.readouterr().err


def test_a_phase_is_so_many_floors(folder: Path, capsys: pytest.CaptureFixture) -> None:
    floors = run_floors(read_run(folder), "H100")
    assert set(floors.seconds) >= {"sync", "generate", "update"} and min(floors.seconds.values()) > 0
    code, text, _ = report(capsys, folder, "--hardware", "h100")
    assert code == 0 and floors.words in text and "peaks of 8 H100" in floors.words
    for phase, took in (("generate", 6.0), ("update", 3.0), ("sync", 0.5)):  # seconds of each step
        assert f"{5 * took:.2f} s {took / floors.seconds[phase]:.1f} floors" in text


def test_faster_gpus_have_lower_floors(folder: Path) -> None:
    run = read_run(folder)
    slow, fast = (run_floors(run, name).seconds for name in ("A100", "B200"))
    assert all(fast[phase] < slow[phase] for phase in slow)


def test_generation_that_goes_on_while_models_learn_has_no_floor(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """A step of `fully_async` waits for a part of its generation alone: less time than the least for all of it would be no wonder."""
    keys = [
        f"actor_rollout_ref.model.path={MODEL}",
        "data.max_response_length=1024",
        "resource_pools={train: {n_gpus_per_node: 4}, rollout: {n_gpus_per_node: 4}}",
        "actor_rollout_ref.actor.resource_pool=train",
        "actor_rollout_ref.rollout.resource_pool=rollout",
    ]
    shown = {}
    for mode in ("one_step_off", "fully_async"):
        recipe = str(ROOT / "recipes" / "qwen2.5_7b_dapo.yaml")
        config = load_config(TrainConfig, recipe, [*keys, f"trainer.mode={mode}"])
        save_config(resolve(config), folder / "config.yaml")
        floors = run_floors(read_run(folder), "H100")
        assert {"sync", "update"} <= floors.seconds.keys()
        shown[mode] = "generate" in floors.seconds, "goes on while the models learn" in floors.words
    assert shown == {"one_step_off": (True, False), "fully_async": (False, True)}
    code, text, _ = report(capsys, folder, "--hardware", "H100")
    assert code == 0 and not re.search(r"30\.00 s [0-9.]+ floors", text)
    assert re.search(r"15\.00 s [0-9.]+ floors", text)  # of the updates


def with_gpus(folder: Path, *names: str) -> RunRecord:
    """The run, with these GPUs in its `run.json`."""
    gpus = tuple(RunGpus(name, 8, 80 << 30) for name in names)
    return replace(read_run(folder), facts=RunFacts("megarl train", 0.0, "host", 1, {}, gpus=gpus))


def test_the_gpus_are_those_that_the_run_has_recorded(folder: Path) -> None:
    found = run_floors(with_gpus(folder, "NVIDIA H200"), None)
    assert found.seconds and found == run_floors(read_run(folder), "H200")
    assert run_floors(with_gpus(folder, "NVIDIA H200"), "A100") == run_floors(read_run(folder), "A100")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("NVIDIA H100 PCIe",), "the peaks of NVIDIA H100 PCIe are not in the table"),
        (("NVIDIA H200", "NVIDIA B200"), "GPUs are of several kinds, NVIDIA H200, NVIDIA B200"),
    ],
)
def test_recorded_gpus_whose_peaks_are_not_known(folder: Path, names: tuple[str, ...], why: str) -> None:
    floors = run_floors(with_gpus(folder, *names), None)
    assert floors.seconds == {} and why in floors.words and "--hardware NAME" in floors.words


def test_without_a_record_and_a_name_there_are_none(folder: Path, capsys: pytest.CaptureFixture) -> None:
    code, text, _ = report(capsys, folder)
    assert code == 0 and not re.search(r"[0-9] floors", text)
    assert (
        "No floors: the run's GPUs were not recorded, and none were named (--hardware NAME); the peaks of a CPU are not known."
        in text
    )


def test_a_name_that_is_unknown_is_refused(folder: Path, capsys: pytest.CaptureFixture) -> None:
    code, _, error = report(capsys, folder, "--hardware", "H1000")
    assert code == 2 and "--hardware H1000 is not in the table; did you mean H100?" in error


def test_a_model_that_is_elsewhere_is_named(tmp_path: Path) -> None:
    run = read_run(configured(write_run(tmp_path / "run"), tmp_path / "gone"))
    floors = run_floors(run, "H100")
    assert (
        floors.seconds == {}
        and f"{tmp_path}/gone, a model of the run, is not on this machine" in floors.words
    )


def test_a_run_without_trajectories_has_none(folder: Path) -> None:
    shutil.rmtree(folder / "rollouts")
    floors = run_floors(read_run(folder), "H100")
    assert floors.seconds == {} and "the lengths of the run's trajectories are not known" in floors.words


@pytest.mark.parametrize(
    "keys",
    [
        [
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.teachers={math: {model: {path: GONE}}}",
        ],
        ["actor_rollout_ref.rollout.speculative={algorithm: eagle3, draft_path: GONE, num_draft_tokens: 3}"],
    ],
    ids=["teacher", "draft"],
)
def test_a_teacher_or_a_draft_that_is_elsewhere_is_named(tmp_path: Path, keys: list[str]) -> None:
    run = write_run(tmp_path / "run")
    given = [
        f"actor_rollout_ref.model.path={MODEL}",
        *(key.replace("GONE", f"{tmp_path}/gone") for key in keys),
    ]
    config = load_config(TrainConfig, str(ROOT / "recipes" / "qwen2.5_7b_dapo.yaml"), given)
    save_config(resolve(config), run / "config.yaml")
    floors = run_floors(read_run(run), "H100")
    assert (
        floors.seconds == {}
        and f"{tmp_path}/gone, a model of the run, is not on this machine" in floors.words
    )
