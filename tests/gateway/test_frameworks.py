"""Agents of published frameworks, as they are, in front of a policy whose words are written down."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from examples.agents.calculator_task import demonstration
from examples.arithmetic import Problem
from megarl.environments.environment import Task
from megarl.gateway.agents import AgentRunner

AGENTS = Path(__file__).resolve().parents[2] / "examples/agents"
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
