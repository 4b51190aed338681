"""An agent of the OpenAI Agents SDK with a calculator.

The SDK reads the address of the policy and its key from the environment, as it does for OpenAI's own models. What the policy does wrong
(no such tool, too many turns) has score 0; any other exception ends the process, and the session is not trained on.
"""

import re
from typing import Any

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

set_tracing_disabled(True)  # traces are sent to OpenAI's servers


@function_tool
def calculate(expression: str) -> str:
    """The value of a sum or difference of two numbers, such as 3+4."""
    found = re.fullmatch(r"(\d+)([+-])(\d+)", expression.replace(" ", ""))
    if found is None:
        return "error"
    left, right = int(found[1]), int(found[3])
    return str(left + right if found[2] == "+" else left - right)


async def agent(task: dict[str, Any]) -> float:
    """1.0 if the agent's answer to the task is right."""
    policy = Agent(name="calculator", model="policy", tools=[calculate])
    try:
        result = await Runner.run(policy, task["messages"], max_turns=3)
    except (MaxTurnsExceeded, ModelBehaviorError) as error:
        print(f"{type(error).__name__}: {error}")
        return 0.0
    print(result.final_output)
    return float(str(result.final_output).strip() == task["extra_info"]["answer"])
