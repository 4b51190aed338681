import inspect
import pickle
import sys

import pytest

from megarl.config.schema.rewards import RULES
from megarl.rewards.registry import (
    REWARDS,
    RewardFunctions,
    RewardSpec,
    load_reward_function,
    register_reward,
    rules_of,
)
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
    functions.check([("a", "whatever", "")])  # one rule for all data sources, which needs no ground truth
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
    """Workers start quickly: they import no large package at their start."""
    import subprocess

    code = "import sys, megarl.rewards.processes.worker; print(sorted({'torch', 'numpy', 'sympy', 'httpx', 'yaml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


GOOD = """
from dataclasses import dataclass

@dataclass
class Note:
    text: str

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)

def other(solution_str, **kwargs):
    return Note(solution_str)

def needs_more(data_source, solution_str, ground_truth, extra_info, model):
    return 0.0

def two(solution_str, ground_truth):
    return 0.0

async def later(data_source, solution_str, ground_truth, extra_info):
    return 0.0

async def with_prompt(data_source, solution_str, ground_truth, extra_info, *, prompt_str):
    return 0.0

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(GOOD)
    return path


def test_loads_a_function_by_path_and_name(file):
    arguments = {"data_source": "d", "solution_str": "four", "ground_truth": "", "extra_info": None}
    assert load_reward_function(str(file))(**arguments) == 4
    assert load_reward_function(str(file), "other")(**arguments).text == "four"


def test_what_it_returns_can_be_pickled(file):
    note = load_reward_function(str(file), "other")(solution_str="x")
    assert pickle.loads(pickle.dumps(note)) == note


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"name='missing': .*my_reward.py has no such function; it defines compute_score, .*two"),
        ("NUMBER", "name='NUMBER' in .*my_reward.py: a int, not a function"),
        ("two", r"signature is \(solution_str, ground_truth\); it is called as compute_score\(data_source"),
        ("needs_more", "missing a required argument: 'model'"),
    ],
)
def test_unfit_names_are_refused(file, name, message):
    with pytest.raises(ValueError, match=message):
        load_reward_function(str(file), name)


def test_async_functions_the_prompt_and_further_arguments(file):
    assert inspect.iscoroutinefunction(load_reward_function(str(file), "later"))
    assert inspect.iscoroutinefunction(load_reward_function(str(file), "with_prompt"))
    function = load_reward_function(str(file), "needs_more", {"model": "judge"})
    assert function(data_source="d", solution_str="s", ground_truth="", extra_info=None) == 0.0
    with pytest.raises(
        ValueError, match=r"called as compute_score\(.*extra_info, size\) by keyword, .*'size'"
    ):
        load_reward_function(str(file), "compute_score", {"size": 3})


def test_unfit_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path='.*nowhere.py': there is no such file"):
        load_reward_function(str(tmp_path / "nowhere.py"))
    (tmp_path / "reward.txt").write_text(GOOD)
    with pytest.raises(ValueError, match=r"not a \.py file"):
        load_reward_function(str(tmp_path / "reward.txt"))
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    with pytest.raises(ValueError, match=r"broken.py'.*ModuleNotFoundError: .*no_such_module_anywhere"):
        load_reward_function(str(tmp_path / "broken.py"))
    (tmp_path / "syntax.py").write_text("def compute_score(:")
    with pytest.raises(ValueError, match=r"syntax.py'.*SyntaxError"):
        load_reward_function(str(tmp_path / "syntax.py"))
