import pytest

from megarl.config.schema.rollout import ENVIRONMENTS as NAMES
from megarl.environments import BUILT_IN, find_environment
from megarl.environments.calculator import Calculator
from megarl.environments.environment import ENVIRONMENTS, Environment
from megarl.util.plugins import load_plugins

PLUGIN = """
from megarl.environments.environment import Environment, StepResult, register_environment

@register_environment("test.echo")
class Echo(Environment):
    def __init__(self, times, suffix=""):
        self.times = times

    def step(self, turn):
        return StepResult(turn.text)

@register_environment("test.function")
def function():
    pass

@register_environment("test.stepless")
class Stepless(Environment):
    pass
"""


def test_built_in_names_are_those_that_the_configuration_knows():
    assert {name for name in NAMES if ENVIRONMENTS[name] in BUILT_IN} == set(NAMES)
    assert len(BUILT_IN) == len(NAMES)
    assert find_environment("calculator", {"role": "user"}) is Calculator


def test_a_users_environment_is_found_by_its_name(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    load_plugins([str(tmp_path / "mine.py")])
    made = find_environment("test.echo", {"times": 3})(times=3)
    assert isinstance(made, Environment) and made.times == 3
    for name, options, message in [
        ("test.echo", {}, r"multi_turn.options=\{\}: Echo\(times, suffix=''\) .*missing .*'times'"),
        ("test.echo", {"times": 1, "time": 2}, "unexpected keyword argument 'time'"),
        ("test.function", {}, "not a class derived from Environment"),
        ("test.stepless", {}, "Stepless has no method step"),
        ("test.ecko", {}, "rollout.multi_turn.environment='test.ecko' is unknown; known: calculator"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_environment(name, options)
