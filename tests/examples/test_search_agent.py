import importlib
import json
import sqlite3
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def agent() -> ModuleType:
    """The agent's module, imported only here: its SDK takes a second, which each process that collects tests would need."""
    pytest.importorskip("agents", reason="openai-agents is not installed (requirements/dev.txt)")
    return importlib.import_module("examples.agents.search_agent")


def test_the_index_ranks_by_bm25_and_takes_any_query(tmp_path: Path, agent: ModuleType) -> None:
    best_documents, write_index = agent.best_documents, agent.write_index
    documents, index = tmp_path / "documents.jsonl", tmp_path / "index.db"
    texts = ["cat dog", "cat", "bird NOT fish", "été à la plage"]
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert write_index(documents, index) == 4
    assert best_documents(str(index), "cat", 5) == ["cat", "cat dog"], "the shorter one first"
    assert best_documents(str(index), "cat", 1) == ["cat"]
    assert best_documents(str(index), "NOT", 5) == ["bird NOT fish"]
    assert best_documents(str(index), "Plage (", 5) == ["été à la plage"]
    for query in ("", '"', "*", "horse", "text : x"):
        assert best_documents(str(index), query, 5) == []
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        best_documents(str(tmp_path / "none.db"), "cat", 5)


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": 3}', '{"title": "a"}', ""])
def test_a_bad_line_is_named_and_the_old_index_stays(tmp_path: Path, agent: ModuleType, line: str) -> None:
    best_documents, write_index = agent.best_documents, agent.write_index
    documents, index = tmp_path / "documents.jsonl", tmp_path / "index.db"
    documents.write_text('{"text": "old"}\n')
    write_index(documents, index)
    documents.write_text(f'{{"text": "new"}}\n{line}\n')
    with pytest.raises(ValueError, match="line 2"):
        write_index(documents, index)
    assert best_documents(str(index), "old", 5) == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents.jsonl", "index.db"]
