"""docs/from_verl.md: the keys, defaults, rules and commands that it names exist."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from megarl.algorithms.advantages import ESTIMATORS
from megarl.algorithms.policy_loss import POLICY_LOSSES
from megarl.config import TrainConfig, load_config
from megarl.config.problems import aliases, key_advice
from megarl.config.schema import walk
from megarl.config.schema.rewards import RULES
from megarl.rewards.registry import _RULE_OF, REWARDS, rules_of
from tests.config.test_problems import verl_keys

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/from_verl.md").read_text()
FIELDS = {key: field for key, field, _ in walk(TrainConfig)}
VERLS = set(verl_keys())
DOTTED = r"`((?:data|actor_rollout_ref|critic|algorithm|reward|reward_model|custom_reward_function|trainer)(?:\.\w+)+)`"


def rows(head: str) -> Iterator[list[str]]:
    """The cells of the table that begins with this row."""
    table = PAGE.split(f"\n{head}\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    for row in table:
        yield [cell.strip() for cell in row.strip("|").split(" | ")]


def is_megarls(key: str) -> bool:
    """Whether megarl has this key or section."""
    return key in FIELDS or any(name.startswith(f"{key}.") for name in FIELDS)


def test_keys_of_the_same_name_are_in_both() -> None:
    named = [
        f"{section.strip('`')}.{name}"
        for section, names in rows("| section | keys of the same name and meaning |")
        for name in re.findall(r"`(\w+)`", names)
    ]
    assert len(named) > 100
    assert [key for key in named if key not in FIELDS] == []
    theirs = VERLS | {"actor_rollout_ref.actor.optim.lr_decay_steps"}
    assert [key for key in named if key not in theirs] == []


def test_defaults_that_differ_are_megarls() -> None:
    table = list(rows("| key | verl | megarl |"))
    assert len(table) >= 10
    for key, theirs, ours in table:
        default = FIELDS[key.strip("`")].default
        shown = yaml.safe_load(ours.strip("`"))
        assert default == (tuple(shown) if isinstance(shown, list) else shown), key
        assert theirs != ours


def test_what_must_be_given_has_no_default() -> None:
    for key in ("data.train_batch_size", "data.max_prompt_length", "data.max_response_length"):
        assert FIELDS[key].default is MISSING
    for key in (
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "critic.optim.lr",
    ):
        assert FIELDS[key].default is MISSING


def test_keys_that_differ_are_refused_with_the_key_that_is_named() -> None:
    table = list(rows("| verl | megarl |"))
    assert len(table) >= 20
    for theirs, ours in table:
        for key in re.findall(DOTTED, theirs):
            advice = key_advice(key)
            assert key not in FIELDS and key in VERLS, key
            assert advice is not None, key
            assert "leave it out" not in ours or not advice.startswith("use trainer"), key
        for key in re.findall(DOTTED, ours):
            assert is_megarls(key), key


def test_bounds_of_rejection_are_turned_around() -> None:
    """verl's statistic k1 is log(engine / trainer) (trainer/ppo/rollout_corr_helper.py at 20c30bf8)."""
    for theirs, ours in (("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")):
        assert f"`{theirs}`" in PAGE and f"`{ours}`" in PAGE
        with pytest.raises(
            ValueError, match=rf"rollout_rs={theirs}: write {ours}; .* rollout_rs_threshold=1/l"
        ):
            load_config(
                TrainConfig,
                ROOT / "recipes/quickstart_ppo.yaml",
                [f"algorithm.rollout_correction.rollout_rs={theirs}"],
            )


def test_other_keys_of_the_page_exist() -> None:
    table_of_differences = PAGE.split("\n| verl | megarl |\n", 1)[1].split("\n\n", 1)[0]
    text = PAGE.replace(table_of_differences, "")
    named = set(re.findall(DOTTED, text))
    named |= {key for key in re.findall(r"`([\w.]+)=[\w.]+`", text) if "." in key}
    assert len(named) > 20
    assert [key for key in sorted(named) if not is_megarls(key)] == []


def test_data_sources_have_the_rules_that_are_named() -> None:
    seen = set()
    for sources, rule, _ in rows("| `data_source` | rule | differences from verl's score |"):
        for source in re.findall(r"`([\w/-]+)`", sources.split("(")[0]):
            seen.add(source)
            if rule == "none":
                with pytest.raises(ValueError, match=f"no reward rule for data_source '{source}'"):
                    rules_of([source])
            else:
                assert rules_of([source]) == {source: rule.strip("`")} and rule.strip("`") in REWARDS
    assert len(seen) > 20
    known = [source for source, rule in _RULE_OF.items() if rule in RULES]  # other tests register rules
    others = {source for source in known if not any(fnmatch(name, source) for name in seen)}
    assert others == {"megarl/arithmetic"}  # the demo's own


@pytest.fixture
def commands() -> tuple[list[str], list[str]]:
    blocks = re.findall(r"^```console\n\$ (.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    theirs, ours = (shlex.split(block.replace("\\\n", " ")) for block in blocks)
    assert theirs[:3] == ["python3", "-m", "verl.trainer.main_ppo"] and ours[:2] == ["megarl", "train"]
    return theirs[4:], ours[2:]


def test_the_command_is_a_configuration(commands: tuple[list[str], list[str]]) -> None:
    theirs, (recipe, *overrides) = commands
    config = load_config(TrainConfig, ROOT / recipe, overrides)
    assert config.critic is not None and config.algorithm.adv_estimator == "gae"
    kept = [override for override in theirs if override.split("=")[0] in FIELDS]
    assert kept == overrides
    left_out = [override.split("=")[0] for override in theirs if override not in kept]
    assert len(left_out) == 3 and all(key_advice(key) for key in left_out)


def test_all_that_is_wrong_with_verls_command_is_in_one_message(
    commands: tuple[list[str], list[str]],
) -> None:
    theirs, (recipe, *_) = commands
    with pytest.raises(ValueError) as caught:
        load_config(TrainConfig, ROOT / recipe, theirs)
    for key in ("actor_rollout_ref.rollout.load_format", "trainer.balance_batch", "trainer.critic_warmup"):
        assert f"{key} is no key of megarl: " in str(caught.value)


def test_what_is_not_there_is_not_there(train: Callable[..., TrainConfig]) -> None:
    text = PAGE.split("## What is not there", 1)[1]
    estimators, losses = (
        next(line for line in text.splitlines() if line.startswith(f"- {kind}"))
        for kind in ("Estimators", "Policy losses")
    )
    here = {"rloo", "grpo", "gmpo"}
    for registry, line in ((ESTIMATORS, estimators), (POLICY_LOSSES, losses)):
        named = set(re.findall(r"`(\w+)`", line))
        assert len(named) >= 4
        assert {name for name in named if name in registry} == named & here
    for value in (
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.rollout.name=vllm",
        "trainer.resume_mode=resume_path",
    ):
        with pytest.raises(ValueError, match=r"megarl (?:trains|generates)|write path"):
            train(value)


def test_verls_commands_have_advice() -> None:
    assert {"main_ppo", "main_eval", "model_merger"} <= aliases()["commands"].keys()


def test_a_function_of_a_batch_is_refused(tmp_path: Path) -> None:
    from megarl.rewards.registry import load_reward_function

    (tmp_path / "batch.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return []\n"
    )
    with pytest.raises(
        ValueError, match=r"its signature is \(data_sources, .*it is called as compute_score\(data_source, "
    ):
        load_reward_function(str(tmp_path / "batch.py"))
