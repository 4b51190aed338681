"""A calculator as a server of the Model Context Protocol, on its standard input and output."""

import re

from mcp.server.fastmcp import FastMCP

server = FastMCP("calculator", log_level="WARNING")


@server.tool()
def calculate(expression: str) -> str:
    """The value of a sum or difference of two numbers, such as 3+4."""
    found = re.fullmatch(r"(\d+)([+-])(\d+)", expression.replace(" ", ""))
    if found is None:
        return "error"
    left, right = int(found[1]), int(found[3])
    return str(left + right if found[2] == "+" else left - right)


if __name__ == "__main__":
    server.run()
