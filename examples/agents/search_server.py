"""A search over the documents of a JSON lines file (`{"text": ...}` a line), as an MCP server on its standard input and output.

python search_server.py DOCUMENTS.jsonl
"""

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

from mcp.server.fastmcp import FastMCP

server = FastMCP("library", log_level="WARNING")


class Index:
    """Ranks documents by the words that they share with a query; rare words count more."""

    def __init__(self, texts: list[str]) -> None:
        self._documents = [(text, set(words(text))) for text in texts]
        self._counts = Counter(word for _, found in self._documents for word in found)

    def best(self, query: str, number: int) -> list[str]:
        """Documents with at least one word of the query, the best first; equal ones in their order."""
        wanted = set(words(query))
        scored = [(self._score(wanted & found), text) for text, found in self._documents]
        return [text for score, text in sorted(scored, key=lambda one: -one[0])[:number] if score > 0]

    def _score(self, shared: set[str]) -> float:
        return sum(math.log(1 + len(self._documents) / self._counts[word]) for word in shared)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def main() -> None:
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    index = Index([json.loads(line)["text"] for line in lines])

    @server.tool()
    def search(query: str) -> str:
        """The documents that fit a query best."""
        return "\n".join(index.best(query, 2)) or "nothing found"

    server.run()


if __name__ == "__main__":
    main()
