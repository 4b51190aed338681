"""Unmodified agents of published frameworks, in front of a policy whose words are scripted."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import openai.types.responses
import pytest

from examples.agents import nemo_gym_agent
from examples.agents.calculator_task import demonstration
from examples.agents.harbor_agent import write_rows
from examples.arithmetic import Problem
from megarl.environments.environment import Task
from megarl.gateway.agents import AgentRunner
from megarl.gateway.copies import python_command

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ROOT / "examples/agents"
PROBLEM = Problem("add", 3, 4, "Tom has 3 pens and buys 4.")


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_the_agents_sdk_plays_a_session_that_is_one_trajectory_and_posts_its_reward(serve, tmp_path):
    pytest.importorskip("agents", reason="openai-agents is not installed (requirements/dev.txt)")
    words = [called("calculate", expression="3+4"), "#### 7", called("remember", what="3")]
    served = serve(words)
    command = [sys.executable, "-m", "megarl.gateway.call", str(AGENTS / "calculator_agent.py"), "agent"]
    runner = AgentRunner(served.gateway, served.url, command, tmp_path, seconds=100)
    chat = demonstration(PROBLEM, None)
    told = {"answer": chat[-1]["content"]}

    async def play():
        return [
            await runner.play(Task(f"p/{number}", PROBLEM.question, chat[:1], "math", "7", told))
            for number in range(2)
        ]

    right, wrong = asyncio.run_coroutine_threadsafe(play(), served.loop).result(200)
    ((one,), error) = right
    assert error is None and (one.environment_score, one.num_turns) == (1.0, 2)
    first, second = served.policy.asked[:2]
    live = [token for token, mask in zip(one.response_ids, one.response_mask, strict=True) if mask]
    assert live == [*first.ids, *second.ids]
    # The tool's answer follows the call in the ids of the second request.
    tokenizer = served.policy.tokenizer
    assert second.prompt_ids[: len(first.prompt_ids + first.ids)] == first.prompt_ids + first.ids
    assert "\n7\n" in tokenizer.decode(second.prompt_ids[len(first.prompt_ids + first.ids) :])
    ((other,), error) = wrong  # there is no such tool: the policy's mistake, and no failure of the agent
    assert error is None and other.environment_score == 0.0 and any(other.response_mask)


def test_the_tool_of_an_mcp_server_answers_the_policy(serve, tmp_path):
    pytest.importorskip("agents", reason="openai-agents is not installed (requirements/dev.txt)")
    served = serve([called("calculate", expression="3+4"), "#### 7"])
    command = [sys.executable, "-m", "megarl.gateway.call", str(AGENTS / "mcp_agent.py"), "agent"]
    runner = AgentRunner(served.gateway, served.url, command, tmp_path, seconds=200)
    chat = demonstration(PROBLEM, None)
    task = Task("p/0", PROBLEM.question, chat[:1], "math", "7", {"answer": chat[-1]["content"]})
    (one,), error = asyncio.run_coroutine_threadsafe(runner.play(task), served.loop).result(300)
    assert error is None and (one.environment_score, one.num_turns) == (1.0, 2)
    first, second = served.policy.asked
    added = second.prompt_ids[len(first.prompt_ids + first.ids) :]
    assert '"text":"7"' in served.policy.tokenizer.decode(added), "as this SDK writes it"


def test_an_agent_searches_an_index_of_documents(serve, tmp_path):
    pytest.importorskip("agents", reason="openai-agents is not installed (requirements/dev.txt)")
    documents, index = tmp_path / "documents.jsonl", tmp_path / "library 1.db"
    texts = ["It rains in Paris.", "The river of Rome is the Tiber.", "Rome has seven hills."]
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write = [sys.executable, "-m", "examples.agents.search_agent", str(documents), str(index)]
    written = subprocess.run(write, cwd=ROOT, capture_output=True, text=True, check=True, timeout=400)
    assert written.stdout == f"{index}: 3 documents\n"
    served = serve([called("search", query='river" OR Rome*'), "It is the Tiber."])
    command = [sys.executable, "-m", "megarl.gateway.call", str(AGENTS / "search_agent.py"), "agent"]
    runner = AgentRunner(served.gateway, served.url, command, tmp_path / "logs", seconds=200)
    question = [{"role": "user", "content": "Which river?"}]
    task = Task("p/0", "Which river?", question, "library", None, {"index": str(index), "answer": "tiber"})
    (one,), error = asyncio.run_coroutine_threadsafe(runner.play(task), served.loop).result(300)
    assert error is None and (one.environment_score, one.num_turns) == (1.0, 2)
    said = served.policy.tokenizer.decode(served.policy.asked[1].prompt_ids)
    assert texts[0] not in said, "it shares no word with the query"
    assert said.index(texts[1]) < said.index(texts[2])


TASKS = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        return [SumTask(SumData(prompt=f"{a}+2", answer=str(a + 2)), self.config.task) for a in range(8)]

__all__ = ["SumTaskset"]
"""


def test_an_environment_of_verifiers_plays_a_session_and_its_rewards_are_posted(serve, tmp_path):
    python = ROOT / "outputs/verifiers/bin/python"
    if not python.exists():
        pytest.skip(
            "verifiers has no environment of its own (docs/agents.md): python -m venv outputs/verifiers"
        )
    file = str(AGENTS / "verifiers_agent.py")
    (tmp_path / "sums_v1.py").write_text(TASKS)
    environment = {
        **{name: value for name, value in os.environ.items() if name.startswith(("SSL_", "UV_", "PIP_"))},
        "PYTHONPATH": str(tmp_path),
        "HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # has uv
    }
    config = {
        "taskset": {"id": "sums_v1"},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
    rows = [str(python), file, json.dumps(config), "rows.jsonl", "--start", "2", "--stop", "4"]
    subprocess.run(rows, cwd=tmp_path, env=environment, check=True, timeout=400)
    _, row = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["prompt"], row["extra_info"]["index"], row["data_source"]) == ("3+2", 3, "verifiers/sums_v1")
    served = serve(["5"], tools=None)
    program = python_command(str(python), "call", file, "play")
    runner = AgentRunner(
        served.gateway, served.url, program, tmp_path / "logs", seconds=200, environment=environment
    )
    task = Task("p/0", row["prompt"], None, row["data_source"], None, row["extra_info"])
    playing = asyncio.run_coroutine_threadsafe(runner.play(task), served.loop)
    (one,), error = playing.result(300)
    assert error is None and (one.environment_score, one.num_turns) == (1.0, 1)
    assert all(one.response_mask)


HARBOR = """#!PYTHON
import json, os, sys, urllib.request
from pathlib import Path
options = sys.argv[1:]
value = {name: options[options.index(name) + 1] for name in ("--path", "--trials-dir", "--trial-name", "--model", "--agent")}
instruction = Path(value["--path"], "instruction.md").read_text()
body = {"model": value["--model"].removeprefix("openai/"), "messages": [{"role": "user", "content": instruction}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
                                 {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
result = {"verifier_result": {"rewards": {"reward": 0.5, "words": len(said.split())}}, "exception_info": None}
if instruction == "Fail.":
    result = {"verifier_result": None, "exception_info": {"exception_type": "EnvironmentStartTimeoutError", "exception_message": "slow"}}
folder = Path(value["--trials-dir"], value["--trial-name"])
folder.mkdir(parents=True)
(folder / "result.json").write_text(json.dumps(result))
print("Trial completed!", options[:2])
"""


def test_harbor_plays_its_tasks_and_the_verifiers_reward_is_posted(serve, tmp_path):
    """A stand-in for `harbor` takes harbor's options and writes a result in harbor's format (harbor 0.26.0, harbor/models/trial/result.py)."""
    for name, text in (("b-rain", "Will it rain?"), ("c-fail", "Fail.")):
        (tmp_path / "tasks" / name).mkdir(parents=True)
        (tmp_path / "tasks" / name / "task.toml").write_text('schema_version = "1.4"\n')
        (tmp_path / "tasks" / name / "instruction.md").write_text(text)
    harbor = tmp_path / "bin/harbor"
    harbor.parent.mkdir()
    harbor.write_text(HARBOR.replace("PYTHON", sys.executable))
    harbor.chmod(0o755)
    file = tmp_path / "rows.jsonl"
    write_rows(tmp_path / "tasks", file, [])
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["prompt"], row["data_source"]) for row in rows] == [
        ("Will it rain?", "harbor/tasks"), ("Fail.", "harbor/tasks"),
    ]  # fmt: skip
    served = serve(["It may rain."], tools=None)
    program = python_command(None, "call", str(AGENTS / "harbor_agent.py"), "play")
    environment = {"PATH": f"{harbor.parent}:{os.environ['PATH']}"}
    runner = AgentRunner(
        served.gateway, served.url, program, tmp_path / "logs", seconds=200, environment=environment
    )

    async def play():
        return await asyncio.gather(
            *(
                runner.play(
                    Task(f"p/{number}", row["prompt"], None, row["data_source"], None, row["extra_info"])
                )
                for number, row in enumerate(rows)
            )
        )

    ((one,), error), ((other,), failed) = asyncio.run_coroutine_threadsafe(play(), served.loop).result(300)
    assert error is None and one.environment_score == 0.5 and all(one.response_mask)
    assert json.loads(one.environment_notes)["numbers"]["harbor_words"] == 3.0
    assert "no reward: EnvironmentStartTimeoutError: slow" in failed and not any(other.response_mask)


class Counters(BaseHTTPRequestHandler):
    """NeMo Gym's example_session_state_mgmt (nemo-gym 0.4.0, resources_servers/): one counter for each session, which a cookie identifies."""

    counters: ClassVar[dict[str, int]] = {}
    verified: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        session = SimpleCookie(self.headers.get("Cookie", ""))
        key = session["gym"].value if "gym" in session else str(len(self.counters))
        answer: dict[str, Any] = {}
        if self.path == "/seed_session":
            self.counters[key] = body["initial_count"]
        elif self.path == "/increment_counter":
            self.counters[key] += body["count"]
            answer = {"success": True}
        elif self.path == "/get_counter_value":
            answer = {"count": self.counters[key]}
        elif self.path == "/verify":
            self.verified.append(body)
            answer = {**body, "reward": float(body["expected_count"] == self.counters[key])}
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Set-Cookie", f"gym={key}; path=/; httponly")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None: ...


def test_a_resources_server_of_nemo_gym_answers_calls_and_verifies_the_session(serve, tmp_path):
    gym = ThreadingHTTPServer(("127.0.0.1", 0), Counters)
    threading.Thread(target=gym.serve_forever, daemon=True).start()
    tools = [
        {"name": name, "type": "function", "strict": True, "description": "", "parameters": {"type": "object", "properties": {}}}
        for name in ("increment_counter", "get_counter_value", "forget")
    ]  # fmt: skip
    asked = {"input": [{"role": "user", "content": "add 1 then get the count"}], "tools": tools}
    rows = tmp_path / "example.jsonl"
    rows.write_text(
        json.dumps({"responses_create_params": asked, "expected_count": 4, "initial_count": 3}) + "\n"
    )
    nemo_gym_agent.write_rows(rows, tmp_path / "train.jsonl", f"http://127.0.0.1:{gym.server_port}", 4)
    row = json.loads((tmp_path / "train.jsonl").read_text())
    assert (row["prompt"], row["data_source"]) == ("add 1 then get the count", "nemo_gym/example")
    served = serve(
        [called("increment_counter", count=1), called("forget"), called("get_counter_value"), "It is 4."]
    )
    command = python_command(None, "call", str(AGENTS / "nemo_gym_agent.py"), "agent")
    runner = AgentRunner(served.gateway, served.url, command, tmp_path / "logs", seconds=200)
    task = Task("p/0", row["prompt"], None, row["data_source"], None, row["extra_info"])
    playing = asyncio.run_coroutine_threadsafe(runner.play(task), served.loop)
    (one,), error = playing.result(300)
    gym.shutdown()
    gym.server_close()
    assert error is None and (one.environment_score, one.num_turns) == (1.0, 4)
    # The verifier gets a response of OpenAI's class, with all items that the session has added.
    (verified,) = Counters.verified
    items = verified["response"]["output"]
    assert [item["type"] for item in items] == ["function_call", "function_call_output"] * 3 + ["message"]
    policys = [item for item in items if item["type"] != "function_call_output"]
    openai.types.responses.Response.model_validate({**verified["response"], "output": policys})
    assert '{"count": 4}' in served.policy.tokenizer.decode(served.policy.asked[-1].prompt_ids)
