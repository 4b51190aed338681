"""`recipe:NAME`: the recipes that come with megarl, from any folder."""

from pathlib import Path

import pytest

from megarl.cli.main import RUNNERS, main
from megarl.config import TrainConfig, load_config
from megarl.config.loading import load_with_origins
from megarl.config.loading.recipes import meant_recipe, recipe_path, recipes, shown
from megarl.launch.job import make_job

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory that has no recipes."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("quickstart_ppo", "quickstart_ppo.yaml"),
        ("quickstart_ppo.yaml", "quickstart_ppo.yaml"),
        ("qwen2.5_7b_dapo", "qwen2.5_7b_dapo.yaml"),
        ("bases/math_grpo", "bases/math_grpo.yaml"),
        ("models/qwen2.5-7b", "models/qwen2.5-7b"),
        ("three_stages_rule.py", "three_stages_rule.py"),
    ],
)
def test_names(name: str, file: str) -> None:
    assert recipe_path(f"recipe:{name}") == RECIPES / file
    assert shown(RECIPES / file) == f"recipe:{name.removesuffix('.yaml')}"


def test_other_paths_stay_as_they_are() -> None:
    assert recipe_path("quickstart_ppo") == Path("quickstart_ppo") and shown("x/y") == "x/y"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quickstart_pp", "there is no recipe:quickstart_pp; did you mean recipe:quickstart_ppo?"),
        ("deepseek-v3", "did you mean recipe:models/deepseek-v3?"),
        ("../setup", "`megarl recipes` lists them"),
        ("", "there is no recipe:: `megarl recipes` lists them"),
    ],
)
def test_no_recipe(name: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        recipe_path(f"recipe:{name}")
    assert words in str(error.value)


def test_a_file_that_is_not_there_may_be_meant_as_a_recipe(capsys: pytest.CaptureFixture) -> None:
    assert main(["config", "recipes/quickstart_pp0.yaml"]) == 2
    assert "did you mean recipe:quickstart_ppo?" in capsys.readouterr().err
    assert meant_recipe(Path("of_my_own.yaml")) == ""


def test_values_name_the_recipe_as_their_origin() -> None:
    config, origins = load_with_origins(TrainConfig, "recipe:qwen2.5_7b_dapo", ["trainer.seed=3"])
    assert config.actor_rollout_ref.model.path == str(RECIPES / "models/qwen2.5-7b")
    assert origins["actor_rollout_ref.model.path"].startswith("recipe:qwen2.5_7b_dapo line ")
    assert origins["actor_rollout_ref.actor.optim.lr"].startswith(str(RECIPES / "bases/math_grpo.yaml line "))


def test_a_base_and_a_model_can_be_named_so(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: recipe:quickstart_ppo\ncritic: {model: {path: 'recipe:models/llama-3-8b'}}\n")
    config = load_config(TrainConfig, mine)
    assert config.data.train_batch_size == 128
    assert config.critic is not None and config.critic.model.path == str(RECIPES / "models/llama-3-8b")
    mine.write_text("base: recipe:quickstart_pp\n")
    with pytest.raises(ValueError, match=r"did you mean recipe:quickstart_ppo\?"):
        load_config(TrainConfig, mine)
    mine.write_text(
        "base: recipe:quickstart_ppo\nactor_rollout_ref:\n  model:\n    path: recipe:models/llama-3\n"
    )
    words = r"mine.yaml line 4: actor_rollout_ref.model.path: there is no recipe:models/llama-3; did you mean"
    with pytest.raises(ValueError, match=words):
        load_config(TrainConfig, mine)


def test_plans_from_anywhere(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", "memory", "recipe:deepseek_llm_7b_ppo"]) == 0
    assert capsys.readouterr().out.startswith("recipe:models/deepseek-llm-7b: 8 devices in pool global")
    layout = ["--train", "tp2", "--rollout", "tp2", "--devices", "2"]
    assert main(["plan", "sync", "--model", "recipe:models/qwen2.5-0.5b", *layout]) == 0
    assert "Qwen2ForCausalLM: 0.5B parameters" in capsys.readouterr().out
    assert main(["plan", "sync", "--model", "recipe:models/qwen2.5-0.6b", *layout]) == 2
    assert "did you mean recipe:models/qwen2.5-0.5b?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "sft", "rm", "dpo", "eval", "doctor"])
def test_every_command_takes_one(command: str, capsys: pytest.CaptureFixture) -> None:
    """Each command reads the recipe and then reports that its data are missing: they would be made in the working directory."""
    name = {"train": "ppo", "doctor": "ppo"}.get(command, command)
    recipe = {"rm": "preference_rm", "dpo": "three_stages_dpo_cpu"}.get(command, f"quickstart_{name}")
    assert main([command, f"recipe:{recipe}"]) in (1, 2)
    said = capsys.readouterr()
    assert "outputs/" in said.out + said.err and "unknown key" not in said.out + said.err
    assert "there is no recipe:" not in said.err


def test_a_job_gets_what_is_on_other_machines(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Slurm job gets the path of the file in this installation, which its nodes share; a Kubernetes job gets the complete text, with names that the
    image's own megarl resolves."""
    job = make_job("train", "recipe:qwen2.5_72b_grpo_lora", [], None, [])
    assert job.recipe == RECIPES / "qwen2.5_72b_grpo_lora.yaml"
    assert job.launch.name == "qwen2-5-72b-grpo-lora"
    assert "path: recipe:models/qwen2.5-72b" in job.recipe_text()
    assert main(["launch", "slurm", "recipe:qwen2.5_72b_grpo_lora", "--dry-run"]) == 0
    assert f" -- {RECIPES}/qwen2.5_72b_grpo_lora.yaml" in capsys.readouterr().out
    given = []
    monkeypatch.setitem(RUNNERS, "sft", lambda options: given.append(options.recipe))
    assert main(["launch", "local", "recipe:quickstart_sft", "--command", "sft"]) == 0
    assert given == [str(RECIPES / "quickstart_sft.yaml")]


def test_the_list_has_every_recipe_that_a_command_runs(capsys: pytest.CaptureFixture) -> None:
    found = {recipe.name: recipe for recipe in recipes()}
    assert found.keys() == {path.stem for path in RECIPES.glob("*.yaml")}
    assert found["three_stages_rm_cpu"].command == "rm"
    assert found["quickstart_eval"].text == "Accuracy on the demo's held-out problems, greedy"
    assert all(30 < len(recipe.text) < 250 for recipe in found.values())
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(f"recipe:{name} " in listed for name in found)


def test_one_is_printed_as_it_is(capsys: pytest.CaptureFixture) -> None:
    for name, file in (
        ("quickstart_sft", "quickstart_sft.yaml"),
        ("recipe:bases/gsm8k_ppo", "bases/gsm8k_ppo.yaml"),
        ("models/llama-3-8b", "models/llama-3-8b/config.json"),
    ):
        assert main(["recipes", name]) == 0
        assert capsys.readouterr().out == (RECIPES / file).read_text()
    assert main(["recipes", "quickstart_stf"]) == 2
    assert "did you mean recipe:quickstart_sft?" in capsys.readouterr().err
