"""docs/plugins.md: its examples run and its messages are the real ones, word for word."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml

from megarl.algorithms.advantages import ESTIMATORS, AdvantageBatch, AdvantageOptions, compute_advantages
from megarl.algorithms.policy_loss import POLICY_LOSSES, PolicyLossOptions, PolicyTokens, policy_loss
from megarl.config import EvalConfig, TrainConfig, load_config
from megarl.config.checks import check_config
from megarl.config.schema import walk
from megarl.config.schema.data import SamplerConfig
from megarl.data.samplers import SAMPLERS, epoch_order, make_sampler
from megarl.environments import find_environment
from megarl.environments.environment import ENVIRONMENTS, Environment, StepResult, Task, Turn
from megarl.rewards import registry
from megarl.rewards.registry import REWARDS, RewardFunctions, RewardSpec, load_reward_function, rules_of
from megarl.rewards.sample import read_result
from megarl.util.plugins import load_plugins

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/plugins.md").read_text()
FILES = dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
RECIPES = [
    yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
]
REGISTRIES = (ESTIMATORS, POLICY_LOSSES, REWARDS, SAMPLERS, ENVIRONMENTS)
TOKENS = {"offsets": torch.tensor([0, 2, 5]), "mask": torch.tensor([True, True, True, True, False])}


def of_megarl(entry: Any) -> bool:
    return entry.__module__.partition(".")[0] == "megarl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's files, imported; other tests do not see their registry entries, nor they those of other tests."""
    folder = tmp_path_factory.mktemp("plugins")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        for known in REGISTRIES:
            ours = {name: entry for name, entry in known._entries.items() if of_megarl(entry)}
            patch.setattr(known, "_entries", ours)
        patch.setattr(registry, "_RULE_OF", dict(registry._RULE_OF))
        patch.setattr(registry, "_COMPARES", set(registry._COMPARES))
        load_plugins([str(folder / name) for name in FILES if name != "my_reward.py"])
        yield folder


@pytest.fixture
def train(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainConfig]:
    """A valid configuration with overrides, in the folder of the page's files."""
    for name in ("config.json", "train.parquet"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(folder)
    required = (
        f"data.train_files={tmp_path}/train.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=24",
        "data.max_response_length=40",
        f"actor_rollout_ref.model.path={tmp_path}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
    )

    def load(tree: dict[str, Any]) -> TrainConfig:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree))
        own = [line for line in required if not any(line.startswith(f"{key}=") for key, _ in leaves(tree))]
        config = load_config(TrainConfig, path, own)
        check_config(config)
        return config

    return load


def leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in tree.items():
        found += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found


def said(text: str) -> bool:
    """Whether the page shows this message, except for parts shortened to `...`."""
    shown = re.findall(r"^\| .* \| `(.*)` \|$", PAGE, re.MULTILINE)
    return any(re.fullmatch(re.escape(line).replace(r"\.\.\.", ".*"), text, re.DOTALL) for line in shown)


def message(function: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        function()
    return str(caught.value)


def test_the_page_has_an_example_of_each_decorator() -> None:
    used = set(re.findall(r"^@(register_\w+)\(", "\n".join(FILES.values()), re.MULTILINE))
    assert used == set(re.findall(r"^\| `@(register_\w+)", PAGE, re.MULTILINE))
    defined = [path.read_text() for path in (ROOT / "megarl").rglob("*.py")]
    assert used == {
        name
        for text in defined
        for name in re.findall(r"^(?:def )?(register_\w+)(?: = |\()", text, re.MULTILINE)
        if name != "register_reward" or "_RULE_OF" in text
    }


def test_the_keys_that_name_them_exist() -> None:
    keys = {key for schema in (TrainConfig, EvalConfig) for key, _, _ in walk(schema)}
    table = re.findall(r"^\| `@register_\w+\(.*\)` \| `([\w.]+)` \| `([\w.]+)`", PAGE, re.MULTILINE)
    assert len(table) == len(REGISTRIES)
    for module, key in table:
        assert key in keys
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
    assert all(any(key.endswith(known.key) for _, key in table) for known in REGISTRIES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: ",".join(recipe))
def test_the_recipes_are_accepted(recipe: dict[str, Any], train: Callable[..., TrainConfig]) -> None:
    if "my_parts.py" in recipe.get("plugins", ()):
        recipe = {"plugins": ["guess.py"]}
    config = train(recipe)
    for known, name in (
        (ESTIMATORS, config.algorithm.adv_estimator),
        (POLICY_LOSSES, config.actor_rollout_ref.actor.policy_loss.loss_mode),
        (SAMPLERS, config.data.sampler.name),
        (ENVIRONMENTS, config.actor_rollout_ref.rollout.multi_turn.environment),
        (REWARDS, config.reward.rule),
    ):
        assert name is None or name in known


def test_an_estimator_of_ones_own_may_have_a_critic(train: Callable[..., TrainConfig]) -> None:
    critic = {"optim": {"lr": 1e-5}, "ppo_max_token_len_per_gpu": 128}
    tree = {"plugins": ["batch_mean.py"], "algorithm": {"adv_estimator": "batch_mean"}, "critic": critic}
    assert train(tree).critic is not None
    with pytest.raises(ValueError, match="'grpo' has no critic"):
        train({"critic": critic})


@pytest.fixture
def batch() -> AdvantageBatch:
    rewards = torch.tensor([0.0, 1.0, 0.0, 3.0, 0.0])
    return AdvantageBatch(rewards, TOKENS["mask"], TOKENS["offsets"], prompt_uids=["a", "b"])


@pytest.mark.usefixtures("folder")
def test_the_estimator(batch: AdvantageBatch) -> None:
    result = compute_advantages("batch_mean", batch, AdvantageOptions())
    assert result.advantages.tolist() == [-1.0, -1.0, 1.0, 1.0, 0.0] and result.returns is None


@pytest.mark.usefixtures("folder")
def test_the_policy_loss() -> None:
    log_probs = torch.tensor([-1.0, -0.5, -3.0], requires_grad=True)
    tokens = PolicyTokens(
        mask=torch.tensor([True, True, False]),
        weights=torch.tensor([0.5, 0.5, 0.5]),
        old_log_probs=torch.tensor([-1.0, -1.5, float("nan")]),
        advantages=torch.tensor([2.0, 1.0, 1.0]),
    )
    loss, sums = policy_loss(log_probs, tokens, PolicyLossOptions(0.2, 0.25, None, loss_mode="capped"))
    assert loss.item() == pytest.approx(0.5 * 2.0 * 1.0 + 0.5 * 1.25 * 0.5)
    assert sums["actor/capped"] == 1 and sums["actor/capped"].dtype == torch.float64
    loss.backward()
    assert log_probs.grad.tolist() == [-1.0, -0.625, 0.0]  # -weight * ratio * advantage


@pytest.mark.usefixtures("folder")
def test_the_reward_rule() -> None:
    assert rules_of(["mine/estimates", "mine/guesses_2"]) == {
        "mine/estimates": "close",
        "mine/guesses_2": "close",
    }
    reward = RewardFunctions(RewardSpec(rule="close")).of("any").function
    row = {"data_source": "mine/estimates", "ground_truth": "7", "extra_info": {}}
    score = read_result("a", reward(solution_str="I say 8", **row), 0.0)
    assert (score.score, score.numbers, score.notes) == (0.5, {"is_number": 1.0}, {"pred": "8"})
    assert read_result("a", reward(solution_str="eight", **row), 0.0).score == 0.0


def test_the_reward_function(folder: Path) -> None:
    [recipe] = [recipe["custom_reward_function"] for recipe in RECIPES if "custom_reward_function" in recipe]
    function = load_reward_function(str(folder / recipe["path"]), recipe["name"], recipe["reward_kwargs"])
    row = {"data_source": "d", "ground_truth": "7", "extra_info": {}}
    assert read_result("a", function(solution_str="it is 7", **row), 0.0).score == 1.1
    assert read_result("a", function(solution_str="no" * 200, **row), 0.0).score == 0.0


@pytest.fixture
def prompts() -> pa.Table:
    return pa.table({"uid": ["a", "b", "c"], "prompt_ids": [[1], [1, 2, 3], [1, 2]]})


@pytest.mark.usefixtures("folder")
def test_the_samplers(prompts: pa.Table) -> None:
    longest = make_sampler(SamplerConfig(name="longest_first"), shuffle=True)
    assert epoch_order(longest, prompts, seed=1, epoch=0).tolist() == [1, 2, 0]
    config = SamplerConfig(name="hardest_first", options={"unseen": 0.3})
    hardest = make_sampler(config, shuffle=True)
    assert hardest.learns
    hardest.update(["a", "c", "c"], np.array([1.0, 0.2, 0.0]))
    again = make_sampler(config, shuffle=True)
    again.load_state_dict(hardest.state_dict())
    for sampler in (hardest, again):
        assert epoch_order(sampler, prompts, seed=1, epoch=1).tolist() == [2, 1, 0]


@pytest.mark.usefixtures("folder")
def test_the_environment() -> None:
    environment: Any = find_environment("guess", {"closest": 1})(closest=1)
    assert isinstance(environment, Environment)
    environment.reset(Task("a/0", "Guess.", None, "mine", "40", {}))
    low = environment.step(Turn(0, "30", [1], "stop"))
    assert (low.observation, low.done, low.score) == ([{"role": "user", "content": "higher"}], False, 0.0)
    assert environment.step(Turn(1, " 41\n", [1], "stop")) == StepResult(
        done=True, score=1.0, numbers={"turns_needed": 2}
    )
    assert environment.step(Turn(0, "forty", [1], "stop")) == StepResult(done=True, score=0.0)


def test_what_is_said_of_files_and_names(
    folder: Path, tmp_path: Path, train: Callable[..., TrainConfig]
) -> None:
    assert any(
        said(line.removeprefix("  - "))
        for line in message(lambda: train({"plugins": ["nowhere.py"]})).splitlines()
    )
    broken = {
        "fails.py": "import no_such_module",
        "taken.py": "from megarl.algorithms.advantages import register_advantage\nregister_advantage('grpo')(len)",
        "source.py": "from megarl.rewards.registry import register_reward\nregister_reward('other', ['openai/gsm8k'])(len)",
    }
    for name, text in broken.items():
        (tmp_path / name).write_text(text)
        assert said(message(partial(load_plugins, [str(tmp_path / name)]))), name
    assert said(message(lambda: ESTIMATORS["batch_maen"]))
    functions = RewardFunctions(RewardSpec(rule="close"))
    assert said(message(lambda: functions.check([("train:0", "mine/estimates", "")])))
    assert said(message(lambda: find_environment("guess", {"nearest": 1})))
    (tmp_path / "two.py").write_text("def two(solution_str, ground_truth):\n    return 0.0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert said(message(lambda: load_reward_function("two.py", "two")))
    assert not said("something else")


@pytest.mark.usefixtures("folder")
def test_what_is_said_of_results(
    batch: AdvantageBatch, prompts: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAMPLERS._entries, "short", lambda table, seed, epoch: np.arange(2))
    short = make_sampler(SamplerConfig(name="short"), shuffle=True)
    assert said(message(lambda: epoch_order(short, prompts, seed=1, epoch=0)))

    def per_trajectory(batch: AdvantageBatch, options: AdvantageOptions) -> Any:
        from megarl.algorithms.advantages import AdvantageResult

        return AdvantageResult(torch.zeros(2), None)

    monkeypatch.setitem(ESTIMATORS._entries, "per_trajectory", per_trajectory)
    assert said(message(lambda: compute_advantages("per_trajectory", batch, AdvantageOptions())))
    monkeypatch.setitem(
        POLICY_LOSSES._entries, "summed", lambda log_probs, tokens, options: (log_probs.sum(), {})
    )
    three = torch.zeros(3)
    tokens = PolicyTokens(torch.ones(3, dtype=torch.bool), three, three, three)
    options = PolicyLossOptions(0.2, 0.2, None, loss_mode="summed")
    assert said(message(lambda: policy_loss(three, tokens, options)))
