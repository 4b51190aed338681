import sys

import pytest

from megarl.config.schema.rewards import RULES
from megarl.rewards.functions import RewardFunctions, RewardSpec
from megarl.rewards.registry import REWARDS, register_reward, rules_of
from megarl.util.plugins import load_plugins


def test_the_configuration_knows_the_rules_that_there_are():
    assert set(RULES) == set(REWARDS.names())


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("megarl/arithmetic", "gsm8k"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("numina_olympiads", "math"),
        ("math", "math_dapo"),
        ("math_dapo", "math_dapo"),
        ("math_dapo_reasoning", "math_dapo"),
        ("aime_2024", "math_dapo"),
        ("aime2025", "math_dapo"),
        ("searchR1_nq", "search_r1"),
        ("searchR1_bamboogle", "search_r1"),
        ("codecontests", "code"),
        ("apps", "code"),
        ("codeforces", "code"),
        ("taco", "code"),
        ("Idavidrein/gpqa", "multiple_choice"),
    ],
)
def test_data_sources_have_the_rules_that_verl_gives_them(source, rule):
    assert rules_of([source]) == {source: rule}


def test_all_unknown_data_sources_are_named_at_once():
    with pytest.raises(
        ValueError, match=r"data_source 'a/b', 'gsm8k'; known: .*openai/gsm8k.*reward.rule to one of code"
    ):
        rules_of(["gsm8k", "openai/gsm8k", "a/b"])


def test_a_plugin_adds_a_rule_and_its_data_sources(tmp_path):
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from megarl.rewards.registry import register_reward\n"
        "@register_reward('test_length', ['test_registry/*', 'test_registry/short'])\n"
        "def length(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(solution_str)\n"
    )
    load_plugins([str(plugin)])
    assert rules_of(["test_registry/x"]) == {"test_registry/x": "test_length"}
    functions = RewardFunctions(RewardSpec(rule="test_length"))
    reward = functions.of("whatever")
    assert not reward.is_async
    assert reward.function(data_source="", solution_str="four", ground_truth="", extra_info=None) == 4
    functions.check([("a", "whatever", "")])  # one rule for all, which does without a ground truth
    with pytest.raises(ValueError, match="'test_length' is already registered"):
        register_reward("test_length")(len)
    with pytest.raises(ValueError, match=r"'test_registry/\*' already has the reward rule 'test_length'"):
        register_reward("test_other", ["test_registry/*"])(len)
    assert "test_other" not in REWARDS


@pytest.mark.parametrize("rule", [None, "exact_match"])
def test_a_rule_that_compares_needs_a_ground_truth(rule):
    source = "openai/gsm8k"
    functions = RewardFunctions(RewardSpec(rule=rule))
    functions.check([("train:0", source, "7")])
    with pytest.raises(
        ValueError, match=f"prompt train:1: the reward rule '{rule or 'gsm8k'}' of data_source"
    ):
        functions.check([("train:0", source, "7"), ("train:1", source, "")])
    RewardFunctions(RewardSpec(rule="llm_judge")).check([("train:1", source, "")])


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"reward\.rule='maths' is unknown; known: code, exact_match, gsm8k"):
        RewardFunctions(RewardSpec(rule="maths"))


def test_what_a_worker_imports_is_light():
    """Workers start quickly: nothing that they import at once is large."""
    import subprocess

    code = "import sys, megarl.rewards.processes.worker; print(sorted({'torch', 'numpy', 'sympy', 'httpx', 'yaml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
