"""An agent of the OpenAI Agents SDK whose tools are those of an MCP server: the calculator of mcp_server.py, or any other that runs as a command.

It plays the tasks of calculator_agent.py. A row of the data may name another server, as the list of a program and its arguments, in
`extra_info.server`.
"""

import sys
from pathlib import Path
from typing import Any

from agents import Agent, Runner, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from agents.mcp import MCPServerStdio

set_tracing_disabled(True)  # traces are sent to OpenAI's servers

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


async def agent(task: dict[str, Any]) -> float:
    """1.0 if the agent's answer to the task is right."""
    program, *arguments = task["extra_info"].get("server") or SERVER
    # The server is a process of the agent's, and ends with it.
    async with MCPServerStdio(
        params={"command": program, "args": arguments}, client_session_timeout_seconds=60
    ) as server:
        policy = Agent(name="calculator", model="policy", mcp_servers=[server])
        try:
            result = await Runner.run(policy, task["messages"], max_turns=3)
        except (MaxTurnsExceeded, ModelBehaviorError) as error:
            print(f"{type(error).__name__}: {error}")
            return 0.0
    print(result.final_output)
    return float(str(result.final_output).strip() == task["extra_info"]["answer"])
