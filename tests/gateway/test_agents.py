"""Agents as real processes with OpenAI's SDK, in front of a policy whose words are scripted."""

import asyncio
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from megarl.cluster.guard import process_state
from megarl.environments.environment import Task
from megarl.gateway.agents import AgentRunner, _end_of
from megarl.gateway.copies import ForkServer
from megarl.gateway.sandboxes.interface import kept_environment
from megarl.rollout.engine import EngineError
from tests.data.test_published_templates import TOOLS
from tests.gateway.conftest import MODEL
from tests.waiting import wait_for

HEAD = f"""
import json, os, sys, time, subprocess, urllib.request
task = json.load(open(os.environ["MEGARL_TASK"]))
def post(path, body):
    headers = {{"x-api-key": os.environ["ANTHROPIC_API_KEY"]}}
    request = urllib.request.Request(os.environ["MEGARL_GATEWAY"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
def ask(*messages):
    body = {{"model": "{MODEL}", "messages": list(messages)}}
    return post("/v1/chat/completions", body)["choices"][0]["message"]
user = {{"role": "user", "content": task["prompt"]}}
"""
TWO_TURNS = """
import openai
client = openai.OpenAI(max_retries=0)
first = client.chat.completions.create(model="policy", messages=[user]).choices[0].message
client.chat.completions.create(model="policy", messages=[user, first, {"role": "user", "content": "Sure?"}])
post("/session/score", {"score": 0.25, "numbers": {"tests_passed": 3}})
print("done", sorted(task), os.getcwd() == os.environ["HOME"], os.listdir("."), "SECRET" in os.environ)
"""


def task(uid="p/0"):
    return Task(uid, "Rain?", None, "source", "the truth", {"hint": 1})


@pytest.fixture
def play(serve, tmp_path):
    """play(code, tasks, options of the runner) -> the server, and the trajectories of each task."""

    def run(code, tasks=(), until=None, **options):
        served = serve(["It rains."], tools=None)
        command = [sys.executable, "-c", HEAD + code]
        runner = AgentRunner(
            served.gateway, served.url, options.pop("command", command), tmp_path / "logs", **options
        )

        async def all_of_them():
            played = await asyncio.gather(*(runner.play(one) for one in tasks or [task()]))
            assert all(notes(one)["error"] == error for made, error in played for one in made)
            return [made for made, _ in played]

        playing = asyncio.run_coroutine_threadsafe(all_of_them(), served.loop)
        if until is None:
            return served, playing.result(120)
        wait_for(until)
        playing.cancel()
        return served, None

    return run


@pytest.fixture
def limit_after(monkeypatch):
    """limit_after(condition): agents' time does not pass before the condition is true, so that a busy machine's agents get as far as that."""

    def set_clock(condition):
        begun, reached = time.monotonic(), []

        class Clock:
            @staticmethod
            def monotonic():
                if not reached and condition():
                    reached.append(True)
                return time.monotonic() if reached else begun

        monkeypatch.setattr("megarl.gateway.sandboxes.processes.time", Clock)

    return set_clock


def is_whole(file, end):
    """Whether a file that another process writes is there with its last character."""
    return file.exists() and file.read_text().endswith(end)


def notes(trajectory):
    return json.loads(trajectory.environment_notes)


def test_a_session_becomes_a_trajectory_with_the_score_that_was_posted(play, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    served, (first, second) = play(TWO_TURNS, [task("p/0"), task("p/1")])
    for number, (trajectory,) in enumerate((first, second)):
        assert trajectory.uid == f"p/{number}.0" and trajectory.num_turns == 2
        assert trajectory.environment_score == 0.25 and all(trajectory.response_mask[-3:])
        assert notes(trajectory) == {"numbers": {"num_turns": 2.0, "tests_passed": 3.0}, "error": None}
        log = (tmp_path / "logs" / f"p-{number}.log").read_text()
        told = "['data_source', 'extra_info', 'messages', 'prompt', 'uid']"
        assert log == f"done {told} True [] False\n"
    assert len(served.policy.asked) == 4


def test_a_function_scores_the_finished_tree(play):
    def score(one, session):
        assert one.ground_truth == "the truth"
        return float(len(session.tree.turns))

    _, ((left, right),) = play("ask(user); ask(user)", score=score)
    assert (left.environment_score, right.environment_score) == (2.0, 2.0)
    _, ((failed,),) = play("ask(user)", score=lambda one, session: 1 / 0)
    assert notes(failed)["error"].startswith("score: ZeroDivisionError") and not any(failed.response_mask)
    _, ((failed,),) = play("ask(user)", score=lambda one, session: float("nan"))
    assert "no finite number" in notes(failed)["error"]


def test_a_player_that_asks_after_the_score_fails_the_agent(serve, tmp_path):
    served = serve(["e4."], tools=None, players=("white", "black"))
    code = """
post("/v1/chat/completions", {"model": "white", "messages": [user]})
post("/session/score", {"score": {"white": 1}})
post("/v1/chat/completions", {"model": "black", "messages": [user]})
"""
    runner = AgentRunner(served.gateway, served.url, [sys.executable, "-c", HEAD + code], tmp_path)
    made, error = asyncio.run_coroutine_threadsafe(runner.play(task()), served.loop).result(60)
    assert error.startswith("score: no score of player black") and len(made) == 2
    assert not any(any(one.response_mask) for one in made)


def test_a_failed_agent_costs_its_own_trajectories_alone(play):
    code = "ask(user)\nif task['uid'] == 'p/0': sys.exit('broken')\npost('/session/score', {'score': 1})"
    _, ((failed,), (whole,)) = play(code, [task("p/0"), task("p/1")])
    assert "exit code 1" in notes(failed)["error"] and "broken" in notes(failed)["error"]
    assert failed.environment_score is None and not any(failed.response_mask)
    assert whole.environment_score == 1.0 and all(whole.response_mask)
    _, (none,) = play("pass")
    assert none == []
    _, (none,) = play("", command=["/no/such/program"])
    assert none == []


def alive(pid):
    return process_state(pid) is not None


@pytest.mark.parametrize(
    ("of_run", "of_row", "of_request", "thinks"),
    [
        (None, None, {}, True),
        ({"enable_thinking": False, "tools": [TOOLS[0]]}, None, {}, False),
        ({"enable_thinking": False}, {"enable_thinking": True}, {}, True),
        ({"enable_thinking": False}, None, {"enable_thinking": True}, True),
        (None, {"enable_thinking": False}, {}, False),
    ],
)
def test_prompts_have_the_keywords_of_the_data(serve, tmp_path, of_run, of_row, of_request, thinks):
    """A request's own come first, then the row's. Tools are the request's alone: the agent answers their calls."""
    served = serve(["It rains."], template="qwen3", tools=None)
    code = f"""
body = {{"model": "{MODEL}", "messages": [user], "chat_template_kwargs": {of_request}}}
first = post("/v1/chat/completions", body)["choices"][0]["message"]
body["messages"] += [first, {{"role": "user", "content": "Sure?"}}]
post("/v1/chat/completions", body)
"""
    command = [sys.executable, "-c", HEAD + code]
    runner = AgentRunner(served.gateway, served.url, command, tmp_path, template_kwargs=of_run)
    playing = runner.play(replace(task(), template_kwargs=of_row))
    _, error = asyncio.run_coroutine_threadsafe(playing, served.loop).result(60)
    assert error is None
    for asked in served.policy.asked:
        text = served.policy.tokenizer.decode(asked.prompt_ids)
        assert text.endswith("<|im_start|>assistant\n" + ("" if thinks else "<think>\n\n</think>\n\n"))
        assert "tool" not in text


def test_of_a_large_log_only_the_end_is_read(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.seek(2**40)  # a terabyte of zeros, which takes no place on the disk
        file.write(b"broken\n")
    assert _end_of(log).endswith("broken'") and len(_end_of(log)) < 3000


def test_an_agents_folder_is_removed_whatever_is_in_it(play, tmp_path, monkeypatch):
    """The agent leaves folders too deep for Python, which it may not write into."""
    code = """
ask(user)
post("/session/score", {"score": 1})
for _ in range(2000):
    os.mkdir("d")
    os.chdir("d")
os.chmod("..", 0o500)
"""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    _, ((one,),) = play(code)
    assert one.environment_score == 1.0 and notes(one)["error"] is None
    assert not any((tmp_path / "scratch").iterdir())


def test_agents_have_their_folders_in_the_one_that_is_given(play, tmp_path):
    (tmp_path / "disk").mkdir()
    _, ((one,),) = play("ask(user)\nprint(os.getcwd(), os.environ['MEGARL_TASK'])", folder=tmp_path / "disk")
    assert notes(one)["error"] is None and not any((tmp_path / "disk").iterdir())
    for path in (tmp_path / "logs/p-0.log").read_text().split():
        assert path.startswith(f"{tmp_path}/disk/agent-")


def test_an_agents_folder_that_cannot_be_removed_fails_nothing(play, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("megarl.gateway.agents.LOG.warning", lambda *words: told.append(words))
    monkeypatch.setattr("megarl.gateway.agents._REMOVE", "exit 1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, ((one,),) = play("ask(user)")
    assert notes(one)["error"] is None and all(one.response_mask)
    assert [folder for _, folder in told] == [str(folder) for folder in tmp_path.glob("agent-*")]


@pytest.mark.parametrize("cancelled", [False, True])
def test_what_takes_too_long_ends_with_all_that_it_started(play, limit_after, tmp_path, cancelled):
    code = f"""
ask(user)
child = subprocess.Popen(["sleep", "1000"])
open("{tmp_path}/key", "w").write(os.environ["OPENAI_API_KEY"])
open("{tmp_path}/pid", "w").write(str(child.pid) + ".")
time.sleep(1000)
"""
    if cancelled:
        served, _ = play(code, until=lambda: is_whole(tmp_path / "pid", "."))
    else:
        limit_after(lambda: is_whole(tmp_path / "pid", "."))
        served, ((late,),) = play(code, seconds=4)
        assert "did not end within 4 s" in notes(late)["error"] and not any(late.response_mask)
    pid = int((tmp_path / "pid").read_text().rstrip("."))
    wait_for(lambda: not alive(pid))
    key = (tmp_path / "key").read_text()
    asked = f"{served.url}/session/trajectories"
    wait_for(lambda: httpx.get(asked, headers={"x-api-key": key}).status_code == 401)  # after its processes
    assert os.environ.get("OPENAI_API_KEY") != key


def test_an_engine_that_fails_is_no_failure_of_an_agent(serve, tmp_path):
    """The session yields no trajectory: another engine plays its task again."""
    served = serve(["It rains."], tools=None)
    served.policy.failure = EngineError("no answer")
    command = [sys.executable, "-c", HEAD + "try: ask(user)\nexcept OSError: pass"]
    runner = AgentRunner(served.gateway, served.url, command, tmp_path)
    with pytest.raises(EngineError, match="no answer"):
        asyncio.run_coroutine_threadsafe(runner.play(task()), served.loop).result(60)


SHARED = """
import os, random
STARTED = os.getpid()
"""
COPIED = """
import json, os, random, subprocess, sys, time, urllib.request
import shared

def play(task):
    assert os.environ["OPENAI_BASE_URL"].startswith(os.environ["MEGARL_GATEWAY"])
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
    facts = [os.getpid(), shared.STARTED, os.getcwd() == os.environ["HOME"], random.random(), "SECRET" in os.environ, os.environ["PATH"]]
    print(json.dumps(facts), flush=True)
    if task["uid"] == "p/1":
        sys.exit("broken")
    if task["uid"] == "p/2":
        child = subprocess.Popen(["sleep", "1000"])
        open(task["extra_info"]["file"], "w").write(f"{child.pid}.")
        time.sleep(1000)
    return 0.5
"""


@pytest.fixture
def forks(tmp_path, monkeypatch):
    """forks(text of a module) -> a fork server of the agent `COPIED` that has imported the module."""
    servers, scratch = [], Path(tempfile.mkdtemp(prefix="t-"))  # the path of a socket must be short
    monkeypatch.setattr("tempfile.tempdir", str(scratch))

    def start(shared=SHARED):
        (tmp_path / "shared.py").write_text(shared)
        (tmp_path / "copied.py").write_text(COPIED)
        servers.append(ForkServer(str(tmp_path / "copied.py"), "play", ["shared"], kept_environment()))
        return servers[-1]

    monkeypatch.setenv("SECRET", "x")
    yield start
    for server in servers:
        server.close()
    assert not any(scratch.iterdir())
    scratch.rmdir()


def test_agents_are_copies_of_a_process_that_has_made_the_imports(serve, limit_after, tmp_path, forks):
    served, file = serve(["It rains."], tools=None), tmp_path / "pid"
    written = [(tmp_path / f"logs/p-{number}.log", "\n") for number in range(4)] + [(file, ".")]
    limit_after(lambda: all(is_whole(*one) for one in written))
    runner = AgentRunner(served.gateway, served.url, [], tmp_path / "logs", forks=forks(), seconds=8)
    told = {"file": str(file)}
    tasks = [Task(f"p/{number}", "Rain?", None, "source", None, told) for number in range(4)]

    async def all_of_them():
        return await asyncio.gather(*map(runner.play, tasks))

    played = asyncio.run_coroutine_threadsafe(all_of_them(), served.loop).result(60)
    ((one,), none), (_, broken), (_, late), ((other,), _) = played
    assert none is None and (one.environment_score, one.num_turns) == (0.5, 1) and all(other.response_mask)
    assert "exit code 1" in broken and "broken" in broken and "did not end within 8 s" in late
    wait_for(lambda: not alive(int(file.read_text().rstrip("."))))
    logs = [(tmp_path / f"logs/p-{number}.log").read_text().splitlines()[0] for number in range(4)]
    pids, started, at_home, drawn, secrets, paths = zip(*map(json.loads, logs), strict=True)
    assert len(set(pids)) == len(set(drawn)) == 4 and len(set(started)) == 1 and started[0] not in pids
    assert all(at_home) and not any(secrets) and set(paths) == {os.environ["PATH"]}


@pytest.mark.parametrize(
    ("shared", "told"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()", "starts 1 threads"),
        ("raise KeyError('here')", "KeyError: 'here'"),
    ],
)  # fmt: skip
def test_imports_that_cannot_be_shared_are_told(serve, tmp_path, forks, shared, told):
    served = serve(["It rains."], tools=None)
    runner = AgentRunner(served.gateway, served.url, [], tmp_path / "logs", forks=forks(shared))
    with pytest.raises(EngineError, match=told):
        asyncio.run_coroutine_threadsafe(runner.play(task()), served.loop).result(60)
