"""The process of a step: `python -m megarl.gpu_test.process MODULE:FUNCTION FOLDER FILE`; its checks go to the file, a line each."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path


def main() -> None:
    function, folder, out = sys.argv[1:]
    module, _, name = function.partition(":")
    with Path(out).open("w", encoding="utf-8") as file:
        for check in getattr(import_module(module), name)(Path(folder)):
            file.write(json.dumps(asdict(check)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
