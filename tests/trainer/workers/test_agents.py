"""A run's agents in an engine's process, with a policy of scripted answers. Agents are Python functions in processes of their own."""

import asyncio
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from uvicorn import Config

from examples.agents.coding_agent import TURNS
from megarl.cluster.guard import remove_scratch
from megarl.config import ModelPathConfig
from megarl.config.schema.rollout import GatewayConfig, RolloutConfig
from megarl.data.trajectories import expand_prompts
from megarl.gateway.agents import AgentRunner
from megarl.gateway.service import Gateway
from megarl.rewards.rules.code_tests import compute_score
from megarl.rewards.sandbox.sandbox import best_isolation
from megarl.rollout.completions import Flight
from megarl.rollout.engine import EngineCapacity, SamplingParams
from megarl.trainer.workers.agents import Agents
from megarl.trainer.workers.agents_spec import agents_spec
from megarl.trainer.workers.engine import EngineWorker
from tests.gateway.conftest import sglang_parsers  # noqa: F401
from tests.gateway.policy import WrittenPolicy
from tests.gateway.published import published
from tests.trainer.trajectories import prompts

CODING = Path(__file__).parents[3] / "examples/agents/coding_agent.py"
AGENT = """
import json, os, time, urllib.request

def ask(*messages, model="policy"):
    body = {"model": model, "messages": messages, "temperature": 0.1}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

USER = {"role": "user", "content": "Rain?"}

def play(task):
    first = ask(USER)
    if task["uid"] == "a/1":
        ask(USER, first, {"role": "user", "content": "Sure?"})
        ask(USER, first, {"role": "user", "content": "Really?"})
    print(os.environ["MEGARL_RANK"], os.environ["TOOL_LEVEL"], os.environ["TOOL_KEY"], "OTHER_KEY" in os.environ)
    return 0.5

def game(task):
    ask(USER, model="white")
    if task["uid"] == "a/0":
        ask(USER, model="black")
    return {"score": {"white": 1, "black": -1} if task["uid"] == "a/0" else {"wihte": 1}}

def half(task):
    ask(USER, model="white")
    if task["uid"] == "a/0":
        ask(USER, model="black")

async def idle(task):
    if task["uid"] == "a/1":
        raise ConnectionError("no tool")

def slow(task):
    ask(USER)
    open(task["extra_info"]["file"], "w").close()
    time.sleep(1.0)

def jailed(task):
    facts = {}
    for name, path in (("system", "/usr/x"), ("code", task["extra_info"]["code"] + "/x"), ("own", "x"), ("tmp", "/tmp/x")):
        try:
            open(path, "w").close()
            facts[name] = True
        except OSError:
            facts[name] = False
    import socket
    try:
        socket.create_connection(("1.1.1.1", 80), 2)
        facts["network"] = True
    except OSError:
        facts["network"] = False
    facts["secret"] = os.path.exists(task["extra_info"]["secret"])
    facts["processes"] = os.path.exists("/proc/1/environ")
    print(json.dumps(facts))
    ask(USER)
    try:
        bytearray(1 << 28)
    except MemoryError:
        return 0.25

def by_player(task, session):
    return {"white": len(session.tree.turns)}

def score(task, session):
    return len(session.tree.turns) + len(task.ground_truth) / 100
"""


SAMPLING = SamplingParams()


class Engine(WrittenPolicy):
    """A policy with an event loop that stands still between calls, like an engine's."""

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)


@pytest.fixture
def agents(sglang_parsers, tmp_path, monkeypatch):  # noqa: F811
    """agents(function, settings) -> play(sampling, extra_info), which returns the trajectories of each of two requests for prompt a."""
    for name, value in (("MEGARL_RANK", "mark"), ("TOOL_KEY", "k"), ("OTHER_KEY", "o")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("megarl.trainer.workers.agents.load_tokenizer", lambda *_: published("qwen2_5"))
    (tmp_path / "agent.py").write_text(AGENT)
    scratch = tempfile.mkdtemp(prefix="t-")  # as of an engine's process; the path of a socket must be short
    monkeypatch.setattr("tempfile.tempdir", scratch)
    loop = asyncio.new_event_loop()

    def start(function, words=("It rains.",), file=tmp_path / "agent.py", template_kwargs=None, **settings):
        engine = Engine(published("qwen2_5"), [*words])
        engine.loop = loop
        gateway = GatewayConfig(
            enable=True,
            agent=f"{file}:{function}",
            environment={"TOOL_LEVEL": 7},
            pass_env=("TOOL_KEY",),
            **settings,
        )
        model = ModelPathConfig(path="unread", tokenizer_path="unread")
        spec = agents_spec(RolloutConfig(gateway=gateway), model, template_kwargs, str(tmp_path / "run"), ())
        made = Agents(spec, engine, ())

        def play(sampling=SAMPLING, meanwhile=lambda: None, **extra):
            asked = expand_prompts(prompts("a"), 2)
            column = asked.schema.get_field_index("extra_info")
            asked = asked.set_column(column, asked.schema.field(column), [[json.dumps(extra)] * 2])
            flight = Flight(loop)
            flight.add(made.answers(asked, sampling, 7))
            played = []
            while len(flight):
                played += flight.take(0.2)
                meanwhile()
            played.sort(key=lambda own: own[0].uid)
            return engine, played

        return play

    yield start
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    shutil.rmtree(scratch)


def notes(trajectory):
    return json.loads(trajectory.environment_notes)


def test_functions_are_agents_and_their_sessions_are_trajectories(agents, tmp_path):
    engine, (single, double) = agents("play", keep_logs=True)(SamplingParams(temperature=0.7, seed=5))
    assert [one.uid for one in (*single, *double)] == ["a/0.0", "a/1.0", "a/1.1"]
    assert {one.environment_score for one in (*single, *double)} == {0.5}
    assert notes(double[0]) == {"numbers": {"num_turns": 3.0}, "error": None}
    live = sum(sum(one.response_mask) for one in double)
    assert live == sum(len(asked.ids) for asked in engine.asked if asked.uid.startswith("a/1#"))
    # The run's sampling settings apply, whatever an agent requests.
    assert {(one.temperature, one.seed) for one in engine.sampled} == {(0.7, 5)}
    assert (tmp_path / "run/agents/a-1.log").read_text() == "mark 7 k False\n"


def test_an_agent_that_asks_nothing_costs_its_own_sample(agents, tmp_path):
    _, ((nothing,), (failed,)) = agents("idle")()
    for one in (nothing, failed):
        assert not any(one.response_mask) and len(one.response_ids) == 1 and one.weight_version == 7
    assert notes(nothing)["error"] == "it asked the policy nothing"
    assert "ConnectionError: no tool" in notes(failed)["error"]
    assert [file.name for file in (tmp_path / "run/agents").iterdir()] == ["a-1.log"]


@pytest.mark.parametrize("limit", ["max_requests", "requests_per_minute"])
def test_an_agent_may_ask_so_often(agents, limit):
    """Of two agents, one sends one request, the other three."""
    _, ((single,), (refused,)) = agents("play", **{limit: 2})()
    assert notes(single)["error"] is None and all(single.response_mask)
    assert "HTTP Error 429" in notes(refused)["error"] and not any(refused.response_mask)


def test_each_agent_has_a_session_however_many_run_at_a_time(agents, monkeypatch):
    made = []

    def gateway(*given, **named):
        made.append(Gateway(*given, **named))
        return made[-1]

    monkeypatch.setattr("megarl.trainer.workers.agents.Gateway", gateway)
    agents("play", concurrency=10_000)
    assert made[0].limits.sessions >= 10_000


@pytest.mark.parametrize(("places", "requests"), [(64, 4), (2, 2)])
def test_an_engine_has_room_for_as_many_sessions_as_run_at_a_time(agents, monkeypatch, places, requests):
    """A controller that sends more lets them wait, while other engines have none left."""
    made = []

    class Kept(Agents):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(f"{__name__}.Agents", Kept)
    agents("play", concurrency=4)
    worker = EngineWorker.__new__(EngineWorker)  # its constructor starts SGLang
    capacity = EngineCapacity(places, 10**6)
    worker.engine = SimpleNamespace(capacity=lambda: capacity, flight=lambda: Flight(None), last_sign=0.0)
    worker.players, worker._of = made[0], {}
    assert worker.begin_generation() == (EngineCapacity(requests, 10**6), [])
    worker.players = None
    assert worker.begin_generation() == (capacity, [])


def test_the_keywords_of_the_data_are_those_of_prompts(agents, monkeypatch):
    given = []

    def runner(*arguments, **named):
        given.append(named["template_kwargs"])
        return AgentRunner(*arguments, **named)

    monkeypatch.setattr("megarl.trainer.workers.agents.AgentRunner", runner)
    agents("play", template_kwargs={"enable_thinking": False})
    assert given == [{"enable_thinking": False}]


def test_a_function_scores_sessions(agents, tmp_path):
    _, ((single,), double) = agents("play", score=f"{tmp_path}/agent.py:score")()
    assert single.environment_score == 1.1 and {one.environment_score for one in double} == {3.1}


def test_players_of_a_game_have_scores_of_their_own(agents, tmp_path):
    players = {"players": ("white", "black")}
    _, (both, (failed,)) = agents("game", **players)()
    assert [(one.uid, one.environment_score) for one in both] == [("a/0.0.black", -1.0), ("a/0.1.white", 1.0)]
    assert failed.uid == "a/1.0.white" and not any(failed.response_mask)
    assert "no player 'wihte'" in (tmp_path / "run/agents/a-1.log").read_text()
    assert "the gateway has refused what the agent returned" in (tmp_path / "run/agents/a-1.log").read_text()
    _, (both, (alone,)) = agents("half", score=f"{tmp_path}/agent.py:by_player", **players)()
    assert notes(both[0])["error"].startswith("score: no score of player black") and len(both) == 2
    assert not any(any(one.response_mask) for one in both)
    assert (alone.environment_score, alone.player, notes(alone)["error"]) == (1.0, "white", None)


def test_time_in_which_nothing_is_generated_does_not_count(agents, tmp_path, monkeypatch):
    """The event loop stands still for an hour."""
    file, clock = tmp_path / "asked", [0.0]

    class Clock:
        @staticmethod
        def monotonic():
            return time.monotonic() + clock[0]

    def pause():
        if file.exists():
            clock[0] = 3600.0

    monkeypatch.setattr("megarl.gateway.sandboxes.processes.time", Clock)
    _, played = agents("slow", timeout=60)(meanwhile=pause, file=str(file))
    assert clock == [3600.0] and [notes(one)["error"] for (one,) in played] == [None, None]


def test_a_connection_stays_open_however_long_nothing_is_generated(agents, monkeypatch):
    """uvloop, the loop of SGLang's engines, closes one whose time is over before it reads the request that has come meanwhile."""
    given = []

    def config(app, **options):
        given.append(options["timeout_keep_alive"])
        return Config(app, **options)

    monkeypatch.setattr("megarl.trainer.workers.agents.uvicorn.Config", config)
    agents("play")
    assert len(given) == 1 and given[0] > 30 * 24 * 3600


def test_an_agent_in_a_sandbox_reaches_the_gateway_alone(agents, tmp_path, tmp_path_factory):
    if best_isolation() != "namespaces":
        pytest.skip("this system gives ordinary processes no namespaces")
    secret = tmp_path_factory.mktemp("other") / "secret"
    secret.write_text("x")
    play = agents("jailed", sandbox="namespaces", memory_mb=200, keep_logs=True)
    _, played = play(code=str(tmp_path), secret=str(secret))
    for (one,) in played:
        assert notes(one)["error"] is None and one.environment_score == 0.25 and all(one.response_mask)
    facts = json.loads((tmp_path / "run/agents/a-0.log").read_text())
    assert facts == {
        "system": False, "code": False, "own": True, "tmp": True, "network": False, "secret": False, "processes": False
    }  # fmt: skip


def test_drafts_of_programs_run_in_the_sandbox_and_the_rule_judges_the_answer(agents):
    """The agent is examples/agents/coding_agent.py."""
    if best_isolation() != "namespaces":
        pytest.skip("this system gives ordinary processes no namespaces")

    def call(name, **arguments):
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    draft = "import os\nprint(sum(map(int, input().split())), len(os.environ.get('OPENAI_API_KEY', '')))"
    right = "It adds them.\n```python\nprint(sum(map(int, input().split())))\n```"
    words = [
        call("run", program=draft, stdin="3 4"),
        call("run", program=7),
        right,
        call("run", program="1/0"),
    ]
    play = agents(
        "agent", words, CODING, sandbox="namespaces", tool_parser="qwen25", concurrency=1, keep_logs=True
    )
    engine, ((solved,), (endless,)) = play()
    assert [notes(one)["error"] for one in (solved, endless)] == [None, None]
    assert [notes(one)["numbers"]["num_turns"] for one in (solved, endless)] == [3.0, TURNS]
    told = [
        engine.tokenizer.decode(asked.prompt_ids).rpartition("<tool_response>")[2] for asked in engine.asked
    ]
    assert told[1].startswith("\nexit code 0\n7 0\n") and "are texts" in told[2]
    assert "exit code 1" in told[-1] and "ZeroDivisionError" in told[-1]
    truth = json.dumps({"inputs": ["1 2\n", "5 6\n"], "outputs": ["3\n", "11\n"]})
    assert solved.environment_score is None and endless.environment_score is None  # the rule gives the score
    texts = [engine.tokenizer.decode(one.response_ids) for one in (solved, endless)]
    assert [compute_score("codecontests", text, truth)["score"] for text in texts] == [1.0, 0.0]


def test_a_function_that_is_missing_is_told_before_the_run(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    gateway = GatewayConfig(enable=True, agent=f"{tmp_path}/agent.py:plya")
    with pytest.raises(ValueError, match="has no function plya"):
        agents_spec(RolloutConfig(gateway=gateway), ModelPathConfig(path="unread"), None, str(tmp_path), ())
    assert "MEGARL_RANK" not in os.environ


def test_a_sandbox_that_is_not_there_is_told_before_the_engine_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    gateway = GatewayConfig(enable=True, command=("agent",), sandbox="docker", image="image")
    spec = agents_spec(
        RolloutConfig(gateway=gateway), ModelPathConfig(path="unread"), None, str(tmp_path), ()
    )
    with pytest.raises(ValueError, match=r"gateway\.sandbox=docker .* no program docker"):
        EngineWorker(SimpleNamespace(scratch=str(tmp_path)), None, spec)


def test_agents_write_to_the_disk_and_not_into_the_engines_memory(tmp_path, monkeypatch):
    """The scratch folder of an engine's process is in memory."""
    scratch, disk, given = tmp_path / "memory", tmp_path / "disk", []
    for folder in (scratch, disk):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    monkeypatch.setattr("megarl.trainer.workers.engine.Agents", lambda *arguments: given.append(arguments))
    engine = SimpleNamespace(start=lambda: None)  # in SGLang's place
    monkeypatch.setattr(EngineWorker, "engine_class", staticmethod(lambda config: engine))
    gateway = GatewayConfig(enable=True, command=("agent",))
    spec = agents_spec(
        RolloutConfig(gateway=gateway), ModelPathConfig(path="unread"), None, str(tmp_path), ()
    )
    info = SimpleNamespace(scratch=str(scratch), parts=1, part=0)
    EngineWorker(info, SimpleNamespace(stop_token_ids=()), spec)
    ((*_, folder),) = given
    assert folder.is_dir() and folder.parent == disk and tempfile.gettempdir() == str(scratch)
    remove_scratch(str(scratch))
    assert not folder.exists()
