"""GSM8K as prompt files, from the Hugging Face Hub, local Parquet or JSON lines."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.files import RowErrors, iter_rows, write_parquet

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ANSWER_MARK = "####"
SPLITS = ("train", "test")
SUFFIXES = (".parquet", ".jsonl", ".json")
HUB_CONFIG = "main"

WORD_PROBLEM_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("split", pa.string()),
                    ("index", pa.int64()),
                    ("question", pa.string()),
                    ("answer", pa.string()),
                ]
            ),
        ),
    ]
)


def word_problem(
    data_source: str, prompt: str, ground_truth: str, split: str, index: int, question: str, answer: str
) -> dict[str, Any]:
    """A row of `WORD_PROBLEM_SCHEMA`: one user message, a rule reward, the teacher's answer in extra_info."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def final_answer(answer: str) -> str:
    """The final answer behind the last "####" of a teacher's answer, without thousands separators.

    Raises:
        ValueError: there is no "####", or nothing after it.
    """
    _, mark, text = answer.rpartition(ANSWER_MARK)
    text = text.replace(",", "").strip()
    if not mark or not text:
        raise ValueError(f"the answer has no {ANSWER_MARK!r} with a final answer after it: {answer[-60:]!r}")
    return text


def convert_gsm8k(source: str, out_dir: str | Path) -> dict[str, Path]:
    """Write GSM8K as prompt files, each split as `<out_dir>/<split>.parquet`.

    Args:
        source: a folder with `train*` and `test*` files (.parquet, .jsonl), directly or in `main/` as the Hub
            has them; one such file, for its own split alone; or a Hub id such as openai/gsm8k.
            Rows have `question` and `answer`.

    Returns:
        Split -> file.

    Raises:
        ValueError: no such source, a split without files, or rows without question or final answer (named).
    """
    tables: dict[str, pa.Table] = {}
    errors = RowErrors()
    for split, rows in _open_source(source).items():
        converted = []
        for path, number, row in rows:
            try:
                converted.append(_convert_row(row, split, len(converted)))
            except ValueError as error:
                errors.add(path, number, str(error))
        tables[split] = pa.Table.from_pylist(converted, schema=WORD_PROBLEM_SCHEMA)
    errors.raise_if_any()
    for split, table in tables.items():
        if not table.num_rows:
            raise ValueError(f"the {split} split of {source} has no rows")
    return {
        split: write_parquet(table, Path(out_dir) / f"{split}.parquet") for split, table in tables.items()
    }


def _convert_row(row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    for key in ("question", "answer"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise ValueError(f"{key!r} must be a non-empty string, found {json.dumps(row.get(key))}")
    return word_problem(
        DATA_SOURCE,
        f"{row['question']} {INSTRUCTION}",
        final_answer(row["answer"]),
        split,
        index,
        row["question"],
        row["answer"],
    )


_Rows = Iterable[tuple[Path, int, dict[str, Any]]]


def _open_source(source: str) -> dict[str, _Rows]:
    path = Path(source).expanduser()
    if path.is_file():
        split = next((split for split in SPLITS if path.name.startswith(split)), None)
        if split is None:
            raise ValueError(
                f"{source}: the name of a single file must begin with train or test to tell its split"
            )
        return {split: _file_rows([path])}
    if path.is_dir():
        return {split: _file_rows(_find_split(path, split)) for split in SPLITS}
    if source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return _open_hub(source)
    raise ValueError(f"{source} is neither a file, a folder nor a Hub id such as openai/gsm8k")


def _file_rows(paths: list[Path]) -> _Rows:
    return ((path, number, row) for path in paths for number, row in iter_rows(path))


def _find_split(folder: Path, split: str) -> list[Path]:
    for place in (folder, folder / HUB_CONFIG):
        for suffix in SUFFIXES:
            files = sorted(place.glob(f"{split}*{suffix}"))
            if files:
                return files
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing"
    raise ValueError(f"{folder} holds no {split}*.parquet or {split}*.jsonl, only: {found}")


def _open_hub(source: str) -> dict[str, _Rows]:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(
            f"{source} is no local file or folder; to fetch it from the Hub, install the datasets library "
            "(pip install datasets), or give a folder with its Parquet or JSON lines files"
        )
    import datasets  # optional dependency

    splits = datasets.load_dataset(source, HUB_CONFIG)
    return {
        split: ((Path(f"{source}/{split}"), number, row) for number, row in enumerate(splits[split]))
        for split in SPLITS
    }


def main(argv: list[str] | None = None) -> int:
    """`python -m megarl.data.gsm8k`: write the files of both splits; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write GSM8K as prompt files for training.")
    parser.add_argument(
        "--source",
        default="openai/gsm8k",
        help="Hub id (needs the datasets library), or a local file or folder: Parquet or JSON lines",
    )
    parser.add_argument("--out", required=True, help="folder for train.parquet and test.parquet")
    arguments = parser.parse_args(argv)
    try:
        written = convert_gsm8k(arguments.source, arguments.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for split, path in written.items():
        print(f"{split}: {pq.read_metadata(path).num_rows} rows in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
