"""An agent of the OpenAI Agents SDK whose tools are those of an MCP server: a search over the documents that the task names.

A row of the data has `extra_info.documents` (a JSON lines file, as an absolute path) and `extra_info.answer`.
"""

import sys
from pathlib import Path
from typing import Any

from agents import Agent, Runner, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from agents.mcp import MCPServerStdio

set_tracing_disabled(True)  # traces are sent to OpenAI's servers

SERVER = Path(__file__).with_name("search_server.py")


async def agent(task: dict[str, Any]) -> float:
    """1.0 if the agent's answer has that of the task in it."""
    program = {"command": sys.executable, "args": [str(SERVER), task["extra_info"]["documents"]]}
    async with MCPServerStdio(params=program, client_session_timeout_seconds=60) as library:
        policy = Agent(name="reader", model="policy", mcp_servers=[library])
        try:
            result = await Runner.run(policy, task["messages"], max_turns=4)
        except (MaxTurnsExceeded, ModelBehaviorError) as error:
            print(f"{type(error).__name__}: {error}")
            return 0.0
    return float(task["extra_info"]["answer"].lower() in str(result.final_output).lower())
