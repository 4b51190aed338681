import inspect
import pickle

import pytest

from megarl.rewards.custom import load_reward_function

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
