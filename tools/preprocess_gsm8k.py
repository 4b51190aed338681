#!/usr/bin/env python
"""Write GSM8K as train.parquet and test.parquet for training (see megarl/data/gsm8k.py).

Example: python tools/preprocess_gsm8k.py --source openai/gsm8k --out data/gsm8k
"""

import argparse
import sys

import pyarrow.parquet as pq

from megarl.data.gsm8k import convert_gsm8k


def main(argv: list[str] | None = None) -> int:
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
