"""An agent of the OpenAI Agents SDK that searches documents of yours, in an index of SQLite's full-text search (FTS5, which ranks by BM25).

    python -m examples.agents.search_agent DOCUMENTS.jsonl LIBRARY.db

writes the index of a JSON lines file (`{"text": ...}` a line). A row of the data has its absolute path as `extra_info.index`, and
`extra_info.answer`.
"""

import argparse
import json
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

set_tracing_disabled(True)  # traces are sent to OpenAI's servers


def write_index(documents: Path, index: Path) -> int:
    """Write the index of a file's documents; their number. What was at `index` stays until the new one is complete.

    Raises:
        ValueError: a line is no JSON object with a text.
    """
    partial = index.with_name(f"{index.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(partial)) as database, database:
            database.execute("CREATE VIRTUAL TABLE documents USING fts5(text)")
            count = database.executemany("INSERT INTO documents VALUES (?)", _texts(documents)).rowcount
        os.replace(partial, index)
    finally:
        partial.unlink(missing_ok=True)
    return max(count, 0)


def _texts(documents: Path) -> Iterator[tuple[str]]:
    with documents.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, TypeError, KeyError):
                text = None
            if not isinstance(text, str):
                raise ValueError(
                    f'{documents}, line {number}: expected {{"text": "..."}}, found {line[:80]!r}'
                )
            yield (text,)


def best_documents(index: str, query: str, number: int) -> list[str]:
    """The documents that fit a query best; each has at least one of its words."""
    words = re.findall(r"\w+", query)
    if not words:
        return []
    # Quoted, a word is no operator of FTS5's.
    match = " OR ".join(f'"{word}"' for word in words)
    # No agent writes into it, so it needs neither locks nor a folder that can be written.
    with closing(sqlite3.connect(f"{Path(index).as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        rows = database.execute(
            "SELECT text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?", (match, number)
        )
        return [text for (text,) in rows]


async def agent(task: dict[str, Any]) -> float:
    """1.0 if the agent's answer has that of the task in it."""
    told = task["extra_info"]

    @function_tool
    def search(query: str) -> str:
        """The documents that fit a query best."""
        return "\n".join(best_documents(told["index"], query, 2)) or "nothing found"

    policy = Agent(name="reader", model="policy", tools=[search])
    try:
        result = await Runner.run(policy, task["messages"], max_turns=4)
    except (MaxTurnsExceeded, ModelBehaviorError) as error:
        print(f"{type(error).__name__}: {error}")
        return 0.0
    print(result.final_output)
    return float(told["answer"].lower() in str(result.final_output).lower())


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the index of documents.")
    parser.add_argument("documents", type=Path, help='a JSON lines file, {"text": ...} a line')
    parser.add_argument("index", type=Path, help="the file to write")
    options = parser.parse_args()
    try:
        count = write_index(options.documents, options.index)
    except (OSError, ValueError, sqlite3.Error) as error:
        parser.error(str(error))
    print(f"{options.index}: {count} documents")


if __name__ == "__main__":
    main()
