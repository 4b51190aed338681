"""Agents of published frameworks, as they are, in front of a policy whose words are written down."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.agents.calculator_task import demonstration
from examples.arithmetic import Problem
from megarl.environments.environment import Task
from megarl.gateway.agents import AgentRunner

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


def test_the_tools_of_an_mcp_server_answer_the_policy(serve, tmp_path):
    pytest.importorskip("agents", reason="openai-agents is not installed (requirements/dev.txt)")
    documents = tmp_path / "documents.jsonl"
    texts = ["It rains in Paris.", "The river of Rome is the Tiber.", "Rome has seven hills."]
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    served = serve([called("search", query="river Rome"), "It is the Tiber."])
    command = [sys.executable, "-m", "megarl.gateway.call", str(AGENTS / "search_agent.py"), "agent"]
    runner = AgentRunner(served.gateway, served.url, command, tmp_path / "logs", seconds=200)
    question = [{"role": "user", "content": "Which river?"}]
    told = {"documents": str(documents), "answer": "Tiber"}
    playing = asyncio.run_coroutine_threadsafe(
        runner.play(Task("p/0", "Which river?", question, "library", None, told)), served.loop
    )
    (one,), error = playing.result(300)
    assert error is None and (one.environment_score, one.num_turns) == (1.0, 2)
    said = served.policy.tokenizer.decode(served.policy.asked[1].prompt_ids)
    assert (
        texts[1] in said and texts[0] not in said
    )  # the best two, and the one without a shared word is none
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
    program = [str(python), str(AGENTS / "verifiers_agent.py")]
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
    rows = [*program, json.dumps(config), "rows.jsonl", "--start", "2", "--stop", "4"]
    subprocess.run(rows, cwd=tmp_path, env=environment, check=True, timeout=200)
    _, row = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["prompt"], row["extra_info"]["index"], row["data_source"]) == ("3+2", 3, "verifiers/sums_v1")
    served = serve(["5"], tools=None)
    runner = AgentRunner(
        served.gateway, served.url, program, tmp_path / "logs", seconds=200, environment=environment
    )
    task = Task("p/0", row["prompt"], None, row["data_source"], None, row["extra_info"])
    playing = asyncio.run_coroutine_threadsafe(runner.play(task), served.loop)
    (one,), error = playing.result(300)
    assert error is None and (one.environment_score, one.num_turns) == (1.0, 1)
    assert all(one.response_mask)
