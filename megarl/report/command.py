"""`megarl report`: a run folder, or several, as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.report.data import read_runs
from megarl.report.page import page
from megarl.util.files import whole_file

FILE = "report.html"


def run(options: argparse.Namespace) -> None:
    """Write the page, and say where it is: in the folder of a run, of several runs in the current folder.

    Raises:
        ValueError: a folder is no run's.
    """
    folders = [Path(folder) for folder in options.folders]
    default = folders[0] / FILE if len(folders) == 1 else Path(FILE)
    output = Path(options.output) if options.output is not None else default
    text = page(read_runs(folders))
    with whole_file(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(f"{output}: {len(text.encode()) / 1e6:.1f} MB")
