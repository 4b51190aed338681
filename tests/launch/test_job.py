"""One description of a job: the recipe and the options agree, or the message names both."""

import os
import re
from pathlib import Path

import pytest

from megarl.cli.main import RUNNERS, main
from megarl.config import TrainConfig, load_config
from megarl.config.schema import section_type, walk
from megarl.config.schema.launch import LaunchConfig
from megarl.launch.job import Job, make_job, name_of, read_variables, seconds_of

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes/deepseek_v3_grpo_lora.yaml")
SFT = str(ROOT / "recipes/quickstart_sft.yaml")


def job(*options: str, overrides: tuple[str, ...] = (), recipe: str = RECIPE, file: str | None = None) -> Job:
    return make_job("train", recipe, list(overrides), file, list(options))


def test_the_recipe_says_how_many_nodes() -> None:
    made = job()
    assert (made.nodes, made.devices, made.launch.name) == (2, 8, "deepseek-v3-grpo-lora")
    assert (made.overrides, made.saves, made.run_folder) == ((), False, "outputs/megarl/ppo")


def test_options_that_say_the_same_change_nothing() -> None:
    assert job("nodes=2", "gpus_per_node=8") == job()


def test_a_contradiction_names_both() -> None:
    with pytest.raises(
        ValueError, match=r"--nodes 4 and trainer.nnodes=2 \(.*lora.yaml line \d+\) contradict"
    ):
        job("nodes=4")
    with pytest.raises(
        ValueError, match=r"--gpus-per-node 4 and trainer.n_gpus_per_node=8 \(override .*\) contradict"
    ):
        job("gpus_per_node=4", overrides=("trainer.n_gpus_per_node=8",))


def test_a_recipe_that_says_nothing_gets_the_nodes(tmp_path: Path) -> None:
    recipe = tmp_path / "free.yaml"
    text = Path(RECIPE).read_text()
    recipe.write_text(text.replace("  nnodes: 2\n", ""))
    made = job("nodes=2", recipe=str(recipe))
    assert made.nodes == 2 and made.overrides == ("trainer.nnodes=2",)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_model_parallel_size"):
        job(overrides=("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=7",))


def test_a_file_of_keys_is_under_the_options(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("image: a\ntime: '90'\nslurm: {partition: gpu, mount: ['/data:/data']}\n")
    made = job("image=b", file=str(file))
    assert (made.launch.image, made.seconds, made.launch.slurm.mount) == ("b", 5400, ("/data:/data",))
    file.write_text("slurm: {partitoin: gpu}\n")
    with pytest.raises(
        ValueError, match=r"job.yaml line 1: unknown key slurm.partitoin; did you mean slurm.partition"
    ):
        job(file=str(file))


def test_other_commands_have_jobs_too() -> None:
    made = make_job("sft", SFT, [], None, [])
    assert made.devices >= 1 and made.command == "sft"
    with pytest.raises(ValueError, match="unknown key"):
        make_job("train", SFT, [], None, [])


@pytest.mark.parametrize("name", ["1.10", "2026_11_30", "007", "1e3"])
def test_a_name_of_digits_is_the_same_in_the_recipe_of_a_cluster(name: str, tmp_path: Path) -> None:
    """Else a run 1.10 would be in the folder of the run 1.1, and go on from its checkpoint."""
    given = (f"trainer.experiment_name={name}", "trainer.profile_steps=[1, 2]", "trainer.save_minutes=.5")
    made = job(overrides=given)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(made.recipe_text())
    read = load_config(TrainConfig, recipe)
    assert read == load_config(TrainConfig, RECIPE, given)
    assert read.trainer.experiment_name == name and made.run_folder == f"outputs/megarl/{name}"


def test_what_no_job_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="ray_address=auto: the job starts a cluster of its own"):
        job(overrides=("trainer.ray_address=auto",))
    with pytest.raises(ValueError, match="retries=-1 is out of range"):
        job("retries=-1")
    with pytest.raises(ValueError, match=r"slurm.container='docker' is unknown"):
        job("slurm.container=docker")
    with pytest.raises(ValueError, match=r"(?s)name=A_b.*time: expected minutes"):
        job("name=A_b", "time=2h")


@pytest.mark.parametrize(
    ("time", "seconds"), [("90", 5400), ("00:01:30", 90), ("36:00:00", 129600), ("2-01:00:00", 176400)]
)
def test_times(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


@pytest.mark.parametrize("time", ["0", "1:30", "2h", "-1", "00:00:00"])
def test_no_times(time: str) -> None:
    with pytest.raises(ValueError, match="time"):
        seconds_of(time)


def test_names_are_the_recipes() -> None:
    assert name_of("recipes/Qwen2.5_72B_grpo.yaml") == "qwen2-5-72b-grpo"
    assert name_of("3_" + "x" * 60 + ".yaml") == "run-3-" + "x" * 41


def test_variables_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("A=1 2\n#B=no\n\nC=a=$b\nD=\n")
    assert read_variables(path) == {"A": "1 2", "C": "a=$b", "D": ""}
    path.write_text('A="1"\nA=2\nexport B=1\n')
    with pytest.raises(
        ValueError,
        match=r"(?s)3 problems.*line 1: A: the quotes.*line 2: A stands twice.*line 3: expected NAME",
    ):
        read_variables(path)
    with pytest.raises(ValueError, match=r"env_file: .*none does not exist"):
        read_variables(tmp_path / "none")


def test_local_runs_what_train_would(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    given = []
    monkeypatch.setitem(RUNNERS, "train", lambda options: given.append(options) or 75)
    (tmp_path / "env").write_text("MEGARL_TEST_OF_LAUNCH=x y\n")
    monkeypatch.setenv("MEGARL_TEST_OF_LAUNCH", "before")
    arguments = [
        "launch",
        "local",
        "recipes/quickstart_ppo.yaml",
        "--env-file",
        str(tmp_path / "env"),
        "trainer.seed=3",
    ]
    assert main(arguments) == 75
    (options,) = given
    assert (options.recipe, options.overrides) == ("recipes/quickstart_ppo.yaml", ["trainer.seed=3"])
    assert os.environ["MEGARL_TEST_OF_LAUNCH"] == "x y"
    assert main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out == "megarl train recipes/quickstart_ppo.yaml trainer.seed=3\n"
    assert len(given) == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ("resume_mode=path", "resume_from_path=outputs/other/checkpoints/step-9"),
            "copy the checkpoint that it begins with into outputs/megarl/ppo/checkpoints, or give --retries 0",
        ),
        (("resume_mode=disable",), "give another trainer.default_local_dir, or give --retries 0"),
    ],
)
def test_a_job_that_would_begin_again_where_it_began_is_refused(
    keys: tuple[str, ...], said: str, capsys: pytest.CaptureFixture
) -> None:
    """Slurm and KubeRay run the same command again: each start would set aside what the one before it has saved."""
    overrides = [f"trainer.{key}" for key in keys]
    slurm = ["launch", "slurm", RECIPE, "--dry-run"]
    assert main([*slurm, "trainer.save_freq=5", *overrides]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: trainer.{keys[0]}: a start after the first, ")
    assert message.endswith(f"leave it out and {said}\n")
    assert main([*slurm, "--retries", "0", "trainer.save_freq=5", *overrides]) == 0
    assert main(["launch", "local", RECIPE, "--dry-run", "trainer.save_freq=5", *overrides]) == 0
    assert main([*slurm, *overrides]) == 0  # nothing to set aside
    assert "note: the recipe saves no checkpoints" in capsys.readouterr().err
    assert main([*slurm, "trainer.save_freq=5"]) == 0
    assert capsys.readouterr().err == ""


def test_every_key_is_read() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "megarl/launch").glob("*.py"))
    read = set(re.findall(r"(?<=[.\"'])\w+", code))
    keys = [key for key, _, kind in walk(LaunchConfig) if section_type(kind) is None]
    assert len(keys) > 30
    assert {key for key in keys if key.rpartition(".")[2] not in read} == set()
